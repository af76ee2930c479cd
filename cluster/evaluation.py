"""Evaluation: the policy plays the held-out tasks, greedily unless ``evaluation`` says otherwise."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, TypedDict

import numpy as np
import ray

from actors.episode import Sampling
from cluster.config import Config
from cluster.display import Display, open_display
from cluster.errors import ConfigError
from cluster.inputs import check_environment, check_model_folder, check_sampler
from cluster.publication import Broadcaster, make_transport
from cluster.sampler_pool import SamplerPool
from cluster.services import start_workers
from cluster.session import Stopped, session
from cluster.waiting import START_SECONDS, wait_until_up
from learner.models.weights import read_model, to_hf

EVALUATION_SECONDS = 3600.0
"""Longest that one evaluation may take."""
_LOOK_SECONDS = 0.5


class Evaluation(TypedDict):
    """How the policy did, over the episodes that it brought to an end itself."""

    success_mean: float
    reward_mean: float
    turns_mean: float
    episodes: int
    episodes_failed: int
    """Episodes that ended through no fault of the policy; they are not counted elsewhere."""


class EvaluationRun:
    """One evaluation under way on some workers.

    Args:
        config: the seeds are ``task.eval_seed_start`` and the ``task.eval_tasks`` that follow; ``evaluation`` says how
            replies are drawn.
        workers: handles by name; the seeds are dealt to them in turn.
    """

    def __init__(self, config: Config, workers: Mapping[str, Any]) -> None:
        start, count = config.task.eval_seed_start, config.task.eval_tasks
        self.total = count
        sampling = Sampling(**config.evaluation.model_dump())
        self._started = time.monotonic()
        self._pending = [
            worker.evaluate.remote(list(range(start + position, start + count, len(workers))), sampling)
            for position, worker in enumerate(workers.values())
        ]
        self._episodes: list[dict[str, Any]] = []

    def finished(self, wait_seconds: float) -> bool:
        """Whether all episodes are over, after waiting for that at most ``wait_seconds``.

        Raises:
            TimeoutError: it takes longer than ``EVALUATION_SECONDS``.
        """
        done, self._pending = ray.wait(self._pending, num_returns=len(self._pending), timeout=wait_seconds)
        for episodes in ray.get(done):
            self._episodes += episodes
        if self._pending and time.monotonic() - self._started > EVALUATION_SECONDS:
            raise TimeoutError(f"the evaluation is not over after {EVALUATION_SECONDS:.0f} s; it waits for the workers")
        return not self._pending

    def result(self) -> Evaluation:
        """The outcome; call it once :meth:`finished`."""
        return summarise(self._episodes)


def evaluate_policy(
    config: Config, workers: Mapping[str, Any], display: Display, title: str, watch: Callable[[], None]
) -> Evaluation:
    """Evaluate and show the progress; ``watch`` is called twice a second, and what it raises ends the evaluation."""
    before = _episodes_ended(workers)
    run = EvaluationRun(config, workers)
    display.phase(title, run.total)
    while not run.finished(_LOOK_SECONDS):
        watch()
        display.progress(min(run.total, _episodes_ended(workers) - before))
    outcome = run.result()
    display.progress(run.total, f"success {outcome['success_mean']:.1%}")
    return outcome


def summarise(episodes: Sequence[Mapping[str, Any]]) -> Evaluation:
    """Means over the episodes that the policy itself brought to an end.

    Raises:
        RuntimeError: there is none.
    """
    ended = [episode for episode in episodes if episode["trainable"]]
    failed = len(episodes) - len(ended)
    if not ended:
        error = next((episode.get("error") for episode in episodes), None)
        raise RuntimeError(f"all {failed} evaluation episodes failed; the first said: {error}")
    success, reward, turns = (
        float(np.mean([float(episode[name]) for episode in ended])) for name in ("success", "reward", "turns")
    )
    return {
        "success_mean": success,
        "reward_mean": reward,
        "turns_mean": turns,
        "episodes": len(ended),
        "episodes_failed": failed,
    }


def _episodes_ended(workers: Mapping[str, Any]) -> int:
    statuses = ray.get([worker.status.remote() for worker in workers.values()], timeout=30)
    return sum(sum(status["episodes"].values()) for status in statuses)


def evaluate(config: Config) -> int:
    """``headrace eval``: evaluate the model at ``model.path``; returns the exit status.

    Raises:
        ConfigError: ``model.path`` is not given.
        ModelError, ChatError: the folder cannot be used.
    """
    settings, path = config.telemetry, config.model.path
    if path is None:
        raise ConfigError("model.path=null: expected the folder of the model to evaluate, such as runs/NAME/model")
    check_environment(config)
    check_model_folder(config)
    check_sampler(config)
    model, params = read_model(path)
    with ExitStack() as stack:
        display = stack.enter_context(open_display(settings.display, plain_every_seconds=settings.plain_every_seconds))
        display.phase("starting Ray")
        work = stack.enter_context(session(config))
        try:
            display.phase("compiling the sampler")
            pool = SamplerPool(config, "eval", path, display.note)
            samplers = pool.handles
            wait_until_up(samplers, work.watch)
            transport = stack.enter_context(closing(make_transport(config.sampler, f"eval-{os.getpid()}", path)))
            Broadcaster(transport, samplers, timeout_seconds=START_SECONDS)(0, to_hf(model, params))
            workers = start_workers(config, "eval", "eval", path, samplers, buffer_url="")

            def watch() -> None:
                work.watch()
                pool.check()

            outcome = evaluate_policy(config, workers, display, f"evaluating {path}", watch)
        except Stopped:
            return work.stop.exit_status
        display.outcome(
            "evaluated",
            {
                "success": f"{outcome['success_mean']:.1%}",
                "reward": f"{outcome['reward_mean']:.3f}",
                "turns": f"{outcome['turns_mean']:.1f}",
                "episodes": str(outcome["episodes"]),
            },
        )
    return 0
