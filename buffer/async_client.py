"""``AsyncBuffer``: the asyncio client, for rollout workers.

A worker's part of the protocol::

    slot = await buffer.reserve(worker, timeout=...)
    ...run slot.group_size episodes of task slot.task, renewing the slot meanwhile...
    await buffer.commit(trajectory)                 # each, as it ends
    await buffer.abandon(slot.group, "env_error")   # instead, when one of them cannot end well
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import suppress
from typing import Any

from buffer.codec import encode
from buffer.connection import AsyncConnection
from buffer.errors import BufferError, WaitTimeout
from buffer.protocol import Commit, Keys, Slot, Stats, check_reason, parse, parse_slot, parse_stats
from buffer.trajectory import NOT_SAMPLED, Trajectory


class AsyncBuffer:
    """A run's buffer, seen by rollout workers. For one event loop.

    Every method may raise ``BufferUnavailable`` (no answer from Redis, after three retries of ``timeout_seconds``
    each) and ``NotOpen``. Every method may be called again after an error.
    """

    def __init__(self, url: str, run: str, *, timeout_seconds: float) -> None:
        """Make a client; nothing is connected yet. The arguments are those of ``Buffer``."""
        self._keys = Keys(run)
        self._connection = AsyncConnection(url, self._keys, timeout_seconds)
        # One coroutine of a worker waits in Redis at a time, the others in line behind it: first come, first
        # served, on one connection.
        self._line = asyncio.Lock()

    async def reserve(self, worker: str, timeout: float) -> Slot:
        """Return a slot: the right, and the duty, to run one group.

        Args:
            worker: name of the worker, for people who look for whom a wait waits.
            timeout: seconds to wait for admission; 0 looks once.

        Raises:
            WaitTimeout: nothing was admitted in time. That is back-pressure, not a fault.
        """
        group = uuid.uuid4().hex
        try:
            slot = await self._admit(group, worker, time.monotonic() + timeout)
        except asyncio.CancelledError:
            # The server may have admitted the group while its reply was on the way.
            with suppress(BufferError):
                await self.abandon(group, "cancelled")
            raise
        if slot is None:
            raise WaitTimeout(
                f"no slot for worker {worker} after {timeout:g} s; it waits for the learner to consume groups, "
                f"and for other workers to complete theirs: {await self.stats()}"
            )
        return slot

    async def renew(self, group: str, oldest_version: int | None = None) -> bool:
        """Extend the deadline of a slot by ``Slot.seconds`` from now.

        Args:
            group: the slot's group.
            oldest_version: oldest version that the group's running episodes have sampled with, if known; else
                that of the slot counts.

        Returns:
            False when the slot is gone, or its group can no longer be fresh when it is trained (the slot is
            given up then): stop its episodes.
        """
        answer, _ = await self._run("renew", group, "" if oldest_version is None else int(oldest_version))
        return answer == "ok"

    async def commit(self, trajectory: Trajectory) -> Commit:
        """Add ``trajectory`` to its group; the group is ready when all its members are in.

        Raises:
            ValueError: nothing in it was sampled, or its index or metadata are out of bounds.
            BufferFull: Redis is at its maxmemory; nothing was stored.
        """
        oldest = trajectory.oldest_version
        if oldest == NOT_SAMPLED or trajectory.index < 0:
            raise ValueError(
                f"trajectory {trajectory.index} of group {trajectory.group} has {int(trajectory.loss_mask.sum())} "
                "sampled tokens; expected an index from 0 and at least one sampled token: abandon the group instead"
            )
        payload = encode(trajectory)
        staged = self._keys.staged(trajectory.group, trajectory.index, uuid.uuid4().hex)
        reply = await self._connection.commit(
            staged, payload, trajectory.group, int(trajectory.index), len(payload), oldest
        )
        answer, _ = parse(reply, self._keys, self._connection.where)
        return Commit(answer)

    async def abandon(self, group: str, reason: str) -> bool:
        """Give up a slot; its task is issued again, a bounded number of times.

        Args:
            group: the slot's group.
            reason: a word to count it under, such as a ``Status`` value.

        Returns:
            False when there was nothing to give up: the group is complete or gone.
        """
        answer, _ = await self._run("abandon", group, check_reason(reason))
        return answer == "ok"

    async def stats(self) -> Stats:
        """Return what is in the buffer; its numbers are from one moment, so they add up."""
        return parse_stats((await self._run("stats"))[1])

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def _run(self, name: str, *arguments: str | int) -> tuple[str, list[Any]]:
        return parse(await self._connection.run(name, *arguments), self._keys, self._connection.where)

    async def _admit(self, group: str, worker: str, deadline: float) -> Slot | None:
        """Wait in line, then for admission; None when the deadline passes first."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._line.acquire()
        except TimeoutError:
            return None
        try:
            while True:
                answer, rest = await self._run("reserve", group, worker)
                if answer == "ok":
                    return parse_slot(group, rest)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                await self._connection.wait("slots", remaining)
        finally:
            self._line.release()
