"""One sampler of the pool: its actor, what it was asked, and what it last answered. Nothing here waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from cluster.sampler_names import sampler_name
from cluster.services import HEALTH
from cluster.waiting import answered, reason

COUNTERS = ("tokens_sampled", "compilations_after_warmup", "swaps", "swap_seconds")
"""Counters of a sampler's status that are added up over its lives."""


class State(StrEnum):
    """What a sampler does in the pool."""

    STARTING = "starting"
    """Its actor waits for CPUs, compiles, or takes the current weights."""
    SERVING = "serving"
    """Workers ask it."""
    DRAINING = "draining"
    """Workers ask it no more; it finishes what it was asked, and ends."""
    RESTARTING = "restarting"
    """It failed and was killed; another actor takes its place after a pause."""


class PooledSampler:
    """A sampler under one name, through all its lives.

    Attributes:
        index: its number; the name is ``sampler-<index>``.
        state: what it does.
        handle: the actor of its present or last life.
        restarts: how often it was started anew.
        failures: how often it failed without having served for long in between.
        last_error: why it failed last; None if it never did.
        version: the policy version that it held when it last answered; None before.
        admission: the learner's answer, when it was asked to take the sampler up; None if it was not.
        leaving: the workers' answers, when they were asked to leave it alone.
        placed: whether Ray is known to have the CPUs for its present life.
        due: when something must have changed, in seconds of ``time.monotonic``.
        served_since: when it began to serve in its present life; None if it did not.
        proven: whether it ever served.
    """

    def __init__(self, index: int, resources: Mapping[str, float]) -> None:
        """Ask Ray for ``resources``, which stay its own from life to life; nothing runs before :meth:`start`."""
        self.index, self.name = index, sampler_name(index)
        self.state = State.STARTING
        self.handle: Any = None
        self.restarts = self.failures = 0
        self.last_error: str | None = None
        self.version: int | None = None
        self.admission: Any = None
        self.leaving: list[Any] = []
        self.placed = self.proven = False
        self.due = 0.0
        self.served_since: float | None = None
        self._place = placement_group([dict(resources)])
        self._ended_lives = dict.fromkeys(COUNTERS, 0.0)
        self._status: dict[str, Any] = {}
        self._status_call: Any = None
        self._health_call: Any = None
        self._silent_since: float | None = None

    def start(self, make: Callable[[PlacementGroup], Any]) -> None:
        """Begin a life with the actor that ``make`` creates in the place of this sampler."""
        self.state, self.placed, self.admission = State.STARTING, False, None
        self._forget()
        self.handle = make(self._place)
        self._status_call = self.handle.status.remote()

    def serve(self) -> None:
        """It has the current weights, and workers are about to ask it."""
        self.state, self.served_since, self.proven = State.SERVING, time.monotonic(), True

    def kill(self) -> None:
        """End the present life at once, whatever it does."""
        ray.kill(self.handle)
        self._ended_lives = {name: self.total(name) for name in COUNTERS}
        self._forget()

    def end(self) -> None:
        """Give everything back for good."""
        self.kill()
        remove_placement_group(self._place)

    def find_place(self) -> bool:
        """Whether Ray has the CPUs for it now."""
        self.placed = placement_group_table(self._place)["state"] == "CREATED"
        return self.placed

    @property
    def up(self) -> bool:
        """Whether it answers in its present life, be it with the error that its constructor raised."""
        return bool(self._status) or answered(self._status_call)

    def total(self, counter: str) -> float:
        """One of ``COUNTERS``, all lives together."""
        return self._ended_lives[counter] + float(self._status.get(counter, 0))

    def check(self, stall_seconds: float) -> str | None:
        """Take what it answered and ask again; returns what is wrong with it, or None. It must be :attr:`up`.

        Args:
            stall_seconds: longest that it may owe answers without finishing a step, or not answer at all.
        """
        return self._check_status() or self._check_health(stall_seconds)

    def _check_status(self) -> str | None:
        if self._status_call is not None:
            if not answered(self._status_call):
                return None
            try:
                self._status = ray.get(self._status_call)
            except ActorUnavailableError:
                pass  # its health says for how long
            except RayError as error:
                return reason(error)
            if self._status.get("version") is not None:
                self.version = self._status["version"]
        self._status_call = self.handle.status.remote()
        return None

    def _check_health(self, stall_seconds: float) -> str | None:
        now = time.monotonic()
        if self._health_call is not None and answered(self._health_call):
            call, self._health_call = self._health_call, None
            try:
                health = ray.get(call)
            except ActorUnavailableError:
                health = None
            except RayError as error:
                return reason(error)
            if health is not None:
                self._silent_since = None
                if not health["alive"]:
                    return str(self._status.get("failure") or "it serves nobody any more")
                if health["stalled_seconds"] > stall_seconds:
                    return f"{health['stalled']}, for {health['stalled_seconds']:.0f} s"
        if self._silent_since is not None and now - self._silent_since > stall_seconds:
            return f"it did not say how it is for {now - self._silent_since:.0f} s"
        if self._health_call is None:
            self._silent_since = self._silent_since or now
            self._health_call = self.handle.health.options(concurrency_group=HEALTH).remote()
        return None

    def _forget(self) -> None:
        """Nothing is known of a life that has not begun."""
        self._status = {}
        self._status_call = self._health_call = self._silent_since = self.served_since = None
