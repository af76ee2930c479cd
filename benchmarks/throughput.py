"""Throughput: writers and a reader, for some seconds, through each contender in turn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import redis

from benchmarks.contenders import Headrace, RawRedis, RedisStreamPickle
from benchmarks.crew import BenchmarkError, Contender, Crew, ProcessCrew, Tally, Window
from benchmarks.workload import Workload
from buffer import EmbeddedRedis

REDIS_CONTENDERS: dict[str, Callable[[EmbeddedRedis, Workload], Contender]] = {
    "raw_redis": RawRedis,
    "redis_stream_pickle": RedisStreamPickle,
    "headrace": Headrace,
}
RAY_CONTENDERS = ("ray_queue", "ray_queue_batched")
CONTENDERS = (*REDIS_CONTENDERS, *RAY_CONTENDERS)

_WARM_UP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Latency:
    """How long calls took, in milliseconds."""

    p50: float
    p99: float
    p999: float
    calls: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """What one contender did with trajectories of one size.

    Attributes:
        kilobytes: size of one trajectory.
        written: trajectories/s that the writers wrote.
        read: trajectories/s that the reader had in memory.
        write: latency of write calls, each of a group.
        lease: latency of read calls: a lease, or what the contender reads at a time.
        redis_cpu: CPU seconds of the server per second; None if there is none.
    """

    kilobytes: int
    written: float
    read: float
    write: Latency
    lease: Latency
    redis_cpu: float | None

    @property
    def mb_in(self) -> float:
        """MB/s written."""
        return self.written * self.kilobytes / 1000

    @property
    def mb_out(self) -> float:
        """MB/s read."""
        return self.read * self.kilobytes / 1000

    @property
    def redis_cpu_per_gb(self) -> float | None:
        """CPU seconds of the server for each GB that went in and came out."""
        return None if self.redis_cpu is None else 1000 * self.redis_cpu / self.mb_out


def through_redis(name: str, server: EmbeddedRedis, workload: Workload, seconds: float) -> Throughput:
    """Measure one of ``REDIS_CONTENDERS``, on a store that was emptied."""
    admin = redis.Redis.from_url(server.admin_url)
    _empty(admin)
    with ProcessCrew(REDIS_CONTENDERS[name](server, workload), workload.writers) as crew:
        throughput = _measure(crew, workload, seconds, admin)
    _empty(admin)
    admin.close()
    return throughput


def through_ray(name: str, workload: Workload, seconds: float) -> Throughput:
    """Measure one of ``RAY_CONTENDERS``, inside ``local_ray``."""
    from benchmarks.ray_queue import RayCrew, RayQueue, RayQueueBatched

    contender = {"ray_queue": RayQueue, "ray_queue_batched": RayQueueBatched}[name](workload)
    with RayCrew(contender, workload.writers) as crew:
        return _measure(crew, workload, seconds, None)


@contextmanager
def local_ray() -> Iterator[None]:
    """Run a Ray of our own on this machine, as a run of headrace without a cluster does."""
    from cluster.ray_runtime import ray_runtime

    os.environ.pop("RAY_ADDRESS", None)  # never a cluster that happens to be named
    with ray_runtime(cpus=2, dashboard=False, metrics_port=0):
        yield


def _measure(crew: Crew, workload: Workload, seconds: float, admin: redis.Redis | None) -> Throughput:
    opens = time.monotonic() + _WARM_UP_SECONDS
    window = Window(opens, opens + seconds)
    crew.begin(window)
    redis_cpu = _redis_cpu(admin, window) if admin else None
    *writers, reader = crew.tallies()
    written, write = _judge(writers, window, "write")
    read, lease = _judge([reader], window, "read")
    return Throughput(workload.kilobytes, written, read, write, lease, redis_cpu)


def _judge(tallies: list[Tally], window: Window, verb: str) -> tuple[float, Latency]:
    """Return trajectories/s and the latency of the calls that ended within the window."""
    calls = [
        (moved, 1000 * seconds)
        for tally in tallies
        for end, moved, seconds in zip(tally.ends, tally.trajectories, tally.seconds, strict=True)
        if end >= window.opens
    ]
    seconds = window.closes - window.opens
    if not calls:
        raise BenchmarkError(
            f"no {verb} call ended within {seconds:g} s: raise --seconds, or end what else runs on this machine"
        )
    moved, milliseconds = (np.array(column) for column in zip(*calls, strict=True))
    p50, p99, p999 = (float(value) for value in np.percentile(milliseconds, [50, 99, 99.9]))
    return float(moved.sum() / seconds), Latency(p50, p99, p999, len(calls))


def _redis_cpu(admin: redis.Redis, window: Window) -> float:
    """Wait through the window; return the server's CPU seconds per second."""

    def used() -> float:
        info: Any = admin.info("cpu")
        return float(info["used_cpu_user"] + info["used_cpu_sys"])

    time.sleep(max(0.0, window.opens - time.monotonic()))
    start, before = time.monotonic(), used()
    time.sleep(max(0.0, window.closes - time.monotonic()))
    return (used() - before) / (time.monotonic() - start)


def _empty(admin: redis.Redis) -> None:
    """Empty the store and its log, so that no contender pays for what another has left."""

    def rewrite_over() -> bool:
        info: Any = admin.info("persistence")
        return not (info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"])

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not rewrite_over():
            if time.monotonic() > deadline:
                raise BenchmarkError("Redis did not finish rewriting its log within 60 s: the disk may be too slow")
            time.sleep(0.05)

    admin.flushdb()
    wait()
    admin.bgrewriteaof()
    wait()
