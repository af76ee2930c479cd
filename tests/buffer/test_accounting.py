"""The whole protocol against a model in plain Python: random walks, compared after every operation.

The model says what each call must return, where every group is, and what every counter holds. The clock and
damage are part of the walk: a deadline or a reservation is moved into the past, payloads are damaged or deleted.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import redis
from buffer_examples import limits, trajectory

from buffer import OUTCOMES, AsyncBuffer, Buffer, BufferError, Commit, Fenced, WaitTimeout, encode

_EVERYTHING = (
    *(*OUTCOMES, "stale:age", "redelivered", "tasks_given_up", "lease", "lease ahead", "release"),
    *(f"commit {answer}" for answer in Commit),
    *("ack", "repeated ack", "ack of an old epoch", "ack of a lease that is over"),
)


@dataclass
class Group:
    task: int
    version: int
    state: str = "reserved"
    lease: int = -1
    too_old: bool = False
    members: dict[int, int] = field(default_factory=dict)
    damage: str = ""


class Model:
    """What the buffer should do, without atomicity, time or bytes."""

    def __init__(self, bounds):
        self.bounds = bounds
        self.groups = {}  # in ticket order, whatever became of them
        self.retry, self.attempts = [], {}
        self.version = self.epoch = self.cursor = 0
        self.counters = dict.fromkeys(("reserved", *OUTCOMES, "stale:age", "redelivered", "tasks_given_up"), 0)

    def ids(self, *states):
        return [group for group, about in self.groups.items() if about.state in states]

    def retire(self, group, outcome):
        about = self.groups[group]
        about.state, about.members = outcome, {}
        self.counters[outcome] += 1
        if outcome == "acked":
            self.attempts.pop(about.task, None)
            return
        self.attempts[about.task] = self.attempts.get(about.task, 0) + 1
        if self.attempts[about.task] < self.bounds.max_attempts:
            self.retry.append(about.task)
        else:
            del self.attempts[about.task]
            self.counters["tasks_given_up"] += 1

    def retire_if_stale(self, group, oldest, version):
        old_version = version - oldest > self.bounds.max_staleness
        if old_version or self.groups[group].too_old:
            self.retire(group, "stale")
            self.counters["stale:age"] += not old_version
            return True
        return False

    def may_reserve(self):
        return len(self.ids("reserved", "ready", "leased")) < self.bounds.max_groups

    def reserve(self, group):
        task = self.retry.pop(0) if self.retry else self.cursor
        self.cursor += task == self.cursor
        self.groups[group] = Group(task, self.version)
        self.counters["reserved"] += 1

    def commit(self, group, index, oldest):
        about = self.groups[group]
        if about.state not in ("reserved", "ready", "leased"):
            return {"acked": Commit.DUPLICATE, "stale": Commit.STALE}.get(about.state, Commit.EXPIRED)
        if index in about.members:
            return Commit.DUPLICATE
        if self.retire_if_stale(group, oldest, self.version):
            return Commit.STALE
        about.members[index] = oldest
        if len(about.members) == self.bounds.group_size:
            about.state = "ready"
        return Commit.ACCEPTED

    def claim(self, version):
        """The groups of one lease, or None if there is no whole batch."""
        held = [group for group in self.ids("leased") if self.groups[group].lease == version]
        fresh = []
        for group in self.ids("ready"):
            if len(held) + len(fresh) == self.bounds.groups_per_batch:
                break
            if not self.retire_if_stale(group, min(self.groups[group].members.values()), version):
                fresh.append(group)
        if len(held) + len(fresh) < self.bounds.groups_per_batch:
            return None
        for group in fresh:
            self.groups[group].state, self.groups[group].lease = "leased", version
        return sorted(held + fresh, key=list(self.groups).index)

    def lease(self, version):
        while (batch := self.claim(version)) and (bad := [g for g in batch if self.groups[g].damage]):
            for group in bad:
                self.retire(group, self.groups[group].damage)
        return batch

    def redeliver(self, groups):
        for group in groups:
            self.groups[group].state, self.groups[group].lease = "ready", -1
            self.counters["redelivered"] += 1


class Walk:
    """A random walk of ``rng`` through the protocol, on the buffer and on the model at once."""

    def __init__(self, server, run, call, rng):
        self.rng, self.call = rng, call
        bounds = limits(
            max_staleness=rng.randint(0, 2),
            max_age_seconds=3600,
            groups_per_batch=rng.randint(1, 3),
            group_size=rng.randint(1, 2),
            max_attempts=rng.randint(1, 3),
        )
        self.prefix = f"{{headrace:{run}}}:"
        self.raw = redis.Redis.from_url(server.url, decode_responses=True)
        self.buffer = Buffer(server.url, run, timeout_seconds=5)
        self.workers = AsyncBuffer(server.url, run, timeout_seconds=5)
        self.buffer.open(bounds)
        self.model = Model(bounds)
        self.leases = []
        self.seen = Counter()

    def close(self):
        self.buffer.close()
        self.call(self.workers.close())
        self.raw.close()

    def step(self):
        weights = {
            self.reserve: 6,
            self.complete: 6,
            self.commit: 2,
            self.renew: 2,
            self.abandon: 1,
            self.expire: 1,
            self.grow_old: 1,
            self.damage: 1,
            self.lease: 6,
            self.ack: 4,
            self.release: 1,
            self.begin_epoch: 0.5,
            self.advance: 0.5,
        }
        self.rng.choices(list(weights), list(weights.values()))[0]()
        self.check()

    def pick(self, *states):
        """A group in one of ``states``, or one of the last few whatever its state; None if there is none."""
        groups = self.model.ids(*states) if states else list(self.model.groups)[-12:]
        return self.rng.choice(groups) if groups else None

    def reserve(self):
        if not self.model.may_reserve():
            with pytest.raises(WaitTimeout):
                self.call(self.workers.reserve("worker", timeout=0))
            return
        slot = self.call(self.workers.reserve("worker", timeout=0))
        self.model.reserve(slot.group)
        assert (slot.task, slot.version) == (self.model.groups[slot.group].task, self.model.version)

    def commit_member(self, group, index, oldest):
        answer = self.call(self.workers.commit(trajectory(group, index, oldest)))
        assert answer is self.model.commit(group, index, oldest)
        self.seen[f"commit {answer}"] += 1

    def commit(self):
        if group := self.pick():
            index = self.rng.randrange(self.model.bounds.group_size)
            self.commit_member(group, index, max(0, self.model.version - self.rng.randint(0, 3)))

    def complete(self):
        if group := self.pick("reserved"):
            oldest = max(self.model.groups[group].version, self.model.version - self.rng.randint(0, 1))
            for index in range(self.model.bounds.group_size):
                self.commit_member(group, index, oldest)

    def renew(self):
        if group := self.pick():
            about = self.model.groups[group]
            given = self.rng.choice([None, max(0, self.model.version - self.rng.randint(0, 3))])
            oldest = about.version if given is None else given
            is_open = about.state == "reserved"
            renewed = is_open and not self.model.retire_if_stale(group, oldest, self.model.version)
            assert self.call(self.workers.renew(group, given)) == renewed

    def abandon(self):
        if group := self.pick():
            is_open = self.model.groups[group].state == "reserved"
            assert self.call(self.workers.abandon(group, "env_error")) == is_open
            if is_open:
                self.model.retire(group, "abandoned")

    def expire(self):
        if group := self.pick("reserved"):
            self.raw.zadd(f"{self.prefix}reserved", {group: 1})
            self.buffer.stats()
            self.model.retire(group, "expired")

    def grow_old(self):
        if group := self.pick("reserved", "ready", "leased"):
            self.raw.hset(f"{self.prefix}group:{group}", "born", 1)
            self.model.groups[group].too_old = True

    def damage(self):
        group = self.pick("ready", "leased")
        if group and not self.model.groups[group].damage:
            outcome = self.rng.choice(["quarantined", "lost"])
            payload = f"{self.prefix}payload:{group}:{self.rng.choice(list(self.model.groups[group].members))}"
            self.raw.delete(payload)
            if outcome == "quarantined":
                self.raw.set(payload, "damage")
            self.model.groups[group].damage = outcome

    def lease(self):
        ahead = self.rng.choice([-1, 0, 0, 0, 1, 1, 2])
        version = self.model.version + ahead
        if ahead < 0:
            with pytest.raises(BufferError, match="older than the current version"):
                self.buffer.lease(self.model.epoch, version, timeout=0)
            return
        batch = self.model.lease(version)
        if batch is None:
            with pytest.raises(WaitTimeout):
                self.buffer.lease(self.model.epoch, version, timeout=0)
            return
        lease = self.buffer.lease(self.model.epoch, version, timeout=0)
        self.seen["lease ahead" if ahead else "lease"] += 1
        assert lease.group_ids == batch
        assert lease.staleness_max <= self.model.bounds.max_staleness
        indices = list(range(self.model.bounds.group_size))
        assert [[member.index for member in group] for group in lease.groups] == [indices] * len(batch)
        self.leases.append(lease)

    def ack(self):
        if not self.leases:
            return
        model, lease = self.model, self.rng.choice(self.leases[-4:])
        version = lease.version + self.rng.randint(1, 2)
        others = [
            group
            for group in lease.group_ids
            if model.groups[group].state != "leased" or model.groups[group].lease != lease.version
        ]
        if lease.epoch != model.epoch:
            kind = "ack of an old epoch"
        elif not others:
            kind = "ack"
        elif model.groups[others[0]].state == "acked" and model.version >= version:
            kind = "repeated ack"
        else:
            kind = "ack of a lease that is over"
        self.seen[kind] += 1
        if kind in ("ack", "repeated ack"):
            self.buffer.ack(lease, version)
        else:
            with pytest.raises(Fenced):
                self.buffer.ack(lease, version)
        if kind == "ack":
            for group in lease.group_ids:
                model.retire(group, "acked")
            model.version = max(model.version, version)

    def release(self):
        if not self.leases:
            return
        lease = self.rng.choice(self.leases[-4:])
        if lease.epoch != self.model.epoch:
            with pytest.raises(Fenced):
                self.buffer.release(lease)
            return
        self.buffer.release(lease)
        self.seen["release"] += 1
        self.model.redeliver([g for g in self.model.ids("leased") if self.model.groups[g].lease == lease.version])

    def begin_epoch(self):
        self.model.epoch += 1
        assert self.buffer.begin_epoch() == self.model.epoch
        self.model.redeliver(self.model.ids("leased"))

    def advance(self):
        version = self.model.version + self.rng.randint(-1, 2)
        self.buffer.advance(self.model.epoch, version)
        self.model.version = max(self.model.version, version)

    def check(self):
        """Everything is accounted for, and exactly what is outstanding is stored."""
        model, stats = self.model, self.buffer.stats()
        assert stats.unaccounted == 0
        assert {name: stats.counters[name] for name in model.counters} == model.counters
        assert (stats.reserved, stats.ready, stats.leased) == tuple(
            len(model.ids(state)) for state in ("reserved", "ready", "leased")
        )
        assert stats.outstanding <= model.bounds.max_groups
        assert (stats.version, stats.epoch) == (model.version, model.epoch)

        members = {(g, i): about.damage for g, about in model.groups.items() for i in about.members}
        names = {member: f"{self.prefix}payload:{member[0]}:{member[1]}" for member in members}
        stored = set(self.raw.keys(f"{self.prefix}payload:*"))
        assert stored <= set(names.values())
        assert stored >= {names[member] for member, damage in members.items() if damage != "lost"}
        assert self.raw.keys(f"{self.prefix}staged:*") == []
        assert stats.bytes == sum(len(encode(trajectory(group, index))) for group, index in members)


@pytest.mark.parametrize("seed", range(3))
def test_every_operation_does_what_the_model_says(server, run, call, seed):
    rng = random.Random(seed)
    seen = Counter()
    for part in range(8):
        walk = Walk(server, f"{run}-{part}", call, rng)
        for _ in range(200):
            walk.step()
        walk.close()
        seen += walk.seen + Counter(walk.model.counters)
    print(f"\n{dict(seen)}")
    assert min(seen[name] for name in _EVERYTHING) > 0, "the walk missed something that can happen"
