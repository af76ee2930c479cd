"""The stream of batches: lease → examples → pack → device, one batch ahead of the step.

A batch is leased with the version that is going to train it, so its staleness is judged by what is
true when it is used. With ``max_staleness=0`` the next batch therefore cannot exist before the
weights it needs are published, and the same code is strictly synchronous.

The buffer has one lease per version. A batch that is refilled with more informative groups takes the leases of the
versions that follow, each judged by its own version and so at least as strictly as by the one that trains it. They are
acknowledged together, as trained by weights whose version is above all of theirs: the step raises the version by the
number of its leases. Every leased group is acknowledged once, and staleness is overestimated, never underestimated.

In a gang each process leases and packs its own shard, and when a batch is taken all agree: on the lease, on the number
of micro-batches of each shape, and on whether to go on. That happens in the thread that trains, because what processes
do on devices must have one order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import numpy as np

from buffer import Buffer, BufferUnavailable, Lease, WaitTimeout
from learner.gang import Gang, digest
from learner.packing import Ladder, Rows, pack, padding_fraction
from learner.patience import patiently
from learner.recipe import Recipe, combine_facts

_READY, _STOPPED, _FAILED, _WAITING = range(4)

_LOOK_SECONDS = 0.5
"""How often a wait for trajectories looks whether it should stop."""

_AGREE_SECONDS = 2.0
"""How often processes of a gang tell each other that they wait: some of what they wait for only the first can do."""


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
        gang: Gang = Gang(),  # noqa: B008 - it is immutable
    ) -> None:
        """Make a stream; nothing is fetched before it is requested.

        Args:
            buffer: where batches come from.
            epoch: of this learner gang.
            ladder: shapes to pack into; in a gang, those of this process's part of a micro-batch.
            recipe: what becomes of leased groups.
            put: places a micro-batch on the devices.
            timeout_seconds: longest wait for one lease.
            outage_seconds: how long the buffer may be away.
            stop: ends every wait when set.
            gang: the processes that each take a shard of a lease.
        """
        self._buffer, self._epoch = buffer, epoch
        self._ladder, self._recipe, self._put = ladder, recipe, put
        self._timeout, self._outage = timeout_seconds, outage_seconds
        self._stop, self._closing, self._gang = stop, threading.Event(), gang
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
        pending, self._next = self._next, None
        return pending.result() if self._gang.count == 1 else self._agree(pending)

    def close(self) -> None:
        """Stop fetching and give back a batch that nobody took."""
        self._closing.set()
        self._thread.shutdown()
        if self._next is not None and self._next.exception() is None:
            batch = self._next.result()
            if batch is not None and self._gang.leads:
                self._release(batch.leases)
        self._next = None

    def _fetch(self, version: int) -> Batch | None:
        leases: list[Lease] = []
        while True:
            lease = self._lease(version + len(leases))
            if lease is None:
                self._release(leases)  # none, but under refill, which only a gang of one does
                return None
            leases.append(lease)
            prepared = self._recipe.prepare(leases)
            if not self._recipe.wants_more(leases, prepared):
                break
        packed = pack(prepared.examples, self._ladder)
        facts = prepared.facts | {"padding_fraction": padding_fraction(packed)}
        if self._gang.count == 1:  # in a larger gang it is not known yet with what the others come
            packed = [self._put(rows) for rows in packed]
        return Batch(leases, packed, prepared.skipped_divisor, facts)

    def _agree(self, pending: Future[Batch | None]) -> Batch | None:
        """Wait until every process has its shard of the same lease, and as many micro-batches of each shape.

        Raises:
            WaitTimeout: a process got no shard in time.
        """
        error: Exception | None = None
        while True:
            batch = None
            is_done = bool(wait([pending], _AGREE_SECONDS).done)
            try:
                batch = pending.result() if is_done else None
            except (WaitTimeout, BufferUnavailable) as caught:  # which the others must hear of
                error = caught
            state = _WAITING if not is_done else _FAILED if error else _STOPPED if batch is None else _READY
            counts = self._ladder.count(batch.micro_batches if batch else [])
            lease = digest(f"{batch.leases[0].id} {sorted(batch.leases[0].batch.items())}") if batch else 0
            said = self._gang.gather([state, lease, *counts])
            if (said[:, 0] == _WAITING).any():
                # Redis forgot the lease, or a group of it was damaged: asked for by the first again, it is whole again.
                if batch is not None and self._gang.leads:
                    pending = self._thread.submit(self._fetch, batch.leases[0].version)
                continue
            if (said[:, 0] != _READY).any():
                if batch is not None and self._gang.leads:
                    self._release(batch.leases)
                if (said[:, 0] == _FAILED).any():
                    raise error or WaitTimeout(
                        f"process {int((said[:, 0] == _FAILED).argmax())} of the gang got no shard: its log says why"
                    )
                return None
            assert batch is not None
            if (said[:, 1] == said[0, 1]).all():
                return self._complete(batch, said[:, 2:].max(axis=0))
            # Redis forgot the lease between two of them: asked for again by the first process, it knows it again.
            pending = self._thread.submit(self._fetch, batch.leases[0].version)

    def _complete(self, batch: Batch, counts: np.ndarray) -> Batch:
        """Fill up with empty micro-batches, and say of the whole batch what is known of its shards."""
        rows = self._ladder.fill_up(batch.micro_batches, counts)
        names = [*batch.facts, "skipped_divisor"]
        said = self._gang.gather_floats([*batch.facts.values(), batch.skipped_divisor])
        facts = combine_facts([dict(zip(names, map(float, each), strict=True)) for each in said])
        return Batch(batch.leases, [self._put(each) for each in rows], facts.pop("skipped_divisor"), facts)

    def _lease(self, version: int) -> Lease | None:
        """The lease of ``version``; None if the stream was stopped while waiting for it."""
        deadline = time.monotonic() + self._timeout
        while not (self._stop.is_set() or self._closing.is_set()):
            try:
                shard = {"shard": self._gang.index, "shards": self._gang.count}
                lease = partial(self._buffer.lease, self._epoch, version, _LOOK_SECONDS, **shard)
                return patiently(lease, self._outage)
            except WaitTimeout:
                if time.monotonic() > deadline:
                    raise
        return None

    def _release(self, leases: list[Lease]) -> None:
        for lease in leases:
            self._buffer.release(lease)
