"""``headrace train``: warm start, evaluation, reinforcement learning, evaluation.

The driver owns the order of things and nothing else: it starts the services, watches them, shows and
records what they report, and stops them in the order that loses nothing.
"""

from __future__ import annotations

import re
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from buffer import Buffer
from cluster.config import Config
from cluster.display import Display, open_display
from cluster.errors import RunEnded, ServiceDied, root_cause
from cluster.evaluation import EvaluationRun, evaluate_policy
from cluster.inputs import check_inputs, check_sampler
from cluster.learner_gang import LearnerGang
from cluster.monitor import Monitor
from cluster.plots import plot_learning_curve
from cluster.policy import prepare_policy
from cluster.runfolder import RunFolder
from cluster.sampler_pool import SamplerPool
from cluster.services import buffer_service, start_workers
from cluster.session import Session, Stopped, session
from cluster.summary import outcome_rows, summarise_run
from cluster.waiting import START_SECONDS, wait_for, wait_until_up
from learner.agreement import DisagreementError

LOOK_SECONDS = 1.0
"""From one look at the services to the next."""
STOP_LOOK_SECONDS = 0.1
"""The same while the run is stopping: a supervisor may grant seconds only."""
DRAIN_SECONDS = 1.0
"""What running episodes get to finish in once the learner needs no more of them."""
STOP_SECONDS = 120.0
"""Longest that the learner may take to finish its step and save, and a worker to give back its slots."""


class RunFailed(RuntimeError):
    """A service of the run failed; what the learner had was saved as far as possible, and the run can be resumed."""


def train(config: Config) -> int:
    """Run the whole job; returns the exit status: 0, or 130 or 143 when asked to stop.

    Raises:
        RunFailed: a service failed after the training had begun.
        ServiceDied: the process of one ended.
        RunEnded: sampler and learner disagree, and ``learner.agreement.on_alarm`` is ``stop``.
    """
    started = time.monotonic()
    settings = config.telemetry
    check_inputs(config)
    check_sampler(config)
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder.open(config))
        display = stack.enter_context(open_display(settings.display, plain_every_seconds=settings.plain_every_seconds))
        display.note(f"run {folder.name}, kept in {folder.root}")
        if folder.notice:
            display.note(folder.notice)
        display.phase("starting Redis and Ray")
        url, buffer = stack.enter_context(buffer_service(config, folder))
        work = stack.enter_context(session(config))
        if work.shortage:
            display.note(work.shortage)
        run = stack.enter_context(closing(TrainingRun(config, folder, display, work)))
        finished = False
        try:
            run.start(buffer, url)
            if run.train():
                run.conclude()
                finished = True
        except Stopped:
            pass
        finally:
            run.report(finished, seconds=time.monotonic() - started)
        return work.stop.exit_status


