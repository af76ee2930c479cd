"""``headrace train``: warm start, evaluation, reinforcement learning, evaluation.

The driver owns the order of things and nothing else: it starts the services, watches them, shows and
records what they report, and stops them in the order that loses nothing.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray

from buffer import Buffer
from cluster.config import Config
from cluster.display import Display, open_display
from cluster.evaluation import EvaluationRun, evaluate_policy
from cluster.monitor import Monitor
from cluster.plots import plot_learning_curve
from cluster.policy import check_model_folder, prepare_policy
from cluster.ray_runtime import ray_runtime
from cluster.runfolder import RunFolder
from cluster.services import (
    START_SECONDS,
    buffer_service,
    start_learner,
    start_samplers,
    start_workers,
    wait_for,
    wait_until_up,
)
from cluster.signals import StopRequest, stop_on_signals
from cluster.summary import outcome_rows, summarise_run

POLL_SECONDS = 1.0
"""From one look at the services to the next."""
DRAIN_SECONDS = 1.0
"""What running episodes get to finish in once the learner needs no more of them."""
STOP_SECONDS = 120.0
"""Longest that the learner may take to finish its step and save, and a worker to give back its slots."""


class Stopped(Exception):
    """The run was asked to stop, and there is nothing to finish."""


def train(config: Config) -> int:
    """Run the whole job; returns the exit status: 0, or 130 or 143 when asked to stop."""
    started = time.monotonic()
    settings = config.telemetry
    check_model_folder(config)
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder.open(config))
        display = stack.enter_context(open_display(settings.display, plain_every_seconds=settings.plain_every_seconds))
        display.note(f"run {folder.name}, kept in {folder.root}")
        if folder.notice:
            display.note(folder.notice)
        display.phase("starting Redis and Ray")
        url, buffer = stack.enter_context(buffer_service(config, folder))
        stack.enter_context(ray_runtime(dashboard=settings.dashboard, metrics_port=settings.metrics_port))
        stop = stack.enter_context(stop_on_signals())
        run = TrainingRun(config, folder, display, stop)
        finished = False
        try:
            run.start(buffer, url)
            finished = run.train()
            if finished:
                run.conclude()
        except Stopped:
            pass
        run.report(finished, seconds=time.monotonic() - started)
        return stop.exit_status


class TrainingRun:
    """One training run: its services, in the order in which they start, work and stop."""

    def __init__(self, config: Config, folder: RunFolder, display: Display, stop: StopRequest) -> None:
        self._config, self._folder, self._display, self._stop = config, folder, display, stop
        self._monitor: Monitor | None = None
        self._evaluation: EvaluationRun | None = None
        self._evaluated_step = 0

    def start(self, buffer: Buffer, buffer_url: str) -> None:
        """Make the policy, start every service, and evaluate what training starts from.

        Raises:
            Stopped: asked to stop.
        """
        config, folder = self._config, self._folder
        model_folder = prepare_policy(config, folder, self._display, self._watch)
        self._display.phase("compiling sampler and learner")
        self._learner = start_learner(config, folder.name)
        self._samplers = start_samplers(config, folder.name, model_folder)
        wait_until_up(self._samplers, self._watch)
        self._workers = start_workers(config, folder.name, folder.run_id, model_folder, self._samplers, buffer_url)
        wait_until_up(self._workers, self._watch)
        step = self._start_learner(model_folder, buffer_url)
        self._monitor = Monitor(
            folder,
            self._display,
            buffer,
            learner=self._learner,
            samplers=self._samplers,
            workers=self._workers,
            staleness_limit=config.buffer.max_staleness,
        )
        if step:
            self._display.note(f"going on from the checkpoint of step {step}")
        elif not any(record["kind"] == "evaluation" for record in folder.read_metrics()):
            self._evaluate("evaluating the policy that training starts from", step=0)

    def train(self) -> bool:
        """Let workers play and the learner train; returns whether all steps were made.

        Whatever ends it, the learner has saved and the workers have given back their slots.

        Raises:
            RayTaskError, RayActorError: a service failed.
        """
        self._display.phase("training", self._config.learner.steps)
        playing = [worker.run.remote() for worker in self._workers.values()]
        training = self._learner.train.remote()
        monitor = self._started()
        stop_deadline: float | None = None
        while not ray.wait([training], timeout=POLL_SECONDS)[0]:
            if self._stop.requested.is_set() and stop_deadline is None:
                stop_deadline = time.monotonic() + STOP_SECONDS
                self._display.note("stopping: finishing the step in hand and saving")
                self._learner.stop.remote()
            if stop_deadline is None:
                ray.get(ray.wait(playing, timeout=0)[0])  # a worker ends before it is drained only by failing
            elif time.monotonic() > stop_deadline:
                raise TimeoutError(f"the learner did not finish its step and save within {STOP_SECONDS:.0f} s")
            monitor.look()
            self._evaluate_beside_training(monitor.steps)
        steps = ray.get(training)
        self._drain(playing)
        monitor.look()
        return bool(steps >= self._config.learner.steps)

    def conclude(self) -> None:
        """Write the trained policy as a Hugging Face folder and evaluate it.

        Raises:
            Stopped: asked to stop.
        """
        writing = self._learner.write_model.remote(self._folder.model)
        wait_for([writing], self._watch, seconds=START_SECONDS, whom="the learner")
        while self._evaluation is not None and not self._take_evaluation(POLL_SECONDS):
            self._watch()
        self._evaluate("evaluating the trained policy", step=self._config.learner.steps)
        self._started().collect()

    def report(self, finished: bool, *, seconds: float) -> None:
        """Write summary and learning curve, and say what came out."""
        folder, config = self._folder, self._config
        again = f"headrace train CONFIG run.name={folder.name} run.resume=true"
        if self._monitor is None or self._monitor.stats is None:
            self._display.note(f"stopped before training; go on with: {again}")
            return
        records = folder.read_metrics()
        summary = summarise_run(
            records,
            self._monitor.stats,
            staleness_limit=config.buffer.max_staleness,
            sampler_compilations=self._monitor.sampler_compilations,
            seconds=seconds,
        )
        folder.write_summary(summary)
        plot_learning_curve(
            records, folder.learning_curve_path, title=folder.name, staleness_limit=config.buffer.max_staleness
        )
        rows = outcome_rows(summary) | {"run folder": str(folder.root)}
        if finished:
            self._display.outcome("trained", rows)
        else:
            self._display.outcome("stopped and saved", rows | {"go on with": again})

    def _start_learner(self, model_folder: Path, buffer_url: str) -> int:
        starting = self._learner.start.remote(
            model_folder,
            self._samplers,
            buffer_url=buffer_url,
            run=self._folder.run_id,
            checkpoints=self._folder.checkpoints,
        )
        [step] = wait_for([starting], self._watch, seconds=START_SECONDS, whom="the learner")
        return int(step)

    def _drain(self, playing: list[Any]) -> None:
        """End the workers; a worker that cannot reach the buffer any more has nothing left to give back."""
        draining = [worker.drain.remote(DRAIN_SECONDS) for worker in self._workers.values()]
        ray.wait([*draining, *playing], num_returns=len(draining) + len(playing), timeout=STOP_SECONDS)

    def _evaluate(self, title: str, *, step: int) -> None:
        outcome = evaluate_policy(self._config, self._workers, self._display, title, self._watch)
        self._folder.append_metrics("evaluation", {"step": step, **outcome})

    def _evaluate_beside_training(self, step: int) -> None:
        """Start an evaluation every so many steps, one at a time, and take its result when it is there."""
        every = self._config.telemetry.eval_every_steps
        if self._evaluation is not None:
            self._take_evaluation(0)
        elif every and step // every > self._evaluated_step // every:
            self._evaluated_step, self._evaluation = step, EvaluationRun(self._config, self._workers)

    def _take_evaluation(self, wait_seconds: float) -> bool:
        """Record the evaluation under way if it is over."""
        if self._evaluation is None or not self._evaluation.finished(wait_seconds):
            return False
        self._folder.append_metrics("evaluation", {"step": self._evaluated_step, **self._evaluation.result()})
        self._evaluation = None
        return True

    def _watch(self) -> None:
        if self._stop.requested.is_set():
            raise Stopped

    def _started(self) -> Monitor:
        if self._monitor is None:
            raise RuntimeError("the services are not started; call start first")
        return self._monitor
