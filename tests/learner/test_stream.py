"""The stream of batches in a gang; threads stand where its processes are."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
import redis

from buffer import NOT_SAMPLED, Buffer, EmbeddedRedis, Limits, Status, Trajectory
from learner.objectives import grpo, token_mean, trajectory_credit
from learner.packing import Ladder
from learner.recipe import Recipe
from learner.stream import Stream


class Gang:
    """One of two processes that are threads."""

    count = 2

    def __init__(self, index: int, barrier: threading.Barrier, said: list) -> None:
        self.index, self.leads = index, index == 0
        self._barrier, self._said = barrier, said

    def gather(self, numbers) -> np.ndarray:
        self._said[self.index] = list(numbers)
        self._barrier.wait(60)
        said = np.array(self._said)
        self._barrier.wait(60)
        return said

    gather_floats = gather


@pytest.fixture
def server(tmp_path):
    with EmbeddedRedis(tmp_path) as embedded:
        yield embedded


def complete(buffer: Buffer) -> None:
    slot = buffer.reserve("worker", timeout=0)
    mask = np.array([False, True])
    for index in range(2):
        buffer.commit(
            Trajectory(
                tokens=np.array([1, 2], np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
                versions=np.where(mask, 0, NOT_SAMPLED).astype(np.int32),
                rewards=np.array([index], np.float32),
                reward=float(index),
                status=Status.COMPLETED,
                task=slot.task,
                group=slot.group,
                index=index,
            )
        )


def test_a_damaged_group_of_another_shard_is_made_up_for(server) -> None:
    """Only the first process can do that, and it has its shard already."""
    buffers = [Buffer(server.url, "gang", timeout_seconds=5) for _ in range(2)]
    buffers[0].open(
        Limits(
            max_staleness=9,
            max_age_seconds=600.0,
            groups_per_batch=2,
            group_size=2,
            max_bytes=1 << 24,
            slot_seconds=30.0,
            max_attempts=3,
        )
    )
    epoch = buffers[0].begin_epoch()
    for _ in range(3):
        complete(buffers[0])
    lease = buffers[0].lease(epoch, 0, timeout=0, shard=0, shards=2)
    [bad] = [group for group, shard in lease.batch.items() if shard == 1]
    with redis.Redis.from_url(server.admin_url) as raw:
        raw.delete(*raw.keys(f"*payload:{bad}:*"))
    barrier, said, batches = threading.Barrier(2), [None, None], [None, None]

    def take(index: int) -> None:
        stream = Stream(
            buffers[index],
            epoch,
            ladder=Ladder(((1, 8),)),
            recipe=Recipe(credit=partial(trajectory_credit, advantage=grpo), divisor_of=token_mean().divisor_of),
            put=lambda rows: rows,
            timeout_seconds=30,
            outage_seconds=5,
            stop=threading.Event(),
            gang=Gang(index, barrier, said),
        )
        stream.request(0)
        batches[index] = stream.take()
        stream.close()

    threads = [threading.Thread(target=take, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leader, follower = (batch.leases[0] for batch in batches)
    assert leader.batch == follower.batch and bad not in leader.batch
    assert sorted(leader.group_ids + follower.group_ids) == sorted(leader.batch)
    assert [batch.facts["trajectories"] for batch in batches] == [4, 4]
    for buffer in buffers:
        buffer.close()
