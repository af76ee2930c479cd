"""Samplers as the cluster runs them: Ray actors, whose processes may die at any moment."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from sampler_examples import CONFIG, CONTEXT, TOLERANCE, Reference, make_weights, write_checkpoint
from sglang_server import DocumentedServer

from actors.routing import RemoteSampler
from actors.samplers.contract import Generation, SamplerError, SamplingParams
from actors.samplers.local import LocalSampler
from actors.samplers.sglang.sampler import SglangJaxSampler
from cluster.loading import load_config
from cluster.publication import Broadcaster, ObjectStore, make_transport
from cluster.sampler_pool import SamplerPool
from learner.publisher import BroadcastError

ROOT = Path(__file__).parents[2]
SAMPLERS = {"local": LocalSampler, "sglang_jax": SglangJaxSampler}


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.mark.parametrize("kind", SAMPLERS)
def test_an_actor_samples_and_fails_everyone_once_when_its_process_is_killed(
    local_ray: None, tmp_path: Path, kind: str
) -> None:
    make: Any = ray.remote(num_cpus=0, max_concurrency=1000)(SAMPLERS[kind])
    actor = make.remote(
        model=write_checkpoint(tmp_path),
        slots=2,
        context_length=CONTEXT,
        on_update="recompute",
        seed=0,
        name="sampler-0",
    )
    broadcast = Broadcaster(ObjectStore(), {}, timeout_seconds=250.0)
    broadcast(0, make_weights(0))
    assert broadcast.admit("sampler-0", actor) == 0
    prompt = np.arange(10) % CONFIG.vocab_size

    async def use() -> tuple[Generation, list[Any]]:
        sampler = RemoteSampler("sampler-0", actor)
        generation = await sampler.generate(prompt, SamplingParams(max_tokens=20))
        calls = [asyncio.ensure_future(sampler.generate(prompt, SamplingParams(max_tokens=150))) for _ in range(8)]
        while not (await actor.status.remote())["running"]:
            await asyncio.sleep(0.01)
        update = asyncio.ensure_future(asyncio.to_thread(broadcast, 1, make_weights(1)))
        os.kill(await actor.__ray_call__.remote(lambda self: os.getpid()), signal.SIGKILL)
        return generation, await asyncio.gather(*calls, update, return_exceptions=True)

    generation, outcomes = asyncio.run(asyncio.wait_for(use(), 120))
    assert Reference({0: make_weights(0)}).worst_difference(prompt, generation) <= TOLERANCE
    *failures, _ = outcomes  # the update may have been acknowledged before
    assert any(isinstance(failure, SamplerError) for failure in failures)
    for failure in failures:
        assert isinstance(failure, Generation | SamplerError)
        assert "\n" not in str(failure)
    broadcast(2, make_weights(2))  # the dead are waited for no more
    with pytest.raises(BroadcastError, match="sampler-1 did not take version 2: its process was killed") as caught:
        broadcast.admit("sampler-1", actor)
    assert "\n" not in str(caught.value)


def test_a_sampler_that_dies_during_a_publication_does_not_hold_it_up(local_ray: None, tmp_path: Path) -> None:
    make: Any = ray.remote(num_cpus=0, max_concurrency=100)(LocalSampler)
    model = write_checkpoint(tmp_path)
    arguments = {"model": model, "slots": 2, "context_length": CONTEXT, "on_update": "recompute", "seed": 0}
    samplers = {name: make.remote(**arguments, name=name) for name in ("dies", "lives")}
    broadcast = Broadcaster(ObjectStore(), samplers, timeout_seconds=100.0)
    broadcast(0, make_weights(0))
    process = ray.get(samplers["dies"].__ray_call__.remote(lambda self: os.getpid()))
    os.kill(process, signal.SIGSTOP)  # it has the update, and will never acknowledge it
    publishing = threading.Thread(target=broadcast, args=(1, make_weights(1)), daemon=True)
    publishing.start()
    while ray.get(samplers["lives"].status.remote())["version"] != 1:
        pass
    assert publishing.is_alive(), "it did not wait for a sampler that may still answer"
    os.kill(process, signal.SIGKILL)
    publishing.join(60)
    assert not publishing.is_alive()
    broadcast(2, make_weights(2))
    assert ray.get(samplers["lives"].status.remote())["version"] == 2


def test_the_cluster_starts_a_client_for_every_url(
    local_ray: None, documented: DocumentedServer, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    overrides = [
        "sampler.kind=sglang",
        f"sampler.urls=[{documented.url}]",
        "sampler.transport=folder",
        f"sampler.weights_folder={tmp_path / 'published'}",
        "sampler.context_length=64",
        "run.seed=3",
    ]
    config = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
    samplers = SamplerPool(config, "run", write_checkpoint(tmp_path / "model"), print).handles
    assert list(samplers) == ["sampler-0"]
    transport = make_transport(config.sampler, "run", tmp_path / "model")
    Broadcaster(transport, samplers, timeout_seconds=60.0)(5, make_weights(5))

    async def sample() -> Generation:
        return await RemoteSampler("sampler-0", samplers["sampler-0"]).generate([1, 2], SamplingParams(max_tokens=99))

    generation = asyncio.run(asyncio.wait_for(sample(), 60))
    assert len(generation.tokens) == 62, "the context length is not the configured one"
    assert set(generation.versions.tolist()) == {5}
    assert Reference({5: make_weights(5)}).worst_difference(np.array([1, 2]), generation) <= TOLERANCE
