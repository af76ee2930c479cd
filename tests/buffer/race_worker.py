"""A rollout worker for the race test: ``race_worker.py URL RUN SEED``. Runs until it is killed.

It runs several groups at once; an episode takes up to a third of a second and is sampled with the version that was
current when it began, so versions pass meanwhile. Some groups are abandoned, some commits are sent twice. Each
trajectory says when its slot was received.
"""

import asyncio
import random
import sys
import time

from buffer_examples import trajectory

from buffer import AsyncBuffer, Commit, WaitTimeout


async def run_group(buffer, rng, slot):
    received = time.time()
    for index in range(slot.group_size):
        version = (await buffer.stats()).version
        await asyncio.sleep(rng.random() ** 4 / 3)
        if rng.random() < 0.05:
            await buffer.abandon(slot.group, "env_error")
            return
        if rng.random() < 0.1 and not await buffer.renew(slot.group, version):
            return
        example = trajectory(slot.group, index, version, task=slot.task, tokens=rng.choice([20, 200, 2000]))
        example.metadata["received"] = received
        answers = [await buffer.commit(example) for _ in range(1 + (rng.random() < 0.1))]
        if answers[0] is not Commit.ACCEPTED:
            return


async def work(url, run, seed):
    buffer = AsyncBuffer(url, run, timeout_seconds=10)

    async def loop(rng):
        while True:
            try:
                slot = await buffer.reserve(f"worker-{seed}", timeout=0.5)
            except WaitTimeout:
                continue
            await run_group(buffer, rng, slot)

    await asyncio.gather(*(loop(random.Random(f"{seed}-{n}")) for n in range(6)))


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
