"""``AsyncBuffer``: the asyncio client, for rollout workers.

A worker's part of the protocol::

    slot = await buffer.reserve(worker, timeout=...)
    ...run slot.group_size episodes of task slot.task, renewing the slot meanwhile...
    await buffer.commit(trajectory)                 # each, as it ends
    await buffer.fail(slot.group, index, failures, "env_error")   # instead, for one that cannot end well
    await buffer.abandon(slot.group, "drained")     # instead, to give up the whole group
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial

from buffer.connection import AsyncConnection
from buffer.errors import BufferError
from buffer.keys import Keys
from buffer.lease import Lease
from buffer.limits import Limits
from buffer.operations import LONGEST_BLOCK_SECONDS, Operations
from buffer.protocol import Commit, Failure, Slot, Stats
from buffer.requests import Run, Send, Steps
from buffer.trajectory import Trajectory


class AsyncBuffer:
    """A run's buffer, seen by rollout workers. For one event loop; the methods are those of ``Buffer``.

    Every method may raise ``BufferUnavailable`` (no answer from Redis, after three retries of ``timeout_seconds``
    each) and, ``open`` excepted, ``NotOpen``. Every method may be called again after an error.
    """

    def __init__(self, url: str, run: str, *, timeout_seconds: float, payload_urls: Sequence[str] = ()) -> None:
        """Make a client; nothing is connected yet. The arguments are those of ``Buffer``."""
        keys = Keys(run)
        self._connection = AsyncConnection(url, payload_urls, keys.control, timeout_seconds)
        self._operations = Operations(
            keys,
            self._connection.address.where,
            payload_instances=len(payload_urls),
            block_seconds=min(LONGEST_BLOCK_SECONDS, timeout_seconds / 2),
        )
        # One coroutine of a worker waits in Redis at a time, the others in line behind it: first come, first
        # served, on one connection.
        self._line = asyncio.Lock()

    async def open(self, limits: Limits) -> None:
        """Create the run's control state, or take it up again; see ``Buffer.open``."""
        await self._drive(self._operations.open(limits))

    async def version(self) -> int:
        """Return the current policy version."""
        return await self._drive(self._operations.field("version"))

    async def stats(self) -> Stats:
        """Return what is in the buffer; its numbers are from one moment, so they add up."""
        return await self._drive(self._operations.stats())

    async def reserve(self, worker: str, timeout: float) -> Slot:
        """Return a slot: the right, and the duty, to run one group; see ``Buffer.reserve``."""
        group = self._operations.new_group()
        try:
            slot = await self._admit(group, worker, time.monotonic() + timeout)
        except asyncio.CancelledError:
            # The server may have admitted the group while its reply was on the way.
            with suppress(BufferError):
                await self.abandon(group, "cancelled")
            raise
        if slot is None:
            raise await self._drive(self._operations.no_slot(worker, timeout))
        return slot

    async def renew(self, group: str, oldest_version: int | None = None) -> bool:
        """Extend the deadline of a slot; False when its episodes should be stopped. See ``Buffer.renew``."""
        return await self._drive(self._operations.renew(group, oldest_version))

    async def commit(self, trajectory: Trajectory, *, weight: float = 1.0) -> Commit:
        """Add ``trajectory`` to its group; see ``Buffer.commit``."""
        [answer] = await self._drive(self._operations.commit([trajectory], [weight]))
        return answer

    async def fail(self, group: str, index: int, failures: int, reason: str) -> Failure:
        """Report that a member's episode ended through no fault of the policy; see ``Buffer.fail``."""
        return await self._drive(self._operations.fail(group, index, failures, reason))

    async def abandon(self, group: str, reason: str) -> bool:
        """Give up a slot; see ``Buffer.abandon``."""
        return await self._drive(self._operations.abandon(group, reason))

    async def begin_epoch(self) -> int:
        """Start a new epoch of the learner gang; see ``Buffer.begin_epoch``."""
        return await self._drive(self._operations.begin_epoch())

    async def lease(self, epoch: int, version: int, timeout: float, *, shard: int = 0, shards: int = 1) -> Lease:
        """Return a batch, or one shard of it, none of it too old for ``version``; see ``Buffer.lease``."""
        return await self._drive(self._operations.lease(epoch, version, timeout, shard, shards))

    async def announce(self, epoch: int, version: int) -> None:
        """Say that weights are about to be handed out as ``version``; see ``Buffer.announce``."""
        await self._drive(self._operations.announce(epoch, version))

    async def ack(self, lease: Lease, version: int) -> None:
        """Consume the whole batch of ``lease`` and raise the version; see ``Buffer.ack``."""
        await self._drive(self._operations.ack(lease, version))

    async def release(self, lease: Lease) -> None:
        """Give the whole batch of ``lease`` back untrained; see ``Buffer.release``."""
        await self._drive(self._operations.release(lease))

    async def checkpointed(self, epoch: int, version: int) -> None:
        """Say that a checkpoint with the weights of ``version`` is durable; see ``Buffer.checkpointed``."""
        await self._drive(self._operations.checkpointed(epoch, version))

    async def rollback(self, epoch: int, version: int) -> int:
        """Put back what was trained after the checkpoint of ``version``; see ``Buffer.rollback``."""
        return await self._drive(self._operations.rollback(epoch, version))

    async def advance(self, epoch: int, version: int) -> None:
        """Raise the policy version without a batch; see ``Buffer.advance``."""
        await self._drive(self._operations.advance(epoch, version))

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def _admit(self, group: str, worker: str, deadline: float) -> Slot | None:
        """Wait in line, then for admission; None when the deadline passes first."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._line.acquire()
        except TimeoutError:
            return None
        try:
            return await self._drive(self._operations.reserve(group, worker, deadline))
        finally:
            self._line.release()

    async def _drive[T](self, steps: Steps[T]) -> T:
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
                    step = partial(steps.send, await self._connection.perform(request))
                except BufferError as error:
                    step = partial(steps.throw, error)
