"""``Buffer``: the blocking client, for the learner, the supervisor, the command line and simple workers.

The learner's part of the protocol, in the order that keeps staleness right::

    epoch = buffer.begin_epoch()
    buffer.rollback(epoch, restored_version)            # what the restored checkpoint has not learned from comes again
    lease = buffer.lease(epoch, version, timeout=...)   # version = the one the batch is going to be trained with
    ...train, publish the weights as version + 1, wait until the samplers hold them...
    buffer.ack(lease, version + 1)                      # consumes the groups and frees their slots
    ...once a checkpoint of these weights is durable...
    buffer.checkpointed(epoch, version + 1)             # lets go of what it has learned from

A slot freed by that ack is sampled with the new weights, whatever else is in flight. For a worker's part see
``buffer.async_client``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

from buffer.connection import Connection
from buffer.errors import BufferError
from buffer.keys import ANY_CONTROL, Keys, run_of
from buffer.lease import Lease
from buffer.limits import Limits
from buffer.operations import LONGEST_BLOCK_SECONDS, Operations
from buffer.protocol import Commit, Failure, GroupInfo, Slot, State, Stats, text
from buffer.requests import Run, Send, Steps
from buffer.trajectory import Trajectory


def runs_in(url: str, *, timeout_seconds: float) -> list[str]:
    """Names of the runs that have a buffer in the Redis at ``url``, sorted.

    Raises:
        BufferUnavailable: it does not answer.
    """
    connection = Connection(url, (), ANY_CONTROL, timeout_seconds)
    found, cursor = set(), b"0"
    try:
        with connection.address.named():
            while True:
                [[cursor, names]] = connection.perform(Send((("SCAN", cursor, "MATCH", ANY_CONTROL, "COUNT", 1000),)))
                found |= {run for name in names if (run := run_of(text(name)))}
                if int(cursor) == 0:
                    return sorted(found)
    finally:
        connection.close()


class Buffer:
    """A run's buffer, seen by those who may block. Safe to share between threads.

    Every method may raise ``BufferUnavailable`` (no answer from Redis, after three retries of ``timeout_seconds``
    each) and, ``open`` excepted, ``NotOpen``. Every method may be called again after an error.
    """

    def __init__(self, url: str, run: str, *, timeout_seconds: float, payload_urls: Sequence[str] = ()) -> None:
        """Make a client; nothing is connected yet.

        Args:
            url: ``redis://``, ``rediss://`` or ``unix://`` URL, with the password if there is one; what redis-py takes
                in a query (such as ``?ssl_ca_certs=/path``) may follow.
            run: name of the run.
            timeout_seconds: how long one call to Redis may take.
            payload_urls: more instances, to which the payloads go; every client of a run needs the same in this order.
        """
        keys = Keys(run)
        self._connection = Connection(url, payload_urls, keys.control, timeout_seconds)
        self._operations = Operations(
            keys,
            self._connection.address.where,
            payload_instances=len(payload_urls),
            block_seconds=min(LONGEST_BLOCK_SECONDS, timeout_seconds / 2),
        )

    def open(self, limits: Limits) -> None:
        """Create the run's control state, or take it up again, and put ``limits`` into force.

        Raises:
            FormatError: the state was written by a version of headrace with another layout.
        """
        self._drive(self._operations.open(limits))

    def version(self) -> int:
        """Return the current policy version."""
        return self._drive(self._operations.field("version"))

    def payload_instances(self) -> int:
        """Return how many payload instances the run was opened with."""
        return self._drive(self._operations.field("payload_instances"))

    def announced(self) -> int:
        """Return the newest version under which weights may have been handed out; -1 before the first."""
        return self._drive(self._operations.field("announced"))

    def stats(self) -> Stats:
        """Return what is in the buffer; its numbers are from one moment, so they add up."""
        return self._drive(self._operations.stats())

    def groups(self, state: State, most: int) -> list[GroupInfo]:
        """Describe up to ``most`` groups of one state, those first whose time comes first."""
        return self._drive(self._operations.groups(state, most))

    def peek(self, info: GroupInfo, index: int | None = None) -> Trajectory:
        """Read a committed trajectory of a group, the first one unless ``index`` says another, without leasing it.

        Raises:
            ValueError: there is no such trajectory.
            FormatError: its payload is damaged or gone.
        """
        return self._drive(self._operations.peek(info, index))

    def reserve(self, worker: str, timeout: float) -> Slot:
        """Return a slot: the right, and the duty, to run one group.

        Args:
            worker: name of the worker, for people who look for whom a wait waits.
            timeout: seconds to wait for admission; 0 looks once.

        Raises:
            WaitTimeout: nothing was admitted in time. That is back-pressure, not a fault.
        """
        group = self._operations.new_group()
        slot = self._drive(self._operations.reserve(group, worker, time.monotonic() + timeout))
        if slot is None:
            raise self._drive(self._operations.no_slot(worker, timeout))
        return slot

    def renew(self, group: str, oldest_version: int | None = None) -> bool:
        """Extend the deadline of a slot by ``Slot.seconds`` from now.

        Args:
            group: the slot's group.
            oldest_version: oldest version that the group's running episodes have sampled with; None if they have not
                sampled yet.

        Returns:
            False when the slot is gone, or its group can no longer be fresh when it is trained (the slot is
            given up then): stop its episodes.
        """
        return self._drive(self._operations.renew(group, oldest_version))

    def commit(self, *trajectories: Trajectory, weights: Sequence[float] | None = None) -> list[Commit]:
        """Add each of ``trajectories`` to its group, in one round trip; a group is ready when all its members are in.

        Args:
            trajectories: of any groups.
            weights: of each, from 0.001 to 1000, for the order ``priority``; a group has the mean of its members'.

        Raises:
            ValueError: nothing in one was sampled, or its index, size, metadata or weight are out of bounds.
            BufferFull: Redis is at its maxmemory; what was not stored may be committed again.
        """
        return self._drive(self._operations.commit(trajectories, weights or [1.0] * len(trajectories)))

    def fail(self, group: str, index: int, failures: int, reason: str) -> Failure:
        """Report that a member's episode ended through no fault of the policy; the answer says what to do.

        Args:
            group: the slot's group.
            index: the member.
            failures: how often it has failed by now.
            reason: a word to count it under, such as a ``Status`` value.
        """
        return self._drive(self._operations.fail(group, index, failures, reason))

    def abandon(self, group: str, reason: str) -> bool:
        """Give up a slot; its task is issued again, a bounded number of times.

        Args:
            group: the slot's group; with ``Limits.min_group_size`` members or more it becomes ready instead.
            reason: a word to count it under, such as a ``Status`` value.

        Returns:
            False when there was nothing to give up: the group is complete or gone.
        """
        return self._drive(self._operations.abandon(group, reason))

    def begin_epoch(self) -> int:
        """Start a new epoch of the learner gang: fence off the old one, and redeliver what it still held."""
        return self._drive(self._operations.begin_epoch())

    def lease(self, epoch: int, version: int, timeout: float, *, shard: int = 0, shards: int = 1) -> Lease:
        """Return a batch, or one shard of it, of complete groups, none of them too old for ``version``.

        The same (epoch, version) again returns the same batch. What is too stale is evicted, and what is
        damaged or missing is taken out, counted and made up for.

        Args:
            epoch: from ``begin_epoch``.
            version: policy version that the batch is going to be trained with.
            timeout: seconds to wait for a whole batch; 0 looks once.
            shard: which shard to fetch, from 0; the process that has shard 0 acks the lease.
            shards: processes of the gang; each passes the same number. Shards differ little in bytes.

        Raises:
            WaitTimeout: there was no whole batch in time.
            Fenced: a newer epoch has begun.
        """
        return self._drive(self._operations.lease(epoch, version, timeout, shard, shards))

    def announce(self, epoch: int, version: int) -> None:
        """Say that weights are about to be handed out as ``version``, so that no later epoch reuses the number.

        Raises:
            Fenced: a newer epoch has begun.
        """
        self._drive(self._operations.announce(epoch, version))

    def ack(self, lease: Lease, version: int) -> None:
        """Consume the whole batch of ``lease``: it was trained on, and the samplers hold the result as ``version``.

        Raises:
            Fenced: a newer epoch has begun, or the lease was released.
        """
        self._drive(self._operations.ack(lease, version))

    def release(self, lease: Lease) -> None:
        """Give the whole batch of ``lease`` back untrained; its groups are ready again, in their old places.

        Raises:
            Fenced: a newer epoch has begun.
        """
        self._drive(self._operations.release(lease))

    def checkpointed(self, epoch: int, version: int) -> None:
        """Say that a checkpoint with the weights of ``version`` is durable; what it has learned from is forgotten.

        Raises:
            Fenced: a newer epoch has begun.
        """
        self._drive(self._operations.checkpointed(epoch, version))

    def rollback(self, epoch: int, version: int) -> int:
        """Put back what was trained after the checkpoint of ``version`` (-1: all that no checkpoint holds).

        Groups that a lease could still take are ready again; of the others, the tasks are issued again. To be called
        between ``begin_epoch`` and the first lease; the policy version stays as it is.

        Returns:
            How many uses of groups were undone.

        Raises:
            Fenced: a newer epoch has begun.
        """
        return self._drive(self._operations.rollback(epoch, version))

    def advance(self, epoch: int, version: int) -> None:
        """Raise the policy version without a batch: for a publication after a restart. It never goes back.

        Raises:
            Fenced: a newer epoch has begun.
        """
        self._drive(self._operations.advance(epoch, version))

    def reclaim(self) -> int:
        """Expire every open slot now and return how many there were: for who knows that their workers are gone."""
        return self._drive(self._operations.reclaim())

    def drain(self) -> int:
        """Empty the buffer of open slots and ready groups, and return how many; their tasks are issued again."""
        return self._drive(self._operations.drain())

    def delete(self) -> int:
        """Delete all that Redis holds of this run, for good; return how many keys that were."""
        return self._drive(self._operations.delete())

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()

    def _drive[T](self, steps: Steps[T]) -> T:
        """Carry out an operation."""
        step: Callable[[], Run | Send] = partial(next, steps)
        with closing(steps), self._connection.address.named():
            while True:
                try:
                    request = step()
                except StopIteration as end:
                    result: T = end.value
                    return result
                try:
                    step = partial(steps.send, self._connection.perform(request))
                except BufferError as error:
                    step = partial(steps.throw, error)
