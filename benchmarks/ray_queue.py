"""``ray.util.queue.Queue``, the queue that Ray brings: ``Trajectory`` objects, between Ray actors.

A call's time includes waiting for room or for trajectories where the queue itself waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any, Self

import ray
from ray.util.queue import Empty, Full, Queue

from benchmarks.crew import PATIENCE_SECONDS, REPORT_SECONDS, START_SECONDS, Call, Contender, Tally, Window, work
from benchmarks.workload import GROUP_SIZE, MAX_GROUPS, Workload, stamped

_FULL_SECONDS, _EMPTY_SECONDS = 0.1, 0.005
"""Pauses of the batched calls, which cannot wait. Shorter ones cost more in questions to the queue than they gain."""


class RayQueue:
    """Its ``put`` and ``get``, one trajectory at a time."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._queue = Queue(MAX_GROUPS * GROUP_SIZE, actor_options={"num_cpus": 0})

    def writes(self, writer: int) -> Iterator[Call | None]:
        """Make a group, put its members."""
        examples = self._workload.examples(writer)
        for number in count():
            group = stamped(examples, f"{writer}-{number}", number, 0)
            start = time.perf_counter()
            for trajectory in group:
                while not self._put(trajectory):
                    yield None
            yield Call(time.perf_counter() - start, len(group))

    def reads(self) -> Iterator[Call | None]:
        """Get a trajectory."""
        while True:
            start = time.perf_counter()
            try:
                self._queue.get(timeout=PATIENCE_SECONDS)
            except Empty:
                yield None
                continue
            yield Call(time.perf_counter() - start, 1)

    def _put(self, trajectory: object) -> bool:
        try:
            self._queue.put(trajectory, timeout=PATIENCE_SECONDS)
        except Full:
            return False
        return True


class RayQueueBatched(RayQueue):
    """Its ``put_nowait_batch`` and ``get_nowait_batch``, a group at a time, asked again after a pause."""

    def writes(self, writer: int) -> Iterator[Call | None]:
        """Make a group, put it in one call."""
        examples = self._workload.examples(writer)
        for number in count():
            group = stamped(examples, f"{writer}-{number}", number, 0)
            while True:
                start = time.perf_counter()
                try:
                    self._queue.put_nowait_batch(group)
                    break
                except Full:
                    yield None
                    time.sleep(_FULL_SECONDS)
            yield Call(time.perf_counter() - start, len(group))

    def reads(self) -> Iterator[Call | None]:
        """Get a group in one call."""
        while True:
            start = time.perf_counter()
            try:
                group = self._queue.get_nowait_batch(GROUP_SIZE)
            except Empty:
                yield None
                time.sleep(_EMPTY_SECONDS)
                continue
            yield Call(time.perf_counter() - start, len(group))


class RayCrew:
    """A crew of Ray actors, which ask for no CPU so that any machine takes all of them."""

    def __init__(self, contender: Contender, writers: int) -> None:
        hand = ray.remote(num_cpus=0)(_Hand)
        self._hands: list[Any] = [hand.remote(contender, role) for role in [*range(writers), None]]
        self._tallies: list[Any] = []
        self._closes = 0.0

    def __enter__(self) -> Self:
        ray.get([hand.ready.remote() for hand in self._hands], timeout=START_SECONDS)
        return self

    def __exit__(self, *error: object) -> None:
        for hand in self._hands:
            ray.kill(hand)

    def begin(self, window: Window) -> None:
        """Let all of them begin."""
        self._closes = window.closes
        self._tallies = [hand.work.remote(window) for hand in self._hands]

    def tallies(self) -> list[Tally]:
        """Wait for the end of the window; return the tallies of the writers, then that of the reader."""
        tallies: list[Tally] = ray.get(self._tallies, timeout=self._closes + REPORT_SECONDS - time.monotonic())
        return tallies


class _Hand:
    """One process of a ``RayCrew``."""

    def __init__(self, contender: Contender, role: int | None) -> None:
        self._contender = contender
        self._role = role

    def ready(self) -> None:
        """Answer when the process is up."""

    def work(self, window: Window) -> Tally:
        return work(self._contender, self._role, window)
