"""The sampler pool: starts the samplers of a run, looks after them while it trains, and changes their number.

A sampler passes through these states; workers ask those alone that serve::

    starting ──► serving ──► draining ──► gone
       ▲  │         │
       │  └────┬────┘ failed: killed, and the learner waits for it no more
       └── restarting

Before workers ask a sampler, the learner has given it the current weights, and gives it all later ones: whatever it
samples is as new as what the others do. ``look`` is called from the driver's loop and waits for nobody: every answer is
taken when it is there.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.config import Config
from cluster.errors import ServiceDied
from cluster.learner_gang import LearnerGang
from cluster.pooled_sampler import COUNTERS, PooledSampler, State
from cluster.services import start_sampler
from cluster.waiting import START_SECONDS, answered, reason

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Pauses before a sampler is started anew double from the first to the longest with each failure; each is shortened by
chance to half at least, so that samplers that failed together do not start together."""
STEADY_SECONDS = 600.0
"""A sampler that has served for so long is as good as new: its failures before do not count any more."""
MOST_ADMISSIONS = 4
"""Samplers that the learner gives the current weights at once; each holds one of its calls, which are for everybody."""
UNPLACED_SECONDS = 10.0
"""How long a sampler waits for CPUs before the display says so."""


class SamplerPool:
    """The samplers of a run."""

    def __init__(self, config: Config, run: str, model_folder: Path, note: Callable[[str], None]) -> None:
        """Start ``sampler.replicas`` samplers, or one for each of ``sampler.urls``; they compile before they answer.

        Args:
            config: of the run.
            run: its name.
            model_folder: what is sampled from; the weights come from the learner.
            note: told what a person should know, a line each.
        """
        self._settings, self._note = config.sampler, note
        self._make = partial(start_sampler, config, run, model_folder)
        self._learner: LearnerGang | None = None
        self._workers: Mapping[str, Any] = {}
        self._members: dict[str, PooledSampler] = {}
        self._started = 0
        self._gone = dict.fromkeys(COUNTERS, 0.0)
        self._unsettled: dict[str, Any] = {}
        """Answers of the learner that are still to come to the admission of samplers that are dismissed."""
        self._oldest_version: int | None = None
        self.restarts = 0
        """How often samplers were started anew."""
        for _ in range(len(self._settings.urls) or self._settings.replicas):
            self._add()

    @property
    def handles(self) -> dict[str, Any]:
        """The actors of all samplers, by name."""
        return {name: member.handle for name, member in self._members.items()}

    @property
    def wanted(self) -> int:
        """Samplers that there are, or will be when all have started."""
        return sum(member.state is not State.DRAINING for member in self._members.values())

    @property
    def serving(self) -> int:
        """Samplers that workers ask."""
        return len(self._in(State.SERVING))

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that a serving sampler held when it last answered.

        The last known if none serves, None before the first answer.
        """
        versions = [member.version for member in self._in(State.SERVING) if member.version is not None]
        self._oldest_version = min(versions, default=self._oldest_version)
        return self._oldest_version

    @property
    def totals(self) -> dict[str, float]:
        """``COUNTERS`` over all samplers that there ever were."""
        members = self._members.values()
        return {name: gone + sum(member.total(name) for member in members) for name, gone in self._gone.items()}

    def serve(self, learner: LearnerGang, workers: Mapping[str, Any]) -> None:
        """Look after samplers that are up, have the learner's first version and are known to ``workers``."""
        self._learner, self._workers = learner, workers
        for member in self._members.values():
            member.serve()

    def look(self) -> None:
        """Take what the samplers answered, ask them again, and do what has become due.

        Raises:
            ServiceDied: a sampler failed more often than ``sampler.max_restarts`` allows.
        """
        self._settle()
        for member in tuple(self._members.values()):
            match member.state:
                case State.STARTING:
                    self._bring_up(member)
                case State.SERVING:
                    problem = member.check(self._settings.stall_seconds)
                    if problem is not None:
                        self._fail(member, problem)
                case State.DRAINING:
                    self._let_go(member)
                case State.RESTARTING:
                    self._restart(member)

    def check(self) -> None:
        """Look at samplers that are up and that nobody starts anew, because nobody publishes to them again.

        Raises:
            ServiceDied: one failed.
        """
        for member in self._members.values():
            problem = member.check(self._settings.stall_seconds)
            if problem is not None:
                raise ServiceDied(f"{member.name} failed: {problem}")

    def scale(self, count: int) -> None:
        """Have ``count`` samplers: start new ones, or let the last finish what they were asked and end.

        Raises:
            ValueError: ``count`` is less than 1, or the samplers are given by ``sampler.urls``.
        """
        if count < 1:
            raise ValueError(f"{count} samplers were asked for; expected at least 1")
        if self._settings.urls:
            raise ValueError("the samplers are those of sampler.urls; their number is that of the URLs")
        staying = [member for member in self._members.values() if member.state is not State.DRAINING]
        self._note(f"{count} samplers are asked for, and there are {len(staying)}")
        for _ in range(count - len(staying)):
            self._add()
        # Those that do not serve are missed least.
        leaving = sorted(staying, key=lambda member: (member.state is State.SERVING, -member.index))
        leaving = leaving[: max(0, len(staying) - count)]
        served = [member for member in leaving if member.state is State.SERVING]
        for member in leaving:
            member.state, member.leaving = State.DRAINING, []
            member.due = time.monotonic() + self._settings.request_timeout_seconds
        if served:
            answers = self._tell_workers()
            for member in served:
                member.leaving = answers

    def _in(self, state: State) -> list[PooledSampler]:
        return [member for member in self._members.values() if member.state is state]

    def _add(self) -> None:
        member = PooledSampler(self._started, {"CPU": self._settings.cpus, **self._settings.resources})
        self._started += 1
        self._members[member.name] = member
        self._start(member)

    def _start(self, member: PooledSampler) -> None:
        member.due = time.monotonic() + UNPLACED_SECONDS
        member.start(partial(self._make, member.index, member.restarts))

    def _restart(self, member: PooledSampler) -> None:
        # The learner must be done with the life before: its late answer would take up a dead actor.
        if time.monotonic() >= member.due and member.name not in self._unsettled:
            self.restarts += 1
            member.restarts += 1
            self._start(member)

    def _bring_up(self, member: PooledSampler) -> None:
        """One look at a sampler that is starting: placed, then constructed, then given the weights."""
        if not member.up:
            self._await_construction(member)
            return
        problem = member.check(self._settings.stall_seconds)
        if problem is None and member.admission is None:
            if self._admissions < MOST_ADMISSIONS:
                member.due = time.monotonic() + START_SECONDS
                member.admission = self._publisher().admit_sampler(member.name, member.handle)
        elif problem is None and answered(member.admission):
            try:
                member.version = ray.get(member.admission)
            except RayError as error:
                problem = f"it did not take the current weights: {reason(error)}"
            else:
                member.serve()
                self._tell_workers()
                self._note(f"{member.name} serves from version {member.version} on")
        elif problem is None and time.monotonic() > member.due:
            problem = f"it did not take the current weights within {START_SECONDS:.0f} s"
        if problem is not None:
            self._fail(member, problem)

    @property
    def _admissions(self) -> int:
        """Samplers that the learner is giving the current weights."""
        pending = [member.admission for member in self._in(State.STARTING) if member.admission is not None]
        return len(self._unsettled) + sum(not answered(admission) for admission in pending)

    def _await_construction(self, member: PooledSampler) -> None:
        late = time.monotonic() > member.due
        if member.placed:
            if late:
                self._fail(member, f"it did not come up within {START_SECONDS:.0f} s")
        elif member.find_place():
            member.due = time.monotonic() + START_SECONDS
        elif late:
            member.due = math.inf
            self._note(
                f"{member.name} waits for {self._shown_resources()} in the Ray cluster; the run goes on meanwhile, and "
                "`ray status` says who holds them"
            )

    def _shown_resources(self) -> str:
        others = "".join(f" and {count:g} {name}" for name, count in self._settings.resources.items())
        return f"{self._settings.cpus:g} free CPUs{others}"

    def _fail(self, member: PooledSampler, problem: str) -> None:
        """Take a sampler out, and prepare its next life or the end of the run."""
        now, most = time.monotonic(), self._settings.max_restarts
        if member.served_since is not None and now - member.served_since >= STEADY_SECONDS:
            member.failures = 0
        member.failures += 1
        member.last_error = problem
        served, member.state = member.state is State.SERVING, State.RESTARTING
        self._dismiss(member)
        member.kill()
        if served:
            self._tell_workers()
        if member.failures > most and not (self._settings.urls and self.serving):  # a server may come back at any time
            self._give_up(member)
            return
        pause = min(FIRST_PAUSE_SECONDS * 2 ** min(member.failures - 1, 10), LONGEST_PAUSE_SECONDS) * random.uniform(
            0.5, 1.0
        )
        member.due = now + pause
        self._note(f"{member.name} failed: {problem}; starting it anew in {pause:.1f} s, {member.failures} of {most}")

    def _give_up(self, member: PooledSampler) -> None:
        """A sampler failed too often. One that was added to a run that goes without it is let go.

        Raises:
            ServiceDied: it was not.
        """
        what = f"{member.name} was started anew {member.restarts} times and failed again: {member.last_error}"
        if member.proven or not self.serving:
            raise ServiceDied(f"{what}; sampler.max_restarts={self._settings.max_restarts} allows no more")
        self._note(f"{what}; the run goes on without it")
        self._remove(member)

    def _let_go(self, member: PooledSampler) -> None:
        """One look at a sampler that is draining."""
        owing = not all(map(answered, member.leaving))
        if owing and time.monotonic() <= member.due and member.check(self._settings.stall_seconds) is None:
            return
        self._dismiss(member)
        self._remove(member)
        late = ", with requests that are asked of others again" if owing else ""
        self._note(f"{member.name} has ended{late}; {self.serving} of {self.wanted} serve")

    def _remove(self, member: PooledSampler) -> None:
        member.end()
        for counter in COUNTERS:
            self._gone[counter] += member.total(counter)
        del self._members[member.name]

    def _dismiss(self, member: PooledSampler) -> None:
        """Have the learner wait for the sampler no more."""
        self._publisher().dismiss_sampler(member.name)
        if member.admission is not None and not answered(member.admission):
            self._unsettled[member.name] = member.admission

    def _settle(self) -> None:
        """Dismiss whom the learner was still admitting when they were dismissed before."""
        for name, admission in tuple(self._unsettled.items()):
            if answered(admission):
                self._publisher().dismiss_sampler(name)
                del self._unsettled[name]

    def _tell_workers(self) -> list[Any]:
        serving = {member.name: member.handle for member in self._in(State.SERVING)}
        return [worker.set_samplers.remote(serving) for worker in self._workers.values()]

    def _publisher(self) -> LearnerGang:
        if self._learner is None:
            raise RuntimeError("nobody gives the samplers weights; call serve first")
        return self._learner
