"""Trajectories and limits for tests."""

import math

import numpy as np

from buffer import Limits, Status, Trajectory


def limits(**changes):
    values = {
        "max_staleness": 1,
        "max_age_seconds": math.inf,
        "groups_per_batch": 2,
        "group_size": 2,
        "max_bytes": 1 << 30,
        "slot_seconds": 60,
        "max_attempts": 3,
    }
    return Limits(**(values | changes))


def trajectory(group, index, version=0, *, task=0, tokens=6):
    """The first two tokens were given, the others were sampled with ``version``."""
    mask_T = np.arange(tokens) >= 2
    return Trajectory(
        tokens=np.arange(tokens, dtype=np.int32),
        loss_mask=mask_T,
        logprobs=np.where(mask_T, np.float32(-0.5), np.float32(0)),
        versions=np.where(mask_T, np.int32(version), np.int32(-1)),
        rewards=np.array([0, 1], np.float32),
        reward=1.0,
        status=Status.COMPLETED,
        task=task,
        group=group,
        index=index,
    )


async def complete(workers, version=0, *, tokens=6):
    """Reserve a slot and commit every member of its group; return the slot."""
    slot = await workers.reserve("worker", timeout=1)
    for index in range(slot.group_size):
        await workers.commit(trajectory(slot.group, index, version, task=slot.task, tokens=tokens))
    return slot


def train(buffer, epoch, versions):
    """Lease and ack a batch at each of ``versions``; return the groups of each."""
    batches = []
    for version in versions:
        lease = buffer.lease(epoch, version, timeout=0)
        batches.append(lease.group_ids)
        buffer.ack(lease, version + 1)
    return batches
