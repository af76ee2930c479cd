"""Three ways through one Redis: headrace, bare SET and GET (the limit), and a stream of pickles.

The time of a write call includes encoding or pickling, and no waiting for room.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Iterator
from dataclasses import fields
from itertools import count
from typing import Any

import redis

from benchmarks.crew import PATIENCE_SECONDS, PROCESSES, Call
from benchmarks.workload import BATCH_GROUPS, GROUP_SIZE, MAX_GROUPS, Workload, stamped
from buffer import Buffer, Commit, EmbeddedRedis, Limits, Trajectory, WaitTimeout, encode

_RUN = "throughput"
_STREAM = "stream"
_TIMEOUT_SECONDS = 30.0


class Headrace:
    """The buffer: reserve and commit by the group; lease, ack and checkpointed by the batch, one version each."""

    def __init__(self, server: EmbeddedRedis, workload: Workload) -> None:
        self._url = server.url
        self._workload = workload
        buffer = self._connect()
        buffer.open(
            Limits(
                max_staleness=MAX_GROUPS // BATCH_GROUPS - 1,
                max_age_seconds=math.inf,
                groups_per_batch=BATCH_GROUPS,
                group_size=GROUP_SIZE,
                max_bytes=1 << 40,  # the count is the bound
                slot_seconds=60.0,
                max_attempts=1,
            )
        )
        buffer.close()

    def writes(self, writer: int) -> Iterator[Call | None]:
        """Reserve a slot, make its group, commit it in one call."""
        buffer = self._connect()
        examples = self._workload.examples(writer)
        while True:
            try:
                slot = buffer.reserve(f"writer-{writer}", PATIENCE_SECONDS)
            except WaitTimeout:
                yield None
                continue
            group = stamped(examples, slot.group, slot.task, slot.version)
            start = time.perf_counter()
            answers = buffer.commit(*group)
            yield Call(time.perf_counter() - start, answers.count(Commit.ACCEPTED))

    def reads(self) -> Iterator[Call | None]:
        """Lease and decode a batch, waiting for it included; consume it as a learner that saves after every step."""
        buffer = self._connect()
        epoch = buffer.begin_epoch()
        version = 0
        while True:
            start = time.perf_counter()
            try:
                lease = buffer.lease(epoch, version, PATIENCE_SECONDS)
            except WaitTimeout:
                yield None
                continue
            yield Call(time.perf_counter() - start, len(lease.trajectories))
            version += 1
            buffer.ack(lease, version)
            buffer.checkpointed(epoch, version)

    def _connect(self) -> Buffer:
        return Buffer(self._url, _RUN, timeout_seconds=_TIMEOUT_SECONDS)


class RawRedis:
    """The limit: SET in pipelines, GET and DEL in pipelines; bytes that were encoded once and are never decoded.

    Room and the news of what was written pass between the processes themselves, at no cost to the server.
    """

    def __init__(self, server: EmbeddedRedis, workload: Workload) -> None:
        self._url = server.admin_url
        self._workload = workload
        self._room = PROCESSES.Semaphore(MAX_GROUPS)
        self._written, self._news = PROCESSES.Pipe(duplex=False)
        self._news_lock = PROCESSES.Lock()

    def writes(self, writer: int) -> Iterator[Call | None]:
        """SET the members of a group."""
        server = _connect(self._url)
        payloads = [encode(trajectory) for trajectory in self._workload.examples(writer)]
        for number in count():
            while not self._room.acquire(timeout=PATIENCE_SECONDS):
                yield None
            group = f"raw:{writer}:{number}"
            start = time.perf_counter()
            pipeline = server.pipeline(transaction=False)
            for index, payload in enumerate(payloads):
                pipeline.set(f"{group}:{index}", payload)
            pipeline.execute()
            yield Call(time.perf_counter() - start, len(payloads))
            with self._news_lock:
                self._news.send(group)

    def reads(self) -> Iterator[Call | None]:
        """GET and DEL the members of a group."""
        server = _connect(self._url)
        while True:
            if not self._written.poll(PATIENCE_SECONDS):
                yield None
                continue
            group = self._written.recv()
            names = [f"{group}:{index}" for index in range(GROUP_SIZE)]
            start = time.perf_counter()
            pipeline = server.pipeline(transaction=False)
            for name in names:
                pipeline.get(name)
            pipeline.delete(*names)
            *payloads, _ = pipeline.execute()
            yield Call(time.perf_counter() - start, len(payloads) - payloads.count(None))
            self._room.release()


class RedisStreamPickle:
    """A stream of pickles, which does none of the protocol: XADD in pipelines; XREADGROUP, then XACK and XDEL."""

    def __init__(self, server: EmbeddedRedis, workload: Workload) -> None:
        self._url = server.admin_url
        self._workload = workload
        self._room = PROCESSES.Semaphore(MAX_GROUPS)
        client = _connect(server.admin_url)
        client.xgroup_create(_STREAM, "readers", id="0", mkstream=True)
        client.close()

    def writes(self, writer: int) -> Iterator[Call | None]:
        """Make a group, pickle its members, XADD them."""
        server = _connect(self._url)
        examples = self._workload.examples(writer)
        for number in count():
            while not self._room.acquire(timeout=PATIENCE_SECONDS):
                yield None
            group = stamped(examples, f"{writer}-{number}", number, 0)
            start = time.perf_counter()
            pipeline = server.pipeline(transaction=False)
            for trajectory in group:
                pipeline.xadd(_STREAM, {"pickle": pickle.dumps(_record(trajectory), pickle.HIGHEST_PROTOCOL)})
            pipeline.execute()
            yield Call(time.perf_counter() - start, len(group))

    def reads(self) -> Iterator[Call | None]:
        """Read and unpickle what is there, at most as much as a group, waiting for it included; delete it."""
        server = _connect(self._url)
        beyond_groups = 0
        while True:
            start = time.perf_counter()
            answer: Any = server.xreadgroup(
                "readers", "reader", {_STREAM: ">"}, count=GROUP_SIZE, block=round(1000 * PATIENCE_SECONDS)
            )
            if not answer:
                yield None
                continue
            ((_, entries),) = answer
            records = [pickle.loads(entry[b"pickle"]) for _, entry in entries]
            yield Call(time.perf_counter() - start, len(records))
            names = [name for name, _ in entries]
            pipeline = server.pipeline(transaction=False)
            pipeline.xack(_STREAM, "readers", *names)
            pipeline.xdel(_STREAM, *names)
            pipeline.execute()
            groups, beyond_groups = divmod(beyond_groups + len(names), GROUP_SIZE)
            for _ in range(groups):
                self._room.release()


def _record(trajectory: Trajectory) -> dict[str, Any]:
    return {each.name: getattr(trajectory, each.name) for each in fields(trajectory)}


def _connect(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=_TIMEOUT_SECONDS)
