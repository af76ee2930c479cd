"""A rollout worker for the race test: ``race_worker.py FOLDER NAME``. Runs until it is killed.

It runs several groups at once, the members of a group at once, too, and renews their slots. Most episodes are quick,
some take so long that their group is too old before they end, some fail. Some groups are abandoned, some are forgotten
without a word, some commits are sent twice. A trajectory says when its slot was received, and the versions of its
tokens are those that were current while it ran. Every slot is written down before anything is done with it.
"""

import asyncio
import random
import sys
import time
from dataclasses import replace

import numpy as np
from buffer_examples import trajectory
from race_rules import Records, Rules, patiently_async

from buffer import AsyncBuffer, Commit, Failure, WaitTimeout

_GROUPS = 4


class GroupOver(Exception):
    """Nothing is left to do for the group."""


class Group:
    """One group: its slot, and the episodes that run in it."""

    def __init__(self, buffer, rng, slot, received):
        self._buffer, self._rng, self._slot, self._received = buffer, rng, slot, received
        self._versions = {}

    async def run(self):
        """Play every episode, renewing the slot meanwhile; stop all of them when the group is over."""
        episodes = [asyncio.create_task(self._episode(index)) for index in range(self._slot.group_size)]
        running = set(episodes)
        luck = self._rng.random()
        try:
            while running:
                ended, running = await asyncio.wait(
                    running, timeout=self._slot.seconds / 4, return_when=asyncio.FIRST_COMPLETED
                )
                for episode in ended:
                    episode.result()
                if running and luck < 0.03:
                    await patiently_async(self._buffer.abandon, self._slot.group, "env_error")
                if running and luck < 0.06:
                    return
                oldest = min(self._versions.values(), default=None)
                if running and not await patiently_async(self._buffer.renew, self._slot.group, oldest):
                    return
        except GroupOver:
            pass
        finally:
            for episode in episodes:
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)

    async def _episode(self, index):
        failures = 0
        while True:
            version = await patiently_async(self._buffer.version)
            self._versions[index] = min(version, self._versions.get(index, version))
            await asyncio.sleep(5 * self._rng.random() ** 16)
            if self._rng.random() > 0.15:
                return await self._commit(index, version)
            failures += 1
            answer = await patiently_async(self._buffer.fail, self._slot.group, index, failures, "tool_error")
            if answer is Failure.GONE:
                raise GroupOver
            if answer is Failure.DROPPED:
                return None

    async def _commit(self, index, version):
        example = trajectory(self._slot.group, index, version, task=self._slot.task, tokens=self._rng.choice([9, 2000]))
        late_T = np.arange(len(example.tokens)) > len(example.tokens) / 2
        now = await patiently_async(self._buffer.version)
        versions_T = np.where(late_T, np.int32(max(version, now)), example.versions)
        example = replace(example, versions=versions_T, metadata={"received": self._received})
        for _ in range(1 + (self._rng.random() < 0.1)):
            answer = await patiently_async(self._buffer.commit, example, weight=self._rng.choice([0.5, 1, 4]))
            if answer in (Commit.EXPIRED, Commit.STALE):
                raise GroupOver


async def work(folder, name):
    rules = Rules(folder)
    buffer = AsyncBuffer(rules.url, rules.run, timeout_seconds=5)
    slots = Records(rules.folder / f"{name}.slots")

    async def loop(rng):
        while True:
            try:
                slot = await patiently_async(buffer.reserve, name, 0.5)
            except WaitTimeout:
                continue
            received = time.time()
            slots.add("slot", group=slot.group, task=slot.task)
            await Group(buffer, rng, slot, received).run()

    await asyncio.gather(*(loop(random.Random(f"{name}-{n}")) for n in range(_GROUPS)))


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
