"""The stream of batches: lease → examples → pack → device, one batch ahead of the step.

A batch is leased with the version that is going to train it, so its staleness is judged by what is
true when it is used. With ``max_staleness=0`` the next batch therefore cannot exist before the
weights it needs are published, and the same code is strictly synchronous.

The buffer has one lease per version. A batch that is refilled with more informative groups takes the leases of the
versions that follow, each judged by its own version and so at least as strictly as by the one that trains it. They are
acknowledged together, as trained by weights whose version is above all of theirs: the step raises the version by the
number of its leases. Every leased group is acknowledged once, and staleness is overestimated, never underestimated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from buffer import Buffer, Lease, WaitTimeout
from learner.packing import Ladder, Rows, pack, padding_fraction
from learner.patience import patiently
from learner.recipe import Recipe

_LOOK_SECONDS = 0.5
"""How often a wait for trajectories looks whether it should stop."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A leased batch, packed and on the devices.

    Attributes:
        leases: what it was made from, of consecutive versions; all are to be acknowledged after the step.
        micro_batches: of shapes of the ladder; none if there is no group to train on.
        skipped_divisor: what groups that were left out because they have no gradient would have added to the divisor
            of the loss.
        facts: reward_mean, success_mean, staleness_mean, staleness_max, tokens, trajectories, leases,
            zero_variance_groups, masked_trajectories, skipped_tokens (sampled tokens of groups that are not in
            ``micro_batches``) and padding_fraction.
    """

    leases: list[Lease]
    micro_batches: list[Rows]
    skipped_divisor: float
    facts: dict[str, float]

    @property
    def next_version(self) -> int:
        """The version of the weights that come of the batch: above those of all its leases."""
        return self.leases[-1].version + 1


class Stream:
    """Fetches batches in a thread of its own, one ahead."""

    def __init__(
        self,
        buffer: Buffer,
        epoch: int,
        *,
        ladder: Ladder,
        recipe: Recipe,
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
            recipe: what becomes of leased groups.
            put: places a micro-batch on the devices.
            timeout_seconds: longest wait for one lease.
            outage_seconds: how long the buffer may be away.
            stop: ends every wait when set.
        """
        self._buffer, self._epoch = buffer, epoch
        self._ladder, self._recipe, self._put = ladder, recipe, put
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
                self._release(batch.leases)
        self._next = None

    def _fetch(self, version: int) -> Batch | None:
        leases: list[Lease] = []
        while True:
            lease = self._lease(version + len(leases))
            if lease is None:
                self._release(leases)
                return None
            leases.append(lease)
            prepared = self._recipe.prepare(leases)
            if not self._recipe.wants_more(leases, prepared):
                break
        packed = pack(prepared.examples, self._ladder)
        facts = prepared.facts | {"padding_fraction": padding_fraction(packed)}
        return Batch(leases, [self._put(rows) for rows in packed], prepared.skipped_divisor, facts)

    def _lease(self, version: int) -> Lease | None:
        """The lease of ``version``; None if the stream was stopped while waiting for it."""
        deadline = time.monotonic() + self._timeout
        while not (self._stop.is_set() or self._closing.is_set()):
            try:
                return patiently(partial(self._buffer.lease, self._epoch, version, _LOOK_SECONDS), self._outage)
            except WaitTimeout:
                if time.monotonic() > deadline:
                    raise
        return None

    def _release(self, leases: list[Lease]) -> None:
        for lease in leases:
            self._buffer.release(lease)
