"""The stream of batches: lease → advantages → pack → device, one batch ahead of the step.

A batch is leased with the version that is going to train it, so its staleness is judged by what is
true when it is used. With ``max_staleness=0`` the next batch therefore cannot exist before the
weights it needs are published, and the same code is strictly synchronous.

Axes: T = tokens of a trajectory, K = its turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from buffer import Buffer, Lease, WaitTimeout
from learner.packing import Example, Ladder, Rows, pack, padding_fraction
from learner.patience import patiently

_LOOK_SECONDS = 0.5
"""How often a wait for trajectories looks whether it should stop."""

type Advantage = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
"""Rewards of the turns of each trajectory of a group, float32[K] → their advantages, float32[K]."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A leased batch, packed and on the devices.

    Attributes:
        lease: what it was made from; to be acknowledged after the step.
        micro_batches: of shapes of the ladder; none if there is no group to train on.
        skipped_tokens: sampled tokens of groups that are not in ``micro_batches`` because they have no gradient.
        facts: reward_mean, success_mean, staleness_mean, staleness_max, tokens, trajectories,
            zero_variance_groups and padding_fraction.
    """

    lease: Lease
    micro_batches: list[Rows]
    skipped_tokens: int
    facts: dict[str, float]


class Stream:
    """Fetches batches in a thread of its own, one ahead."""

    def __init__(
        self,
        buffer: Buffer,
        epoch: int,
        *,
        ladder: Ladder,
        advantage: Advantage,
        skip_without_advantage: bool,
        put: Callable[[Rows], Rows],
        timeout_seconds: float,
        outage_seconds: float,
        stop: threading.Event,
    ) -> None:
        """Make a stream; nothing is fetched before it is requested.

        Args:
            buffer: where batches come from.
            epoch: of this learner gang.
            ladder: shapes to pack into.
            advantage: from a group's rewards to its advantages.
            skip_without_advantage: leave out groups whose advantages are all 0; right for an objective in which
                nothing else has a gradient.
            put: places a micro-batch on the devices.
            timeout_seconds: longest wait for one batch.
            outage_seconds: how long the buffer may be away.
            stop: ends every wait when set.
        """
        self._buffer, self._epoch = buffer, epoch
        self._ladder, self._advantage, self._skip_without_advantage, self._put = (
            ladder,
            advantage,
            skip_without_advantage,
            put,
        )
        self._timeout, self._outage = timeout_seconds, outage_seconds
        self._stop, self._closing = stop, threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stream")
        self._next: Future[Batch | None] | None = None

    def request(self, version: int) -> None:
        """Begin to fetch the batch that ``version`` is going to train."""
        if self._next is not None:
            raise RuntimeError("a batch is already requested; take it before requesting another")
        self._next = self._thread.submit(self._fetch, version)

    def take(self) -> Batch | None:
        """The batch last requested; None if the stream was stopped while waiting for it.

        Raises:
            WaitTimeout: the actors delivered no batch in time; the message says what is outstanding.
        """
        if self._next is None:
            raise RuntimeError("no batch is requested; call request first")
        batch = self._next.result()
        self._next = None
        return batch

    def close(self) -> None:
        """Stop fetching and give back a batch that nobody took."""
        self._closing.set()
        self._thread.shutdown()
        if self._next is not None and self._next.exception() is None:
            batch = self._next.result()
            if batch is not None:
                self._buffer.release(batch.lease)
        self._next = None

    def _fetch(self, version: int) -> Batch | None:
        deadline = time.monotonic() + self._timeout
        while not (self._stop.is_set() or self._closing.is_set()):
            try:
                lease = patiently(partial(self._buffer.lease, self._epoch, version, _LOOK_SECONDS), self._outage)
            except WaitTimeout:
                if time.monotonic() > deadline:
                    raise
                continue
            return self._prepare(lease)
        return None

    def _prepare(self, lease: Lease) -> Batch:
        advantages = [self._advantage([t.rewards for t in group]) for group in lease.groups]
        informative = [any(np.any(advantage_K) for advantage_K in group) for group in advantages]
        examples, skipped_tokens = [], 0
        # Of mean 1, which bounds what a group that was drawn against the odds may weigh.
        corrections = lease.corrections / lease.corrections.mean()
        for group, group_advantages, useful, correction in zip(
            lease.groups, advantages, informative, corrections, strict=True
        ):
            if self._skip_without_advantage and not useful:
                skipped_tokens += sum(int(t.loss_mask.sum()) for t in group)
                continue
            examples += [
                Example(t.tokens, t.loss_mask, t.logprobs, t.versions, spread(correction * advantage_K, t.loss_mask))
                for t, advantage_K in zip(group, group_advantages, strict=True)
            ]
        packed = pack(examples, self._ladder)
        trajectories = lease.trajectories
        facts = {
            "reward_mean": float(np.mean([t.reward for t in trajectories])),
            "success_mean": float(np.mean([float(t.metadata.get("success", 0.0)) for t in trajectories])),
            "staleness_mean": lease.staleness_mean,
            "staleness_max": lease.staleness_max,
            "tokens": sum(len(t.tokens) for t in trajectories),
            "trajectories": len(trajectories),
            "zero_variance_groups": informative.count(False),
            "padding_fraction": padding_fraction(packed),
        }
        return Batch(lease, [self._put(rows) for rows in packed], skipped_tokens, facts)


def spread(advantage_K: np.ndarray, mask_T: np.ndarray) -> np.ndarray:
    """Give every sampled token the advantage of its turn; a turn is one run of sampled tokens.

    Raises:
        ValueError: there are more or fewer runs than turns.
    """
    begins_T = mask_T & ~np.concatenate([[False], mask_T[:-1]])
    runs = int(begins_T.sum())
    if runs != len(advantage_K):
        raise ValueError(
            f"the mask has {runs} runs of sampled tokens, but there are rewards of {len(advantage_K)} turns"
        )
    return np.where(mask_T, advantage_K[np.cumsum(begins_T) - 1], 0.0).astype(np.float32)