class TrainingRun:
    """One training run: its services, in the order in which they start, work and stop."""

    def __init__(self, config: Config, folder: RunFolder, display: Display, work: Session) -> None:
        self._config, self._folder, self._display, self._work = config, folder, display, work
        self._monitor: Monitor | None = None
        self._evaluation: EvaluationRun | None = None
        self._evaluated_step = 0
        self._steps = 0
        self._closing = ExitStack()

    def start(self, buffer: Buffer, buffer_url: str) -> None:
        """Make the policy, start every service, and evaluate what training starts from.

        Raises:
            Stopped: asked to stop.
        """
        config, folder, watch = self._config, self._folder, self._work.watch
        model_folder = prepare_policy(config, folder, self._display, watch)
        self._display.phase("compiling sampler and learner")
        self._learner = LearnerGang(config, folder.name)
        self._pool = SamplerPool(config, folder.name, model_folder, self._display.note)
        samplers = self._pool.handles
        wait_until_up(samplers, watch)
        self._workers = start_workers(config, folder.name, folder.run_id, model_folder, samplers, buffer_url)
        wait_until_up(self._workers, watch)
        self._steps = self._start_learner(model_folder, buffer_url)
        self._pool.serve(self._learner, self._workers)
        self._monitor = Monitor(
            folder,
            self._display,
            buffer,
            learner=self._learner,
            pool=self._pool,
            workers=self._workers,
            staleness_limit=config.buffer.max_staleness,
        )
        if self._steps:
            self._display.note(f"going on from the checkpoint of step {self._steps}")
        elif not any(record["kind"] == "evaluation" for record in folder.read_metrics()):
            self._evaluate("evaluating the policy that training starts from")

    def train(self) -> bool:
        """Let workers play and the learner train; returns whether all steps were made.

        Whatever ends it, the learner has saved what it could and the workers have given back their slots.

        Raises:
            RunFailed: a service failed.
            ServiceDied: the process of one ended.
            RunEnded: the learner ended the run because it disagrees with the samplers.
        """
        self._display.phase("training", self._config.learner.steps)
        playing = [worker.run.remote() for worker in self._workers.values()]
        training = self._learner.train()
        try:
            self._watch_training(training, playing)
            self._steps = self._learner.outcome(training, STOP_SECONDS)
            self._drain(playing)
            self._services().collect()
        except ActorDiedError as error:
            self._rescue(training)
            name = re.search(r"\bname: (\S+)", str(error))
            raise ServiceDied(
                f"{name.group(1) if name else 'a service'} died: its process was killed, ran out of memory or crashed; "
                f"see the logs in {self._work.logs}, and go on with: {self._folder.resume_command()}"
            ) from error
        except ServiceDied as error:
            self._rescue(training)
            raise ServiceDied(
                f"{error}; see the logs in {self._work.logs}, and go on with: {self._folder.resume_command()}"
            ) from error
        except (RayError, TimeoutError) as error:
            cause = root_cause(error)
            if isinstance(cause, DisagreementError):
                self._drain(playing)
                self._services().collect()
                raise RunEnded(
                    f"{cause}; learner.agreement.on_alarm=stop ended the run, go on with: "
                    f"{self._folder.resume_command()}"
                ) from error
            self._rescue(training)
            raise RunFailed(f"a service failed: {error}; its log is in {self._work.logs}") from error
        return self._steps >= self._config.learner.steps

    def conclude(self) -> None:
        """Write the trained policy as a Hugging Face folder, and adapters by themselves besides; evaluate it.

        Raises:
            Stopped: asked to stop.
        """
        self._wait_for_writing(self._learner.write_model(self._folder.model))
        if self._config.model.lora is not None:
            self._wait_for_writing(self._learner.write_adapter(self._folder.adapter))
        while self._evaluation is not None and not self._take_evaluation(LOOK_SECONDS):
            self._watch()
        self._evaluate("evaluating the trained policy")
        self._services().collect()

    def _wait_for_writing(self, writing: list[Any]) -> None:
        wait_for(writing, self._work.watch, seconds=START_SECONDS, whom="the learner")

    def report(self, finished: bool, *, seconds: float) -> None:
        """Write summary and learning curve, and say what came out."""
        folder, config = self._folder, self._config
        if self._monitor is None or self._monitor.stats is None:
            again = "" if folder.worthless else f"; go on with: {folder.resume_command()}"
            self._display.note(f"stopped before training{again}")
            return
        records = folder.read_metrics()
        summary = summarise_run(
            records,
            self._monitor.stats,
            sampler_kind=config.sampler.kind,
            staleness_limit=config.buffer.max_staleness,
            sampler_totals=self._pool.totals,
            sampler_restarts=self._pool.restarts,
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
            self._display.outcome("not finished", rows | {"go on with": folder.resume_command()})

    def close(self) -> None:
        """Leave nothing behind of what processes do not take with them."""
        self._closing.close()

    def _watch(self) -> None:
        """Look after the samplers, which may fail or be scaled whenever workers play.

        Raises:
            Stopped: asked to stop.
            ServiceDied: a sampler failed too often.
        """
        self._work.watch()
        self._tend_samplers()

    def _tend_samplers(self) -> None:
        count = self._folder.take_scale_request()
        if count is not None:
            self._pool.scale(count)
        self._pool.look()

    def _start_learner(self, model_folder: Path, buffer_url: str) -> int:
        self._learner.join(self._work.watch)
        self._closing.callback(self._learner.close)
        starting = self._learner.start(
            model_folder,
            self._pool.handles,
            buffer_url=buffer_url,
            run=self._folder.run_id,
            checkpoints=self._folder.checkpoints,
        )
        step, *_ = wait_for(starting, self._work.watch, seconds=START_SECONDS, whom="the learner")
        return int(step)

    def _watch_training(self, training: list[Any], playing: list[Any]) -> None:
        """Return when a process of the learner has ended; ask it to end when somebody asks us.

        Raises:
            RayError: a service failed.
            TimeoutError: the learner does not stop.
        """
        monitor, stop = self._services(), self._work.stop
        stop_deadline: float | None = None
        while not ray.wait(training, timeout=STOP_LOOK_SECONDS if stop_deadline else 0)[0]:
            self._tend_samplers()  # while it stops, too: the last publication must not wait for a dead one
            if stop_deadline is None:
                ray.get(ray.wait(playing, timeout=0)[0])  # a worker ends before it is drained only by failing
                monitor.look()
                self._evaluate_beside_training(monitor.steps)
                stop.requested.wait(LOOK_SECONDS)
            if stop.requested.is_set() and stop_deadline is None:
                stop_deadline = time.monotonic() + STOP_SECONDS
                self._learner.stop()
                self._display.note("stopping: finishing the step in hand and saving")
            if stop_deadline is not None and time.monotonic() > stop_deadline:
                raise TimeoutError(f"the learner did not finish its step and save within {STOP_SECONDS:.0f} s")

    def _rescue(self, training: list[Any]) -> None:
        """After a failure let the learner, if it lives as a whole, finish its step and save."""
        self._learner.stop()
        lacks_one = self._learner.lacks_one(training)
        if not lacks_one:
            ray.wait(training, num_returns=len(training), timeout=STOP_SECONDS)
        try:
            self._services().take_steps()
        except RayError as error:
            self._display.note(f"the learner does not answer any more ({type(error).__name__})")
        if lacks_one:
            self._learner.kill()

    def _drain(self, playing: list[Any]) -> None:
        """End the workers; one that fails at it has nothing to give back but slots that expire by themselves."""
        ending = [worker.drain.remote(DRAIN_SECONDS) for worker in self._workers.values()] + playing
        ended, late = ray.wait(ending, num_returns=len(ending), timeout=STOP_SECONDS)
        try:
            ray.get(ended)
        except RayError as error:
            self._display.note(f"a worker failed while it ended: {error}")
        if late:
            self._display.note(f"{len(late)} calls to end workers were not answered within {STOP_SECONDS:.0f} s")

    def _evaluate(self, title: str) -> None:
        outcome = evaluate_policy(self._config, self._workers, self._display, title, self._watch)
        self._folder.append_metrics("evaluation", {"step": self._steps, **outcome})

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

    def _services(self) -> Monitor:
        if self._monitor is None:
            raise RuntimeError("the services are not started; call start first")
        return self._monitor
