"""One large batch: lease and decode 256 trajectories, 100 MB, against a bare GET of the same bytes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import redis

from benchmarks.workload import GROUP_SIZE, random_trajectory, stamped
from buffer import Buffer, EmbeddedRedis, Limits, Trajectory, encode

_TRAJECTORIES = 256
_BYTES = 400_000
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Batch:
    """Best times for one batch, in milliseconds."""

    headrace_ms: float
    pipelined_get_ms: float

    @property
    def ratio(self) -> float:
        """How many times longer headrace takes."""
        return self.headrace_ms / self.pipelined_get_ms


def large_batch(server: EmbeddedRedis, seed: int) -> Batch:
    """Take each way in turn, some rounds; return the best time of each."""
    rng = np.random.default_rng(seed)
    examples = [random_trajectory(_BYTES, rng) for _ in range(GROUP_SIZE)]
    admin = redis.Redis.from_url(server.admin_url)
    names = _set(admin, examples)
    buffer = Buffer(server.url, "large-batch", timeout_seconds=60)
    buffer.open(
        Limits(
            max_staleness=0,
            max_age_seconds=math.inf,
            groups_per_batch=_TRAJECTORIES // GROUP_SIZE,
            group_size=GROUP_SIZE,
            max_bytes=1 << 40,
            slot_seconds=60.0,
            max_attempts=1,
        )
    )
    epoch = buffer.begin_epoch()
    leases, gets = [], []
    for version in range(_ROUNDS):
        _commit(buffer, examples)
        leases.append(_lease(buffer, epoch, version))
        gets.append(_get(admin, names))
    buffer.close()
    admin.flushdb()
    admin.close()
    return Batch(1000 * min(leases), 1000 * min(gets))


def _commit(buffer: Buffer, examples: list[Trajectory]) -> None:
    """Make one batch ready."""
    for _ in range(_TRAJECTORIES // GROUP_SIZE):
        slot = buffer.reserve("large-batch", timeout=10)
        buffer.commit(*stamped(examples, slot.group, slot.task, slot.version))


def _lease(buffer: Buffer, epoch: int, version: int) -> float:
    """Lease and decode a batch that is ready; return the seconds that took, and consume it."""
    start = time.perf_counter()
    lease = buffer.lease(epoch, version, timeout=10)
    trajectories = lease.trajectories
    seconds = time.perf_counter() - start
    assert len(trajectories) == _TRAJECTORIES
    buffer.ack(lease, version + 1)
    buffer.checkpointed(epoch, version + 1)
    return seconds


def _set(admin: redis.Redis, examples: list[Trajectory]) -> list[str]:
    """Store the bytes of one batch under bare keys; return their names."""
    payloads = [encode(trajectory) for trajectory in examples]
    names = [f"bare:{number}" for number in range(_TRAJECTORIES)]
    for number, name in enumerate(names):
        admin.set(name, payloads[number % GROUP_SIZE])
    return names


def _get(admin: redis.Redis, names: list[str]) -> float:
    """GET them in pipelines of a group, which is as fast as any; return the seconds that took."""
    payloads: list[bytes] = []
    start = time.perf_counter()
    for first in range(0, len(names), GROUP_SIZE):
        pipeline = admin.pipeline(transaction=False)
        for name in names[first : first + GROUP_SIZE]:
            pipeline.get(name)
        payloads += pipeline.execute()
    seconds = time.perf_counter() - start
    assert None not in payloads
    return seconds
