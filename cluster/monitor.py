"""The monitor: looks at every service of a run, records what the learner did, and shows it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray

from buffer import Buffer, BufferUnavailable, Stats
from cluster.display import Display
from cluster.learner_gang import LearnerGang
from cluster.runfolder import RunFolder
from cluster.sampler_pool import SamplerPool
from cluster.telemetry import RayMetrics, Snapshot

ANSWER_SECONDS = 60.0
"""Longest that a service may take to tell how it is."""


class Monitor:
    """What is known of a run's services.

    Attributes:
        stats: the buffer, when it last answered.
        steps: optimizer steps seen so far.
    """

    def __init__(
        self,
        folder: RunFolder,
        display: Display,
        buffer: Buffer,
        *,
        learner: LearnerGang,
        pool: SamplerPool,
        workers: Mapping[str, Any],
        staleness_limit: int,
    ) -> None:
        self._folder, self._display, self._buffer = folder, display, buffer
        self._learner, self._pool, self._workers = learner, pool, workers
        self._metrics = RayMetrics(folder.name)
        self._snapshot: Snapshot = {"staleness_limit": staleness_limit}
        self._sampled = (time.monotonic(), 0.0)
        self._told: dict[tuple[str, str], int] = {}
        self._alarms = 0
        self.stats: Stats | None = None
        self.steps = 0
        self._version = 0
        self._lag: int | None = None

    def look(self) -> None:
        """See how every service is, and show it."""
        self.collect()
        self._display.update(self._snapshot)

    def collect(self) -> None:
        """See how every service is; record new steps and set the metrics. Of samplers, it is what the pool knows.

        Raises:
            RayError: a service failed, or did not answer within ``ANSWER_SECONDS``.
        """
        # The samplers were asked just before the last look at the learner, which may have made many steps since.
        oldest = self._pool.oldest_version
        self._lag = None if oldest is None else max(0, self._version - oldest)
        self.take_steps()
        self._take_workers(self._ask(self._workers))
        self._take_buffer()
        self._take_samplers()
        self._metrics.set(self._snapshot)

    def take_steps(self) -> None:
        """Record what the learner did since the last time."""
        for record in self._learner.poll(ANSWER_SECONDS):
            self._version = max(
                self._version, int(record["version"]) + int(record["leases"])
            )  # published behind the step
            pool = {"samplers_serving": self._pool.serving, "sampler_version_lag": self._lag}
            self._folder.append_metrics("step", {**record, **pool})
            self._snapshot.update({name: record[name] for name in Snapshot.__annotations__ if name in record})  # type: ignore[typeddict-item]
            self.steps = int(record["step"])
            if "agreement_alarm" in record:
                self._alarms += 1
                if self._alarms & (self._alarms - 1) == 0:  # the 1st, 2nd, 4th, ...: told ever more rarely
                    self._display.note(f"alarm {self._alarms}, step {self.steps}: {record['agreement_alarm']}")

    def _ask(self, services: Mapping[str, Any]) -> list[dict[str, Any]]:
        statuses: list[dict[str, Any]] = ray.get(
            [service.status.remote() for service in services.values()], timeout=ANSWER_SECONDS
        )
        return statuses

    def _take_workers(self, statuses: list[dict[str, Any]]) -> None:
        self._snapshot["episodes_per_second"] = sum(status["episodes_per_second"] for status in statuses)
        self._snapshot["requests_asked_again"] = sum(status["asked_again"] for status in statuses)
        self._snapshot["episodes_failed"] = sum(sum(status["errors"].values()) for status in statuses)
        for status in statuses:
            for kind, count in status["errors"].items():
                if count >= self._told.get((status["name"], kind), 1):
                    self._told[status["name"], kind] = 10 * count  # a failure that lasts is told ever more rarely
                    self._display.note(f"{status['name']}: {count} × {kind}, last: {status['last_error']}")

    def _take_samplers(self) -> None:
        pool = self._pool
        now, tokens = time.monotonic(), pool.totals["tokens_sampled"]
        before, tokens_before = self._sampled
        if now > before:
            self._snapshot["sampler_tokens_per_second"] = (tokens - tokens_before) / (now - before)
        self._sampled = (now, tokens)
        self._snapshot["samplers_serving"] = pool.serving
        self._snapshot["samplers_wanted"] = pool.wanted
        self._snapshot["sampler_restarts"] = pool.restarts
        if self._lag is not None:
            self._snapshot["sampler_version_lag"] = self._lag

    def _take_buffer(self) -> None:
        try:
            stats = self._buffer.stats()
        except BufferUnavailable as error:  # workers and learner decide whether that ends the run
            self._display.note(f"the buffer does not answer: {error}")
            return
        self.stats = stats
        self._version = max(self._version, stats.version)
        self._snapshot["groups_reserved"] = stats.reserved
        self._snapshot["groups_ready"] = stats.ready
        self._snapshot["groups_leased"] = stats.leased
        self._snapshot["groups_limit"] = stats.limits.max_groups
        self._metrics.set_groups(stats.counters)
