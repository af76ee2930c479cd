"""The pool over real samplers in Ray actors, which are killed, stopped, added and taken away.

``Asker`` stands for a worker: it asks through the worker's router. ``Weights`` stands for the learner: it publishes
through the learner's broadcaster, and remembers for whom a publication would wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from sampler_examples import CONTEXT, make_weights, write_checkpoint

from actors.routing import Router
from actors.samplers.contract import SamplingParams
from cluster import sampler_pool
from cluster.config import Config
from cluster.errors import ServiceDied
from cluster.loading import load_config
from cluster.publication import Broadcaster, ObjectStore
from cluster.sampler_pool import SamplerPool
from cluster.waiting import wait_until_up

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "sampler.slots=2",
    f"sampler.context_length={CONTEXT}",
    f"learner.row_lengths=[{CONTEXT}]",
    "sampler.cpus=0.5",
    "sampler.stall_seconds=5",
]


class Asker:
    """Asks through a worker's router."""

    def __init__(self, samplers: dict[str, Any]) -> None:
        self.router = Router(samplers)

    async def set_samplers(self, samplers: dict[str, Any]) -> None:
        await self.router.set_samplers(samplers)

    async def ask(self, count: int) -> list[tuple[str, int]]:
        """Name of the sampler and oldest version, for requests that run at once."""

        async def one() -> tuple[str, int]:
            with self.router.route() as route:
                generation = await route.generate(np.arange(10), SamplingParams(max_tokens=100))
                assert len(generation.tokens) == 100
                return route.name, int(generation.versions.min())

        return list(await asyncio.gather(*(one() for _ in range(count))))

    async def asked_again(self) -> int:
        return self.router.asked_again


class Publishing(Broadcaster):
    """The learner's broadcaster, in an actor as the learner is one."""

    def __init__(self) -> None:
        super().__init__(ObjectStore(), {}, timeout_seconds=60.0)

    def publish(self, version: int) -> None:
        self(version, make_weights(version))


class Weights:
    """Publishes to those that the pool admits."""

    def __init__(self) -> None:
        self.version = 0
        self.samplers: dict[str, Any] = {}
        self.actor = ray.remote(num_cpus=0, max_concurrency=8)(Publishing).remote()
        self.publish(0)

    def publish(self, version: int) -> None:
        self.version = version
        ray.get(self.actor.publish.remote(version), timeout=60)

    def admit_sampler(self, name: str, handle: Any) -> Any:
        self.samplers[name] = handle
        return self.actor.admit.remote(name, handle)

    def dismiss_sampler(self, name: str) -> None:
        self.samplers.pop(name, None)
        self.actor.dismiss.remote(name)


