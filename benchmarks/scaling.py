"""Scaling: what each call costs while many groups are stored, which should not depend on how many."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import redis

from benchmarks.workload import BATCH_GROUPS, random_trajectory, stamped
from buffer import Buffer, EmbeddedRedis, Limits, Trajectory

_BATCHES = 50
"""Batches that go through at each number of stored groups: so many leases and acks, and BATCH_GROUPS times the rest."""

_BYTES = 500
_FILL = 256

Costs = dict[str, float]
"""Median microseconds by call."""


def scaling(server: EmbeddedRedis, stored: list[int], seed: int) -> Iterator[tuple[int, Costs]]:
    """Yield the cost of each call with as many ready groups as each of ``stored`` says, fewest first."""
    example = random_trajectory(_BYTES, np.random.default_rng(seed))
    buffer = Buffer(server.url, "scaling", timeout_seconds=60)
    buffer.open(
        Limits(
            max_staleness=max(stored) // BATCH_GROUPS + 1,
            max_age_seconds=math.inf,
            groups_per_batch=BATCH_GROUPS,
            group_size=1,
            max_bytes=1 << 40,
            slot_seconds=600.0,
            max_attempts=1,
        )
    )
    epoch = buffer.begin_epoch()
    version = filled = 0
    for groups in sorted(stored):
        _fill(buffer, example, groups - filled)
        filled = groups
        yield groups, _costs(buffer, example, epoch, version)
        version += _BATCHES
    buffer.close()
    admin = redis.Redis.from_url(server.admin_url)
    admin.flushdb()
    admin.close()


def _fill(buffer: Buffer, example: Trajectory, groups: int) -> None:
    """Add ready groups, many in one commit."""
    for first in range(0, groups, _FILL):
        slots = [buffer.reserve("fill", timeout=10) for _ in range(min(_FILL, groups - first))]
        buffer.commit(*(stamped([example], slot.group, slot.task, slot.version)[0] for slot in slots))


def _costs(buffer: Buffer, example: Trajectory, epoch: int, version: int) -> Costs:
    """Send batches through, timing each call; as many groups are stored afterwards as before."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed[**P, T](call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        start = time.perf_counter()
        answer = call(*arguments, **named)
        seconds[call.__name__].append(time.perf_counter() - start)
        return answer

    for trained in range(version + 1, version + 1 + _BATCHES):
        lease = timed(buffer.lease, epoch, trained - 1, timeout=10)
        timed(buffer.ack, lease, trained)
        timed(buffer.checkpointed, epoch, trained)
        for _ in range(BATCH_GROUPS):
            slot = timed(buffer.reserve, "scaling", timeout=10)
            timed(buffer.renew, slot.group)
            timed(buffer.commit, *stamped([example], slot.group, slot.task, slot.version))
    order = ("reserve", "commit", "renew", "lease", "ack", "checkpointed")
    return {f"{name}_us": 1e6 * float(np.median(seconds[name])) for name in order}
