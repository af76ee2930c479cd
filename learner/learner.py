"""The learner: lease, train, publish, acknowledge, and never wait for one particular actor.

The order that keeps staleness right: step k trains with version v; its weights go to every sampler as
v + 1; only when all have acknowledged is the batch acknowledged to the buffer, which frees its slots and raises
the version in one script. Meanwhile the next batch is fetched, and may be trained, as version v + 1. (A batch of n
leases counts as n versions; see ``learner.stream``.)

The buffer keeps what was trained until a checkpoint that has learned from it is durable, and after a restart puts back
what the checkpoint has not: every group is trained exactly once in the life of the surviving weights.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from buffer import Buffer, BufferUnavailable, Fenced, Lease, WaitTimeout
from learner.agreement import AgreementMonitor, DisagreementError
from learner.checkpoints import Checkpoints
from learner.critic import Critic
from learner.gang import Gang
from learner.models.compilations import CompilationCounter
from learner.models.weights import gather_hf, seen_as_hf
from learner.packing import Ladder, Rows, empty_rows
from learner.patience import patiently
from learner.publisher import PublicationError, Publisher
from learner.recipe import Recipe
from learner.step import TrainStep
from learner.stream import Batch, Stream

logger = logging.getLogger(__name__)

type Record = dict[str, float | str]
"""Numbers of one step, for metrics, and a line where there is something to warn of; see :meth:`Learner.run`."""

type Anchor = Literal["proximal", "reference"]
"""A policy that the objective compares with: that at the start of the step, or that at the start of the run."""


class DivergedError(RuntimeError):
    """Training produced a loss or gradient that is not finite; nothing was published or saved after it."""


class Learner:
    """One process of a learner gang. Call :meth:`start`, :meth:`run`, :meth:`close`, in this order."""

    def __init__(
        self,
        step: TrainStep,
        params: nnx.State,
        *,
        ladder: Ladder,
        recipe: Recipe,
        buffer: Buffer,
        publisher: Publisher,
        checkpoints: Checkpoints,
        checkpoint_every_steps: int,
        batch_timeout_seconds: float,
        outage_seconds: float,
        anchors: Sequence[Anchor] = (),
        critic: Critic | None = None,
        publish_dtype: Any = jnp.float32,
        agreement: AgreementMonitor | None = None,
        gang: Gang = Gang(),  # noqa: B008 - it is immutable
    ) -> None:
        """Make a learner; nothing is started.

        Args:
            step: the training step; trains on the shapes of ``ladder``.
            params: what is trained, as training starts, unless there is a checkpoint; and the reference, in any case.
            ladder: shapes to pack into; in a gang, those of this process's part of a micro-batch.
            recipe: what becomes of leased groups.
            buffer: an open buffer.
            publisher: hands weights to the samplers.
            checkpoints: of this run; the newest one is taken up.
            checkpoint_every_steps: steps between checkpoints.
            batch_timeout_seconds: longest wait for one batch.
            outage_seconds: how long the buffer may be away before the training ends.
            gang: the processes that train together; all make the same calls, and the first one talks to buffer and
                samplers.
            anchors: policies whose log-probabilities the objective reads in ``Rows``; each costs a forward pass.
            critic: finds advantages by the values of the anchor ``proximal``, which it needs; None for a model without
                a value head.
            publish_dtype: what the samplers serve in, and so what weights are published as.
            agreement: looks whether sampler and learner agree; None for nobody.
        """
        self._publish_dtype = publish_dtype
        if critic is not None and "proximal" not in anchors:
            raise ValueError(f"anchors is {list(anchors)} with a critic; expected 'proximal' among them: add it")
        if gang.count > 1 and recipe.uninformative == "refill":
            raise ValueError(
                f"uninformative is 'refill' in a gang of {gang.count} processes, each of which would decide for itself "
                "what to lease; expected one process: use 'drop'"
            )
        if gang.count > 1 and recipe.compares_batch:
            raise ValueError(
                f"advantage compares with the mean of the batch in a gang of {gang.count} processes, each of which "
                "would take that of its own shard; expected one process: use 'gae', or 'grpo' with larger groups"
            )
        self._train, self._model = step, step.model
        self._params: nnx.State | None = params
        self._ladder, self._recipe, self._anchors, self._critic = ladder, recipe, tuple(anchors), critic
        self._agreement = agreement
        self._reference: nnx.State | None = None
        self._buffer = buffer
        self._publisher, self._checkpoints, self._gang = publisher, checkpoints, gang
        self._checkpoint_every, self._batch_timeout = checkpoint_every_steps, batch_timeout_seconds
        self._outage = outage_seconds
        self._compilations = CompilationCounter()
        self._compiled = 0
        self._epoch = self._step = self._version = 0
        self._saving: int | None = None  # version of the checkpoint that the buffer has not been told of
        self._waited = self._worked = 0.0
        self._rewards: list[float] = []

    @property
    def params(self) -> nnx.State:
        """The decoder's current parameters, on the devices, adapters merged."""
        return self._train.merged(self._state.params)

    @property
    def trained(self) -> nnx.State:
        """What is trained, on the devices: all of the decoder's parameters, or its adapters."""
        return self._state.params

    @property
    def step(self) -> int:
        """Optimizer updates made so far."""
        return self._step

    @property
    def version(self) -> int:
        """The policy version that is trained next."""
        return self._version

    def start(self) -> None:
        """Take up the newest checkpoint if there is one, compile everything, publish the first version.

        A run that has handed out weights before goes on with the next number: versions never go back, steps do.

        Raises:
            ModelError: the checkpoint is of another model.
            PublicationError: a sampler did not take the weights.
        """
        params, self._params = self._params, None  # let go of: a device may have no room for another copy
        if params is None:
            raise RuntimeError("the learner is started already")
        latest = self._checkpoints.latest()
        [taken] = self._gang.follow([self._buffer.announced()])
        self._gang.gather_floats([0.0])  # compiled now
        saved_version = -1
        if "reference" in self._anchors:
            self._reference = self._train.place(params)
        if latest is None:
            self._state = self._train.initialise(params)
            del params
        else:
            del params
            self._state, saved_version = self._checkpoints.restore(latest, self._train.abstract_state)
            self._step = latest
            taken = max(taken, saved_version)
            logger.info("going on from the checkpoint of step %d", latest)
        self._state = self._train.warm_up(self._state)
        padding = [self._train.put(empty_rows(shape)) for shape in self._ladder.shapes]
        jax.block_until_ready(self._judged(padding))
        if self._agreement is not None:
            self._agreement.warm_up(self._state.params, padding)
        epoch = self._begin_epoch(saved_version) if self._gang.leads else 0
        [self._epoch] = self._gang.follow([epoch])
        self._version = taken + 1
        self._publish(partial(self._buffer.advance, self._epoch, self._version))
        self._publisher.flush()
        self._compiled = self._compilations.count

    def run(self, total_steps: int, stop: threading.Event, on_step: Callable[[Record], None]) -> None:
        """Train until ``total_steps`` updates are made or ``stop`` is set, then publish what is pending and save.

        Args:
            total_steps: updates of the whole run, those of its earlier starts included.
            stop: finish the step in hand and return.
            on_step: called after every step with

                * step, version (that the step trained), loss, reward_mean, success_mean, staleness_mean, staleness_max
                * tokens, trained_tokens, skipped_tokens, trajectories, leases, zero_variance_groups,
                  masked_trajectories, padding_fraction
                * idle_seconds (waiting for this batch and for samplers), step_seconds, publish_seconds (last
                  finished publication), learner_idle_fraction (waiting ÷ all, since the first batch arrived)
                * grad_norm, learning_rate and what the objective reports, such as ``objectives.diagnostics.diagnose``
                * with a critic, value_mean and explained_variance
                * where a check of sampler and learner ended, what ``agreement.AgreementMonitor`` says
                * compilations_after_warmup

        Raises:
            WaitTimeout: the actors delivered no batch in time.
            PublicationError: a sampler or the buffer did not take the weights.
            BufferUnavailable: the buffer was away for longer than allowed.
            Fenced: another learner has taken over the run.
            DivergedError: loss or gradient is not finite.
            DisagreementError: sampler and learner disagree, and the monitor is to end the run then.
        """
        stream = Stream(
            self._buffer,
            self._epoch,
            ladder=self._ladder,
            recipe=self._recipe,
            put=self._train.put,
            timeout_seconds=self._batch_timeout,
            outage_seconds=self._outage,
            stop=stop,
            gang=self._gang,
        )
        try:
            if self._step < total_steps:
                stream.request(self._version)
            # A larger gang stops when all have heard of it, which the stream sees to.
            while self._step < total_steps and not (stop.is_set() and self._gang.count == 1):
                waiting = time.monotonic()
                batch = stream.take()
                if batch is None:
                    break
                idle = time.monotonic() - waiting
                if self._step + 1 < total_steps:
                    stream.request(batch.next_version)
                record = self._make_step(batch, idle)
                on_step(record)
                if self._agreement is not None and self._agreement.stops and "agreement_alarm" in record:
                    raise DisagreementError(record["agreement_alarm"])
                if self._step % self._checkpoint_every == 0:
                    self._save()
                self._confirm_saved(self._outage)
        except (WaitTimeout, BufferUnavailable, DisagreementError):
            with contextlib.suppress(PublicationError, BufferUnavailable):  # the first error is the one to tell
                self._save()
            raise
        else:
            self._save()
        finally:
            stream.close()
            self._checkpoints.wait()
            with contextlib.suppress(BufferUnavailable, Fenced):  # then the next start of the run does it
                self._confirm_saved(0.0)

    def close(self) -> None:
        """End the threads."""
        self._publisher.close()
        self._checkpoints.close()

    def _begin_epoch(self, saved_version: int) -> int:
        epoch = self._buffer.begin_epoch()
        undone = self._buffer.rollback(epoch, saved_version)
        self._buffer.checkpointed(epoch, saved_version)
        if undone:
            logger.info("%d groups that were trained after the checkpoint come again", undone)
        return epoch

    def _make_step(self, batch: Batch, idle: float) -> Record:
        """Train on one batch and queue the result for publication."""
        start = time.monotonic()
        agreement: Record = {}
        if self._agreement is not None:
            agreement = self._agreement(self._state.params, batch.micro_batches, self._version, batch.next_version)
        micro_batches, judgement = self._judged(batch.micro_batches)
        self._state, on_device = self._train(self._state, micro_batches, self._version, skipped=batch.skipped_divisor)
        metrics: dict[str, Any] = {name: float(value) for name, value in jax.device_get(on_device).items()}
        metrics |= judgement
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            raise DivergedError(
                f"step {self._step + 1}: loss is {metrics['loss']}, gradient norm {metrics['grad_norm']}; both must be "
                "finite: lower the learning rate and resume from the last checkpoint"
            )
        worked = time.monotonic() - start
        self._rewards.append(batch.facts["reward_mean"])
        trained, self._version, self._step = self._version, batch.next_version, self._step + 1
        self._publish(partial(self._acknowledge, batch.leases, self._version))
        idle += time.monotonic() - start - worked
        if self._worked:  # the first batch is waited for by everyone
            self._waited += idle
        self._worked += worked
        return {
            "step": self._step,
            "version": trained,
            **batch.facts,
            **metrics,
            **agreement,
            "idle_seconds": idle,
            "step_seconds": worked,
            "publish_seconds": self._publisher.seconds,
            "learner_idle_fraction": self._waited / (self._waited + self._worked),
            "compilations_after_warmup": self._compilations.count - self._compiled,
        }

    def _judged(self, micro_batches: Sequence[Rows]) -> tuple[list[Rows], dict[str, float]]:
        """The rows with all that other policies and the critic have to say about them, and what came out."""
        anchored = [self._anchored(rows) for rows in micro_batches]
        return (anchored, {}) if self._critic is None else self._critic(anchored)

    def _anchored(self, rows: Rows) -> Rows:
        """The rows with the log-probabilities under the policies that the objective compares with, and the values."""
        policies: dict[Anchor, Any] = {"proximal": self._state.params, "reference": self._reference}
        for name in self._anchors:
            scores = self._train.logprobs(policies[name], rows)
            rows = rows._replace(**{name: scores.logprob})
            if name == "proximal" and scores.value is not None:
                rows = rows._replace(values=scores.value)
        return rows

    def _acknowledge(self, leases: Sequence[Lease], version: int) -> None:
        # May be called again after an error: what is acknowledged already stays so.
        for lease in leases:
            self._buffer.ack(lease, version)

    def _publish(self, acknowledge: Callable[[], None]) -> None:
        if self._gang.count == 1:
            weights = partial(seen_as_hf, self._model, self._snapshot())
        else:  # every process has a part, so they bring it together before they go on
            whole = gather_hf(self._model, self._snapshot())
            if not self._gang.leads:
                return
            weights = partial(dict, whole)
        announce = partial(self._buffer.announce, self._epoch, self._version)
        self._publisher.publish(
            self._version,
            weights,
            announce=partial(patiently, announce, self._outage),
            acknowledge=partial(patiently, acknowledge, self._outage),
        )

    def _snapshot(self) -> nnx.State:
        return self._train.snapshot(self._state.params, self._publish_dtype)

    def _save(self) -> None:
        """Begin to write a checkpoint, of acknowledged batches only: others come again when the run is resumed.

        Its score is the mean reward since the one before it.
        """
        self._publisher.flush()
        score = fmean(self._rewards) if self._rewards else None
        self._checkpoints.save(self._step, self._state, version=self._version, score=score)
        self._saving = self._version
        self._rewards.clear()

    def _confirm_saved(self, outage_seconds: float) -> None:
        """Tell the buffer of the last checkpoint once it is durable."""
        if self._saving is not None and self._gang.leads and self._checkpoints.durable():
            patiently(partial(self._buffer.checkpointed, self._epoch, self._saving), outage_seconds)
            self._saving = None