class Cluster:
    """A pool at work."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.notes: list[str] = []
        self.pool = SamplerPool(config, f"run-{time.monotonic()}", folder, self.notes.append)
        wait_until_up(self.pool.handles, lambda: None)
        self.weights = Weights()
        ray.get([self.weights.admit_sampler(name, handle) for name, handle in self.pool.handles.items()], timeout=60)
        self.weights.publish(1)
        self.asker = ray.remote(num_cpus=0)(Asker).remote(self.pool.handles)
        self.pool.serve(self.weights, {"worker-0": self.asker})  # type: ignore[arg-type]

    def until(self, happened: Callable[[], bool]) -> None:
        """Look after the samplers until it happened; pytest's own limit ends a wait that never ends."""
        while not happened():
            self.pool.look()
            time.sleep(0.05)

    def within(self, name: str, work: Callable[[Any], Any]) -> Any:
        """Do something inside a sampler's process."""
        return ray.get(self.pool.handles[name].__ray_call__.remote(work), timeout=60)

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.within(name, lambda self: os.getpid()), number)

    def ask(self, count: int) -> list[tuple[str, int]]:
        """As ``Asker.ask``, while the pool is looked after."""
        call = self.asker.ask.remote(count)
        self.until(lambda: bool(ray.wait([call], timeout=0)[0]))
        answers: list[tuple[str, int]] = ray.get(call)
        return answers

    def said(self, part: str) -> bool:
        return any(part in note for note in self.notes)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    paths = os.pathsep.join([str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(local_ray: None, folder: Path) -> Cluster:
    return Cluster(load_config(ROOT / "configs" / "quickstart.yaml", SETTINGS), folder)


@pytest.mark.parametrize(
    ("strike", "problem"),
    [
        pytest.param(lambda name, cluster: cluster.signal(name, signal.SIGKILL), "its process was killed", id="killed"),
        pytest.param(
            lambda name, cluster: cluster.signal(name, signal.SIGSTOP),
            "it did not say how it is",
            id="frozen",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda name, cluster: cluster.within(name, lambda self: setattr(self._engine, "step", None)),
            "the engine failed (TypeError",
            id="failed",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_sampler_that_fails_is_started_anew_and_asked_once_it_has_the_current_weights(
    cluster: Cluster, strike: Callable[[str, Cluster], Any], problem: str
) -> None:
    pool, weights = cluster.pool, cluster.weights
    before, lives, asked_again = pool.handles, pool.restarts, ray.get(cluster.asker.asked_again.remote())
    weights.publish(weights.version + 1)
    asked = cluster.asker.ask.remote(6)  # more than it has slots: some are in flight whenever it fails
    strike("sampler-0", cluster)
    cluster.until(lambda: pool.serving == 0)
    assert problem in cluster.notes[-1] and "starting it anew" in cluster.notes[-1]
    assert weights.samplers == {}, "publications still wait for it"
    weights.publish(weights.version + 1)
    cluster.until(lambda: pool.serving == 1)
    assert pool.handles["sampler-0"] != before["sampler-0"] and pool.restarts == lives + 1
    assert set(weights.samplers) == {"sampler-0"}
    cluster.until(lambda: bool(ray.wait([asked], timeout=0)[0]))
    assert len(ray.get(asked)) == 6, "a request was lost"
    assert ray.get(cluster.asker.asked_again.remote()) > asked_again
    assert set(cluster.ask(2)) == {("sampler-0", weights.version)}
    cluster.until(lambda: pool.oldest_version == weights.version)


def test_samplers_come_and_go_while_they_are_asked(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_pool, "UNPLACED_SECONDS", 0.5)
    pool, asked_again = cluster.pool, ray.get(cluster.asker.asked_again.remote())
    pool.scale(3)  # of half a CPU each, and there is one
    assert (pool.wanted, pool.serving) == (3, 1)
    cluster.until(lambda: pool.serving == 2)
    assert list(pool.handles) == ["sampler-0", "sampler-1", "sampler-2"]
    cluster.until(lambda: cluster.said("sampler-2 waits for 0.5 free CPUs"))
    assert {name for name, _ in cluster.ask(4)} == {"sampler-0", "sampler-1"}

    asked, leaving = cluster.asker.ask.remote(6), pool.handles["sampler-1"]
    while not ray.get(leaving.status.remote(), timeout=60)["running"]:
        pass
    pool.scale(1)
    assert pool.serving == pool.wanted == 1
    cluster.until(lambda: len(pool.handles) == 1)
    assert list(pool.handles) == list(cluster.weights.samplers) == ["sampler-0"]
    assert len(ray.get(asked, timeout=60)) == 6
    assert ray.get(cluster.asker.asked_again.remote()) == asked_again, "it was ended before it had answered"
    pool.scale(2)
    assert list(pool.handles) == ["sampler-0", "sampler-3"], "a name was used twice"
    pool.scale(1)
    cluster.until(lambda: len(pool.handles) == 1)


@pytest.mark.slow
def test_a_sampler_that_dies_while_it_leaves_is_not_waited_for(cluster: Cluster) -> None:
    pool = cluster.pool
    pool.scale(2)
    cluster.until(lambda: pool.serving == 2)
    asked, leaving = cluster.asker.ask.remote(6), list(pool.handles)[1]
    while not ray.get(pool.handles[leaving].status.remote(), timeout=60)["running"]:
        pass
    cluster.signal(leaving, signal.SIGSTOP)  # lest it finishes
    pool.scale(1)
    due = time.monotonic() + pool._settings.request_timeout_seconds
    cluster.until(lambda: len(pool.handles) == 1)
    assert time.monotonic() < due, "its requests had their whole time although nobody worked on them"
    assert len(ray.get(asked, timeout=60)) == 6, "a request was lost"


@pytest.mark.slow
def test_samplers_are_admitted_a_few_at_a_time(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_pool, "MOST_ADMISSIONS", 0)
    pool = cluster.pool
    pool.scale(2)
    cluster.until(lambda: all(member.up for member in pool._members.values()))
    for _ in range(20):
        pool.look()
    assert pool.serving == 1
    monkeypatch.setattr(sampler_pool, "MOST_ADMISSIONS", 1)
    cluster.until(lambda: pool.serving == 2)
    pool.scale(1)
    cluster.until(lambda: len(pool.handles) == 1)


@pytest.mark.slow
def test_a_sampler_that_fails_too_often_ends_the_run(cluster: Cluster, folder: Path) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", [*SETTINGS, "sampler.max_restarts=0"])
    other = Cluster(config, folder)
    other.signal("sampler-0", signal.SIGKILL)
    with pytest.raises(
        ServiceDied, match=r"sampler-0 was started anew 0 times and failed again: its process was killed"
    ):
        other.until(lambda: False)
    assert other.weights.samplers == {}


def test_impossible_numbers_of_samplers_are_refused(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="0 samplers"):
        cluster.pool.scale(0)
