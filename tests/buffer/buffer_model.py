"""The buffer's protocol in plain Python: what every call must answer, and what must be stored after it.

Written from DESIGN.md and the docstrings, not from the scripts. There is no time in it, no atomicity and no bound in
bytes. What the protocol leaves open (which groups a weighted draw takes, which shard a group goes to, which task of
several is issued again first, how groups that are used again queue up among themselves) is told to the model, which
checks that it is possible.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from buffer import Commit, Failure, Limits, Order, State

RESERVED, READY, LEASED = State.RESERVED, State.READY, State.LEASED
SETTLED = "settled"
"""Trained as often as it may be; what is known of it is kept until a checkpoint holds that."""

LIVE = (RESERVED, READY, LEASED, SETTLED)
"""States of the groups that the buffer knows; any other state is the outcome of one that is forgotten."""


@dataclass
class Member:
    bytes: int
    tokens: int
    oldest: int
    weight: float
    damage: str = ""
    """What a lease finds: "" if it is whole, else "quarantined" or "lost"."""


@dataclass
class Group:
    task: int
    ticket: int
    place: float
    size: int
    version: int
    worker: str
    state: str = RESERVED
    members: dict[int, Member] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)
    dropped: set[int] = field(default_factory=set)
    late: bool = False
    """Its deadline has passed, and nobody has noticed yet."""
    old: bool = False
    """Reserved longer ago than any max_age_seconds allows."""
    uses: int = 0
    unsaved: list[int] = field(default_factory=list)
    """Version that came of each use that no checkpoint holds."""
    stored: bool = True
    """Its payloads were not let go of."""
    lease: int | None = None
    shard: int = 0

    @property
    def oldest(self) -> int | None:
        return min((member.oldest for member in self.members.values()), default=None)

    @property
    def bytes(self) -> int:
        return sum(member.bytes for member in self.members.values()) if self.stored else 0

    @property
    def tokens(self) -> int:
        return sum(member.tokens for member in self.members.values())

    @property
    def weight(self) -> float:
        return sum(member.weight for member in self.members.values()) / len(self.members)

    @property
    def damage(self) -> str:
        found = {member.damage for member in self.members.values()}
        return next((damage for damage in ("quarantined", "lost") if damage in found), "")


@dataclass
class Record:
    """A lease, as the server knows it."""

    id: str
    counts: list[int]
    """Groups of each shard, those included that were condemned and are going to be made up for."""
    condemned: bool = False
    """Groups were condemned since the process that leads the gang has asked for it."""


class Model:
    """What a run's buffer should hold."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.groups: dict[str, Group] = {}  # all that were ever reserved, in that order
        self.leases: dict[int, Record] = {}
        self.acked: set[str] = set()
        self.retry: list[int] = []
        self.attempts: Counter[int] = Counter()
        self.cursor = self.tickets = self.version = self.epoch = 0
        self.announced = -1
        self.counters: Counter[str] = Counter()

    # -- what there is --

    def names(self, *states: str) -> list[str]:
        return [name for name, group in self.groups.items() if group.state in states]

    def held(self, version: int) -> list[str]:
        return [name for name in self.names(LEASED) if self.groups[name].lease == version]

    @property
    def outstanding(self) -> int:
        return len(self.names(RESERVED, READY, LEASED))

    @property
    def bytes(self) -> int:
        return sum(self.groups[name].bytes for name in self.names(*LIVE))

    @property
    def unsaved(self) -> int:
        return sum(len(self.groups[name].unsaved) for name in self.names(*LIVE))

    def kept(self) -> list[str]:
        return [name for name in self.names(SETTLED) if self.groups[name].bytes]

    def payloads(self) -> list[tuple[str, int]]:
        """Members whose bytes must be stored."""
        groups = [(name, self.groups[name]) for name in self.names(*LIVE) if self.groups[name].stored]
        return [(name, i) for name, group in groups for i, member in group.members.items() if member.damage != "lost"]

    def frontier(self) -> set[int]:
        """Tasks that were learned from."""
        return {group.task for group in self.groups.values() if group.state in (SETTLED, "acked")}

    def raise_version(self, version: int) -> None:
        self.version, self.announced = max(self.version, version), max(self.announced, version)

    # -- how a group ends --

    def _reissue(self, task: int) -> None:
        self.attempts[task] += 1
        if self.attempts[task] < self.limits.max_attempts:
            self.retry.append(task)
        else:
            del self.attempts[task]
            self.counters["tasks_given_up"] += 1

    def _forget(self, name: str, outcome: str) -> None:
        self.groups[name].state, self.groups[name].stored = outcome, False

    def _settle(self, name: str) -> None:
        group = self.groups[name]
        self.counters["acked"] += 1
        self.attempts.pop(group.task, None)
        group.state, group.lease = SETTLED, None
        if not group.unsaved:
            self._forget(name, "acked")

    def _discard(self, name: str, outcome: str, *, blameless: bool = False) -> bool:
        """Whether the group is lost; one that was trained before is not."""
        group = self.groups[name]
        if group.uses:
            self._settle(name)
            return False
        self._forget(name, outcome)
        self.counters[outcome] += 1
        if blameless:
            self.retry.append(group.task)
        else:
            self._reissue(group.task)
        return True

    def is_old(self, name: str) -> bool:
        return self.groups[name].old and self.limits.max_age_seconds < math.inf

    def is_stale(self, name: str, oldest: int | None, version: int) -> bool:
        return self.is_old(name) or (oldest is not None and version - oldest > self.limits.max_staleness)

    def _discard_if_stale(self, name: str, oldest: int | None, version: int) -> bool:
        if not self.is_stale(name, oldest, version):
            return False
        by_age_only = oldest is None or version - oldest <= self.limits.max_staleness
        if self._discard(name, "stale"):
            self.counters["stale:age"] += by_age_only
        return True

    def _complete(self, name: str) -> None:
        group = self.groups[name]
        group.state, group.place = READY, group.ticket
        self.counters["short_groups"] += len(group.members) < group.size

    def _close_slot(self, name: str, outcome: str) -> bool:
        """Whether the group is lost; one that has enough members is complete."""
        if len(self.groups[name].members) >= self.limits.least_members:
            self._complete(name)
            return False
        return self._discard(name, outcome)

    def sweep(self) -> None:
        """Somebody notices which deadlines have passed."""
        for name in self.names(RESERVED):
            if self.groups[name].late:
                self._close_slot(name, "expired")

    # -- workers --

    def admits(self) -> bool:
        self.sweep()
        return self.outstanding < self.limits.max_groups

    def reserve(self, name: str, worker: str, task: int) -> None:
        assert task not in self.frontier(), "a task that was learned from is issued again"
        assert task not in {self.groups[other].task for other in self.names(RESERVED, READY, LEASED)}
        if self.retry:
            self.retry.remove(task)
        else:
            assert task == self.cursor
            self.cursor += 1
        self.tickets += 1
        self.counters["reserved"] += 1
        self.groups[name] = Group(task, self.tickets, self.tickets, self.limits.group_size, self.version, worker)

    def renew(self, name: str, oldest: int | None) -> bool:
        group = self.groups[name]
        if group.state != RESERVED:
            return False
        known = [version for version in (oldest, group.oldest) if version is not None]
        if self._discard_if_stale(name, min(known, default=None), self.version):
            return False
        group.late = False
        return True

    def commit(self, parts: list[tuple[str, int, Member]]) -> list[Commit | str]:
        """Answers to one call. Of a group that it finds stale, the members that follow are judged like those before."""
        answers: list[Commit | str] = []
        stale: set[str] = set()
        for name, index, member in parts:
            if name not in stale:
                is_live = name in self.names(*LIVE)
                answers.append(self._admit(name, index, member))
                if is_live and answers[-1] is Commit.STALE:
                    stale.add(name)
            elif index >= self.groups[name].size:
                answers.append("index")
            else:
                answers.append(Commit.DUPLICATE if index in self.groups[name].members else Commit.STALE)
        return answers

    def _admit(self, name: str, index: int, member: Member) -> Commit | str:
        group = self.groups.get(name)
        if group is None or group.state not in LIVE:
            # Of a group that is forgotten only the outcome is known, not which members it had.
            outcome = group and group.state
            return {"acked": Commit.DUPLICATE, "stale": Commit.STALE}.get(outcome, Commit.EXPIRED)
        if index >= group.size:
            return "index"
        if index in group.members:
            return Commit.DUPLICATE
        if index in group.dropped or group.state != RESERVED:
            return Commit.EXPIRED
        if self._discard_if_stale(name, member.oldest, self.version):
            return Commit.STALE
        group.members[index] = member
        if len(group.members) == group.size - len(group.dropped):
            self._complete(name)
        return Commit.ACCEPTED

    def fail(self, name: str, index: int, failures: int, reason: str) -> Failure | str:
        group = self.groups[name]
        if group.state != RESERVED:
            return Failure.GONE
        if index >= group.size:
            return "index"
        if failures > group.failures[index]:
            group.failures[index] = failures
            self.counters[f"failed:{reason}"] += 1
        if failures < self.limits.max_member_attempts:
            return Failure.RETRY
        if index not in group.members and index not in group.dropped:
            group.dropped.add(index)
            left = group.size - len(group.dropped)
            if left < self.limits.least_members:
                self._discard(name, "abandoned")
                self.counters[f"abandoned:{reason}"] += 1
                return Failure.GONE
            if len(group.members) == left:
                self._complete(name)
        return Failure.DROPPED

    def abandon(self, name: str, reason: str) -> bool:
        if self.groups[name].state != RESERVED:
            return False
        if self._close_slot(name, "abandoned"):
            self.counters[f"abandoned:{reason}"] += 1
        return True

    def reclaim(self) -> int:
        names = self.names(RESERVED)
        for name in names:
            self._close_slot(name, "expired")
        return len(names)

    def drain(self) -> int:
        names = self.names(RESERVED, READY)
        for name in names:
            if self._discard(name, "abandoned", blameless=True):
                self.counters["abandoned:drained"] += 1
        return len(names)

    # -- the learner --

    def _redeliver(self, names: list[str]) -> None:
        for name in names:
            self.groups[name].state, self.groups[name].lease = READY, None
            self.counters["redelivered"] += 1

    def begin_epoch(self, epoch: int) -> None:
        assert epoch == self.epoch + 1
        self.epoch = epoch
        self._redeliver(self.names(LEASED))
        self.leases.clear()

    def is_new(self, version: int, *, leads: bool) -> bool:
        """Whether a lease for ``version`` may be made, by the process of a gang that leads it."""
        return leads and (version not in self.leases or not any(self.leases[version].counts))

    def _missing(self, version: int, *, leads: bool) -> int:
        """Groups that a lease for ``version`` lacks, having evicted what is too stale for it if it lacks any."""
        self.sweep()
        if not leads:
            return 0
        record = None if self.is_new(version, leads=leads) else self.leases[version]
        whole = sum(record.counts) if record else self.limits.groups_per_batch
        missing = whole - len(self.held(version))
        if missing:
            for name in self.names(READY):
                self._discard_if_stale(name, self.groups[name].oldest, version)
        return missing

    def in_turn(self) -> list[str]:
        """The ready groups that may be leased now; in fifo in this order."""
        ready = sorted(self.names(READY), key=lambda name: self.groups[name].place)
        running = [self.groups[name].ticket for name in self.names(RESERVED)]
        if self.limits.look_ahead is not None and running:
            last = min(running) + self.limits.look_ahead
            ready = [name for name in ready if self.groups[name].place <= last]
        return ready

    def _next(self, missing: int) -> list[str] | None:
        """The next groups in fifo; None if there is no whole batch, whatever the order."""
        budget = self.limits.tokens_per_batch or math.inf
        batch: list[str] = []
        total = 0
        for name in self.in_turn():
            total += self.groups[name].tokens
            if batch and total > budget:
                return batch
            batch.append(name)
            if len(batch) == missing:
                return batch
        return None

    def _is_draw(self, names: set[str], missing: int) -> bool:
        """Whether a draw may take ``names`` and stop there."""
        budget = self.limits.tokens_per_batch or math.inf
        total = sum(self.groups[name].tokens for name in names)
        others = set(self.names(READY)) - names
        is_full = len(names) == missing or any(total + self.groups[name].tokens > budget for name in others)
        return 0 < len(names) <= missing and (total <= budget or len(names) == 1) and is_full

    def wait(self, version: int, *, leads: bool) -> None:
        """The server says that there is no whole batch for ``version``."""
        missing = self._missing(version, leads=leads)
        if not leads:
            assert version not in self.leases or self.leases[version].condemned, "a lease was not given"
            return
        assert missing > 0, "a whole lease was not given again"
        assert self._next(missing) is None, "a whole batch was not leased"

    def claim(self, version: int, lease: str, shards: int, batch: dict[str, int], *, leads: bool) -> list[str]:
        """The server leases ``batch``, the shard of each group; return the groups that are new in it."""
        missing = self._missing(version, leads=leads)
        held, record = self.held(version), None if self.is_new(version, leads=leads) else self.leases[version]
        new = [name for name in batch if name not in held]
        assert set(held) <= batch.keys(), "a lease lost a group"
        assert all(self.groups[name].shard == batch[name] for name in held), "a group changed its shard"
        assert all(self.groups[name].state == READY for name in new), "a group is leased that is not ready"
        for name in new:
            assert not self.is_stale(name, self.groups[name].oldest, version), "a stale group is leased"
        if missing == 0:
            assert new == [], "a whole lease grew"
        elif self.limits.order is Order.FIFO:
            assert set(new) == set(self._next(missing) or ()), "these are not the next groups"
        else:
            assert self._next(missing) is not None and self._is_draw(set(new), missing)
        if self.limits.order is Order.FIFO:
            assert list(batch) == sorted(batch, key=lambda name: self.groups[name].place)
        for name in new:
            self.groups[name].state, self.groups[name].lease, self.groups[name].shard = LEASED, version, batch[name]
        counts = [list(batch.values()).count(shard) for shard in range(shards)]
        if record is None:
            self.leases[version] = Record(lease, counts)
            bytes_of = [sum(self.groups[name].bytes for name in batch if batch[name] == k) for k in range(shards)]
            assert max(bytes_of) - min(bytes_of) <= max(self.groups[name].bytes for name in batch)
        else:
            assert (lease, counts) == (record.id, record.counts), "a condemned group was not made up for in its shard"
            assert leads or not record.condemned, "a lease was given that the process that acks does not know"
            record.condemned = False
        return new

    def condemn(self, version: int, name: str, outcome: str) -> None:
        """The learner finds that a payload of a leased group is damaged or gone."""
        group = self.groups[name]
        assert (group.state, group.lease, group.damage) == (LEASED, version, outcome)
        self.leases[version].condemned = True
        if self.limits.tokens_per_batch is not None:
            self.leases[version].counts[group.shard] -= 1
        if outcome == "quarantined":  # then all payloads of the group are moved away
            for member in group.members.values():
                member.damage = "lost"
        self._discard(name, outcome)

    def ack(self, lease: str, epoch: int, trained: int, version: int) -> tuple[str, list[str]]:
        """What becomes of an ack, and the groups that are to be used again: the caller says in which places."""
        if epoch != self.epoch:
            return "fenced", []
        if lease in self.acked:
            return "repeated", []
        record, names = self.leases.get(trained), self.held(trained)
        if record is None or record.id != lease:
            return "over", []
        if len(names) < sum(record.counts) or record.condemned:
            return "incomplete", []
        del self.leases[trained]
        self.acked.add(lease)
        self.raise_version(version)
        again = []
        for name in names:
            group = self.groups[name]
            group.uses += 1
            group.unsaved.append(version)
            self.counters["uses"] += 1
            if group.uses < self.limits.max_uses and version - group.oldest <= self.limits.max_staleness:
                group.state, group.lease = READY, None
                self.tickets += 1
                again.append(name)
            else:
                self._settle(name)
        for name in self.kept():
            if version - self.groups[name].oldest > self.limits.max_staleness:
                self.groups[name].stored = False
        return "ok", again

    def release(self, lease: str, epoch: int, trained: int) -> str:
        if epoch != self.epoch:
            return "fenced"
        if trained in self.leases and self.leases[trained].id == lease:
            self._redeliver(self.held(trained))
            del self.leases[trained]
        return "ok"

    def checkpointed(self, version: int) -> None:
        for name in self.names(*LIVE):
            group = self.groups[name]
            group.unsaved = [use for use in group.unsaved if use > version]
            if group.state == SETTLED and not group.unsaved:
                self._forget(name, "acked")

    def rollback(self, version: int) -> int:
        undone = 0
        for name in self.names(*LIVE):
            group = self.groups[name]
            later = [use for use in group.unsaved if use > version]
            if not later:
                continue
            undone += len(later)
            group.uses -= len(later)
            group.unsaved = [use for use in group.unsaved if use <= version]
            if group.state != SETTLED:
                continue
            self.counters["acked"] -= 1
            if group.bytes:
                group.state = READY
            else:
                self._discard(name, "stale", blameless=True)
        self.counters["rolled_back"] += undone
        return undone
