"""The whole protocol against a model in plain Python (``buffer_model``), on real servers: random sequences of calls.

After every call, what it answered, every counter, where every group is and what is stored are what the model says. The
clock and damage are part of it: a deadline or a reservation is moved into the past, payloads are damaged or deleted. In
half of the runs every request is sent twice, as redis-py does when the reply to the first was lost.

A test that cannot fail shows nothing. To see this one fail, change a script in a copy of the repository::

    cp -r . /tmp/copy && cd /tmp/copy
    sed -i 's/^  return #old > 0$/  return false/; s/^  for _, group in ipairs(old) do$/  for _ in ipairs({}) do/' \
        buffer/scripts/lease.lua
    python -m pytest tests/buffer/test_model.py

Each of these must make it fail, here or in ``test_forgetting``: ``evict`` in lease.lua discards nothing; ack.lua does
not look at ``closed``; ``sweep`` in ledger.lua closes nothing; rollback.lua does not make a group ready;
checkpointed.lua forgets every group it meets; fail.lua never gives a member up; reserve.lua admits one group too many;
``redeliver`` in ledger.lua gives groups new places; commit.lua does not PERSIST.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import redis
from buffer_examples import limits, trajectory
from buffer_model import LEASED, LIVE, READY, RESERVED, SETTLED, Member, Model
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from buffer import (
    OUTCOMES,
    Buffer,
    BufferError,
    Commit,
    Failure,
    Fenced,
    FormatError,
    Order,
    State,
    WaitTimeout,
    encode,
)
from buffer.protocol import parse_claim, text
from buffer.requests import Run

_runs = itertools.count()

_KNOWN = {
    *("control", "counters", "reserved", "running", "ready", "ready_versions", "ready_births", "leased", "leases"),
    *("journal", "trained", "kept", "retry", "attempts", "wake:ready", "wake:slots", "wake:lease"),
    *("quarantine", "garbage"),
}
"""Keys of a run that belong to no group."""

_EVERYTHING = (
    *OUTCOMES,
    *("stale:age", "redelivered", "rolled_back", "uses", "short_groups", "tasks_given_up", "failed:env_error"),
    *("abandoned:env_error", "abandoned:drained", "admission refused", "lease", "lease of shards", "no batch"),
    *("lease again", "made up for", "look ahead", "lease cut by tokens", "replay"),
    *(f"commit {answer}" for answer in (*Commit, "index")),
    *(f"fail {answer}" for answer in Failure),
    *(f"ack {answer}" for answer in ("ok", "repeated", "over", "fenced")),
)
"""What must happen in a run of the test, or it shows less than it seems to."""

idle = st.integers(0, 999).map(lambda number: number == 0)
"""Whether an example is the simplest of its machine, see ``walk``."""
picks = st.integers(0, 15)
"""Which of several; the smallest is the one that has been there for longest."""
few = st.integers(0, 3)
lags = st.sampled_from([0, 0, 1, 2, 4])
"""Versions between the current one and the oldest that a trajectory was sampled with."""


@st.composite
def some_limits(draw):
    order, size = draw(st.sampled_from([Order.FIFO, Order.FIFO, *Order])), draw(st.sampled_from([1, 2, 2, 3]))
    return limits(
        max_staleness=draw(st.integers(0, 3)),
        max_age_seconds=draw(st.sampled_from([math.inf, 3600, 3600])),
        groups_per_batch=draw(st.integers(1, 3)),
        tokens_per_batch=draw(st.sampled_from([None, None, 12, 24])),
        group_size=size,
        min_group_size=draw(st.sampled_from([None, *range(1, size + 1), 1])),
        slot_seconds=1000,
        max_attempts=draw(st.integers(1, 3)),
        max_member_attempts=draw(st.integers(1, 2)),
        order=order,
        look_ahead=draw(st.sampled_from([None, 0, 1, 2])) if order is Order.FIFO else None,
        max_uses=draw(st.integers(1, 3)),
    )


@st.composite
def shapes(draw):
    """How a member is sampled: versions behind, tokens, weight."""
    return draw(lags), draw(st.integers(3, 9)), draw(st.sampled_from([1.0, 1.0, 0.5, 4.0]))


class Protocol(RuleBasedStateMachine):
    """A run of the buffer and its model: a learner gang of two processes, and everybody else."""

    server = None
    seen: Counter

    def __init__(self):
        super().__init__()
        self.run = f"model-{next(_runs)}"
        self.prefix = f"{{headrace:{self.run}}}:"
        self.raw = redis.Redis.from_url(self.server.admin_url, decode_responses=True)
        self.gang, self.anyone, self.watcher, self.leases = [], None, None, []
        self.names = (f"{position * 40503 % 65536:04x}" for position in itertools.count(1))  # in no order
        self.twice = False
        self.most = 0

    def _plain_client(self):
        return Buffer(self.server.url, self.run, timeout_seconds=5, payload_urls=self.payload_urls)

    def _client(self):
        """A client whose requests the model sees, and which may send each of them twice."""
        client = self._plain_client()
        perform = client._connection.perform

        def performed(request):
            reply = perform(request)
            if self.twice:
                reply = perform(request)
            if isinstance(request, Run):
                self._note(request, reply)
            return reply

        client._connection.perform = performed
        return client

    def _note(self, request, reply):
        """Tell the model what the server chose."""
        assert request.name != "hold", "nothing was forgotten, but the learner reminds the server"
        answer, rest = text(reply[1][0]), reply[1][1:]
        if request.name == "lease" and answer == "ok":
            _, _, entry, version, shards = request.arguments
            claim = parse_claim(rest)
            is_new, (ready, in_turn) = self.model.is_new(version, leads=bool(entry)), self._ready()
            batch = {name: group.shard for name, group in claim.groups.items()}
            new = self.model.claim(version, claim.id, shards, batch, leads=bool(entry))
            self.seen["look ahead"] += bool(new) and in_turn < ready
            self.seen["made up for"] += bool(new) and not is_new
            self.seen["lease again"] += not new
            self.seen["lease cut by tokens"] += is_new and len(new) < self.model.limits.groups_per_batch
            self.seen["replay"] += any(self.model.groups[name].uses for name in new)
            corrections = [group.correction for group in claim.groups.values()]
            assert min(corrections, default=1) > 0
            if self.model.limits.order is not Order.PRIORITY or (is_new and len(new) == ready):
                assert corrections == pytest.approx([1] * len(corrections))
        elif request.name == "lease" and answer == "wait":
            _, _, entry, version, _ = request.arguments
            self.model.wait(version, leads=bool(entry))
            self.seen["no batch"] += 1
            ready, in_turn = self._ready()
            self.seen["look ahead"] += in_turn < ready
        elif request.name == "condemn":
            _, _, _, version, name, outcome, *_ = request.arguments
            assert answer == ("gone" if self.twice else "ok")
            self.model.condemn(version, name, outcome)

    def _ready(self):
        """How many groups are ready, and how many may be leased now."""
        return len(self.model.names(READY)), len(self.model.in_turn())

    @initialize(bounds=some_limits(), twice=st.booleans(), has_instance=st.booleans(), idle=idle)
    def begin(self, bounds, twice, has_instance, idle):
        self.idle = idle
        self.model = Model(bounds)
        self.twice = twice
        self.payload_urls = [self.server.url] * has_instance  # the same server, but nobody knows
        self.gang, self.anyone = [self._client(), self._client()], self._client()
        self.watcher = self._plain_client()
        self.anyone.open(bounds)
        self.model.begin_epoch(self.gang[0].begin_epoch())

    def teardown(self):
        if hasattr(self, "model"):
            self.seen.update(self.model.counters)
        for client in filter(None, (*self.gang, self.anyone, self.watcher)):
            client.close()
        if keys := self.raw.keys(f"{self.prefix}*"):
            self.raw.unlink(*keys)
        self.raw.close()

    def pick(self, pick, *states):
        """A group in one of ``states``, or one of the last few, whatever became of them."""
        names = self.model.names(*states) if states else list(self.model.groups)[-8:]
        return names[pick % len(names)]

    # -- workers --

    def _reserve(self):
        """Reserve a slot under a new name; None if it is not admitted."""
        name, worker = next(self.names), f"worker-{len(self.model.groups)}"
        is_admitted = self.model.admits()
        slot = self.anyone._drive(self.anyone._operations.reserve(name, worker, deadline=0))
        assert (slot is not None) == is_admitted
        if slot is None:
            self.seen["admission refused"] += 1
            return None
        self.model.reserve(name, worker, slot.task)
        bounds = self.model.limits
        assert (slot.group, slot.group_size, slot.version) == (name, bounds.group_size, self.model.version)
        assert slot.seconds == bounds.slot_seconds
        return name

    def _reserve_again(self, name):
        group = self.model.groups[name]
        slot = self.anyone._drive(self.anyone._operations.reserve(name, "again", deadline=0))
        assert (slot.task, slot.group_size, slot.version) == (group.task, group.size, group.version)

    def _commit(self, parts):
        """Commit (group, index, shape) of each of ``parts`` in one call."""
        parts = sorted(parts, key=lambda part: part[0])
        trajectories, members = [], []
        for name, index, (lag, tokens, weight) in parts:
            oldest = max(0, self.model.version - lag)
            task = self.model.groups[name].task if name in self.model.groups else 0
            one = trajectory(name, index, oldest, task=task, tokens=tokens)
            trajectories.append(one)
            members.append((name, index, Member(len(encode(one)), tokens, oldest, weight)))
        expected = self.model.commit(members)
        self.seen.update(f"commit {answer}" for answer in expected)
        if self.twice:  # the second of two requests finds a group stale that the first has found so
            stale = {name for name, group in self.model.groups.items() if group.state == "stale"}
            expected = [
                Commit.STALE if name in stale else answer for (name, _, _), answer in zip(parts, expected, strict=True)
            ]
        weights = [weight for _, _, (_, _, weight) in parts]
        if "index" in expected:
            with pytest.raises(ValueError, match="below the group size"):
                self.anyone.commit(*trajectories, weights=weights)
        else:
            assert self.anyone.commit(*trajectories, weights=weights) == expected
        for name, _, _ in parts:
            group = self.model.groups.get(name)
            if group and group.members and group.state in LIVE:
                weight = self.raw.hget(f"{self.prefix}group:{name}", "weight")
                assert float(weight or 1) == pytest.approx(group.weight)

    def _produce(self, running, groups, shape):
        """Reserve slots that stay open, then others whose groups are completed, as far as they are admitted."""
        lag, tokens, weight = shape
        shape = min(lag, self.model.limits.max_staleness), tokens, weight
        for is_begun in range(running):
            name = self._reserve()
            if name and is_begun and self.model.groups[name].size > 1:
                self._commit([(name, 1, shape)])
        names = []
        while len(names) < groups and (name := self._reserve()):
            names.append(name)
        if names:
            self._commit([(name, i, shape) for name in names for i in range(self.model.groups[name].size)])

    @rule(running=few, groups=st.integers(0, 4), shape=shapes())
    def produce(self, running, groups, shape):
        self._produce(running, groups, shape)

    @precondition(lambda self: self.model.names(RESERVED))
    @rule(parts=st.lists(st.tuples(picks, few, shapes()), min_size=1, max_size=4))
    def commit(self, parts):
        self._commit([(self.pick(pick, RESERVED), index, shape) for pick, index, shape in parts])

    def _renew(self, name, lag):
        oldest = None if lag is None else max(0, self.model.version - lag)
        assert self.anyone.renew(name, oldest) == self.model.renew(name, oldest)

    def _fail(self, name, index, is_new):
        group, failures = self.model.groups[name], self.model.groups[name].failures[index] + is_new
        was_dropped = index in group.dropped or index in group.members
        expected = self.model.fail(name, index, max(1, failures), "env_error")
        if expected == "index":
            with pytest.raises(ValueError, match="below the group size"):
                self.anyone.fail(name, index, max(1, failures), "env_error")
            return
        self.seen[f"fail {expected}"] += 1
        answer = self.anyone.fail(name, index, max(1, failures), "env_error")
        # A member that is in or given up does not fail any more; whoever asks nevertheless gets some answer. And the
        # second of two requests finds a group over that the first has ended.
        assert answer == expected or was_dropped or (self.twice and answer == Failure.GONE)

    def _abandon(self, name):
        answer, expected = self.anyone.abandon(name, "env_error"), self.model.abandon(name, "env_error")
        assert answer == (expected and not self.twice)  # the second of two requests finds nothing to give up

    @precondition(lambda self: self.model.names(RESERVED))
    @rule(pick=picks, lag=st.one_of(st.none(), lags), ahead=few)
    def renew(self, pick, lag, ahead):
        if ahead:
            self._advance(self.model.version + ahead)
        self._renew(self.pick(pick, RESERVED), lag)

    @precondition(lambda self: self.model.names(RESERVED))
    @rule(
        pick=picks,
        index=few,
        times=st.integers(1, 3),
        is_new=st.sampled_from([True, True, False]),
        is_well=st.booleans(),
    )
    def fail(self, pick, index, times, is_new, is_well):
        """Fail so many times and, perhaps, end well after all."""
        name = self.pick(pick, RESERVED)
        for _ in range(times):
            self._fail(name, index, is_new)
        if is_well:
            self._commit([(name, index, (0, 5, 1.0))])

    @precondition(lambda self: self.model.names(RESERVED))
    @rule(pick=picks)
    def abandon(self, pick):
        self._abandon(self.pick(pick, RESERVED))

    @precondition(lambda self: self.model.groups)
    @rule(
        pick=picks,
        what=st.sampled_from(["reserve", "commit", "commit", "renew", "fail", "abandon", "peek"]),
        index=few,
        shape=shapes(),
        twice=st.booleans(),
    )
    def call_late(self, pick, what, index, shape, twice):
        """For a group that may be over."""
        name = self.pick(pick)
        match what:
            case "reserve" if self.model.groups[name].state in LIVE:
                self._reserve_again(name)
            case "commit":
                self._commit([(name, index, shape), ("nobody", index, shape)] * (1 + twice))
            case "renew":
                self._renew(name, 0)
            case "fail":
                self._fail(name, index, True)
            case "abandon":
                self._abandon(name)
            case "peek":
                self._peek(name)

    @precondition(lambda self: self.model.names(RESERVED))
    @rule(pick=picks, then=st.sampled_from(["nothing", "nothing", "reserve", "renew", "commit", "fail", "abandon"]))
    def pass_deadline(self, pick, then):
        """What somebody does with the slot before anybody notices its deadline is still in time."""
        name = self.pick(pick, RESERVED)
        self.raw.zadd(f"{self.prefix}reserved", {name: 1}, xx=True)
        self.model.groups[name].late = True
        match then:
            case "reserve":
                self._reserve()
            case "renew":
                self._renew(name, None)
            case "commit":
                self._commit([(name, 0, (0, 5, 1.0))])
            case "fail":
                self._fail(name, 0, True)
            case "abandon":
                self._abandon(name)

    @precondition(lambda self: self.model.names(*LIVE))
    @rule(pick=picks)
    def grow_old(self, pick):
        name = self.pick(pick, READY) if self.model.names(READY) and pick < 8 else self.pick(pick, *LIVE)
        self.raw.hset(f"{self.prefix}group:{name}", "born", 1)
        self.raw.zadd(f"{self.prefix}ready_births", {name: 1}, xx=True)
        self.model.groups[name].old = True

    @precondition(lambda self: self.model.payloads())
    @rule(
        pick=picks,
        damage=st.sampled_from(["quarantined", "lost"]),
        shards=st.integers(-1, 3),
        spare=few,
        shape=shapes(),
    )
    def damage(self, pick, damage, shards, spare, shape):
        """Somebody writes into a payload, or deletes it, and perhaps the learner comes upon it."""
        payloads = self.model.payloads()
        if shards > 0:
            live = self.model.names(READY, LEASED)
            payloads = [payload for payload in payloads if payload[0] in live] or payloads
            self._produce(0, spare, shape)
        name, index = payloads[pick % len(payloads)]
        [key] = set(self.raw.keys(f"{self.prefix}payload:{name}:{index}:*")) - self._garbage()
        if damage == "lost":
            self.raw.delete(key)
        else:
            self.raw.setrange(key, 40, "damage")
        self.model.groups[name].members[index].damage = damage
        if shards > 0:
            record = self.model.leases.get(self.model.version)
            self._lease(0, len(record.counts) if record else shards)

    # -- the learner --

    def _pick_lease(self, pick):
        """One of the last leases, most often of this epoch."""
        current = [lease for lease in self.leases if lease.epoch == self.model.epoch]
        leases = current if current and pick < 12 else self.leases
        return leases[-1 - pick % min(4, len(leases))]

    def _lease(self, ahead, shards):
        """Lease all shards for the current version and so many more; return the first process's, or None."""
        model, version = self.model, self.model.version + ahead
        if ahead < 0:
            with pytest.raises(BufferError, match="older than the current version"):
                self.gang[0].lease(model.epoch, version, timeout=0)
            return None
        if version in model.leases and len(model.leases[version].counts) != shards:
            with pytest.raises(BufferError, match="another number was asked for"):
                self.gang[0].lease(model.epoch, version, timeout=0, shards=shards)
            return None
        is_new = version not in model.leases
        parts = []
        try:
            while len(parts) < shards:
                try:
                    parts.append(self._lease_shard(version, len(parts), shards))
                except WaitTimeout:
                    if not parts:
                        raise
                    assert model.leases[version].condemned
                    self._ack(parts[0], version + 1)
                    parts = [self._lease_shard(version, 0, shards)]  # the first makes up for what was condemned
        except WaitTimeout as wait:
            assert f"for version {version}" in str(wait)
            parts = []
        else:
            self.seen["lease of shards" if shards > 1 else "lease"] += 1
            if all(part.id == parts[-1].id for part in parts):
                self._check_shards(parts, is_new)
        if parts:
            self.leases.append(parts[0])
            return parts[0]
        return None

    def _lease_shard(self, version, shard, shards):
        return self.gang[shard % 2].lease(self.model.epoch, version, timeout=0, shard=shard, shards=shards)

    def _check_shards(self, parts, is_new):
        """Disjoint, together the batch, and each of them what was committed."""
        batch, version = parts[-1].batch, parts[-1].version
        held = sorted(self.model.held(version))
        assert sorted(batch) == held
        assert sorted(name for part in parts for name in part.group_ids) == held
        for part in parts:
            assert (part.epoch, part.version, part.shards) == (self.model.epoch, version, len(parts))
            assert part.group_ids == [name for name in batch if batch[name] == part.shard]
            assert len(part.corrections) == len(part.groups)
            if is_new:
                assert part.staleness_max <= self.model.limits.max_staleness
            for name, group in zip(part.group_ids, part.groups, strict=True):
                members = self.model.groups[name].members
                assert len(members) >= 1
                assert [one.index for one in group] == sorted(members)
                assert all(len(one.tokens) == members[one.index].tokens for one in group)
                assert all(one.oldest_version == members[one.index].oldest for one in group)

    def _announce(self, version):
        self.gang[0].announce(self.model.epoch, version)
        self.model.announced = max(self.model.announced, version)

    def _ack(self, lease, version):
        self._announce(version)
        answer, again = self.model.ack(lease.id, lease.epoch, lease.version, version)
        self.seen[f"ack {answer}"] += 1
        match answer:
            case "fenced" | "over":
                with pytest.raises(Fenced):
                    self.gang[0].ack(lease, version)
            case "incomplete":
                with pytest.raises(BufferError, match="has not been asked for again since"):
                    self.gang[0].ack(lease, version)
            case _:
                self.gang[0].ack(lease, version)
        if again and self.model.limits.order is Order.FIFO:
            places = {name: self.raw.zscore(f"{self.prefix}ready", name) for name in again}
            last = self.model.tickets
            assert sorted(places.values()) == list(range(last - len(again) + 1, last + 1))
            for name, place in places.items():
                self.model.groups[name].place = place

    @rule(
        ahead=st.sampled_from([0, 0, 0, 0, 1, 1, 2, -1]),
        shards=st.sampled_from([1, 1, 2, 3]),
    )
    def lease(self, ahead, shards):
        self._lease(ahead, shards)

    @precondition(lambda self: self.model.leases)
    @rule(pick=picks)
    def lease_again(self, pick):
        versions = sorted(self.model.leases)
        version = versions[pick % len(versions)]
        if version >= self.model.version:
            self._lease(version - self.model.version, len(self.model.leases[version].counts))

    @precondition(lambda self: self.leases)
    @rule(pick=picks, ahead=st.sampled_from([1, 1, 1, 2, 0]))
    def ack(self, pick, ahead):
        lease = self._pick_lease(pick)
        if ahead:
            self._ack(lease, lease.version + ahead)
        else:
            with pytest.raises(ValueError, match="but the lease was trained with"):
                self.gang[0].ack(lease, lease.version)

    @rule(
        steps=st.integers(1, 2),
        running=st.integers(0, 1),
        groups=st.integers(0, 4),
        shape=shapes(),
        shards=st.integers(1, 2),
        behind=st.sampled_from([None, None, 0, 1, 2]),
    )
    def train(self, steps, running, groups, shape, shards, behind):
        """What a learner does all day; its checkpoints are behind."""
        for _ in range(steps):
            self._produce(running, groups, shape)
            if lease := self._lease(0, shards):
                self._ack(lease, lease.version + 1)
        if behind is not None:
            self._checkpointed(self.model.version - behind)

    def _release(self, lease):
        if self.model.release(lease.id, lease.epoch, lease.version) == "fenced":
            with pytest.raises(Fenced):
                self.gang[0].release(lease)
        else:
            self.gang[0].release(lease)

    @precondition(lambda self: self.leases)
    @rule(pick=picks, then=st.sampled_from(["nothing", "ack", "another"]))
    def release(self, pick, then):
        lease = self._pick_lease(pick)
        self._release(lease)
        if then == "ack":
            self._ack(lease, lease.version + 1)
        if then == "another" and lease.version >= self.model.version:
            self._lease(lease.version - self.model.version, lease.shards)
            self._release(lease)

    def _begin_epoch(self):
        old = self.model.epoch
        self.gang[1].close()
        self.gang[1] = self._client()  # a new epoch is a new gang; the first process of it lives on
        self.model.begin_epoch(self.gang[0].begin_epoch())
        for refused in (
            lambda: self.gang[0].lease(old, self.model.version, timeout=0),
            lambda: self.gang[0].advance(old, 99),
            lambda: self.gang[0].announce(old, 99),
            lambda: self.gang[0].checkpointed(old, 99),
            lambda: self.gang[0].rollback(old, -1),
        ):
            with pytest.raises(Fenced):
                refused()

    def _rollback(self, version):
        if self.model.names(LEASED):
            with pytest.raises(BufferError, match="groups are leased"):
                self.gang[0].rollback(self.model.epoch, version)
            return
        answer, undone = self.gang[0].rollback(self.model.epoch, version), self.model.rollback(version)
        assert answer == undone * (not self.twice)  # the second of two requests finds nothing more
        self.most = self.model.outstanding

    def _advance(self, version):
        self.gang[0].advance(self.model.epoch, version)
        self.model.raise_version(version)

    def _checkpointed(self, version):
        self.gang[0].checkpointed(self.model.epoch, version)
        self.model.checkpointed(version)

    @rule(what=st.sampled_from(["announce", "advance", "checkpointed"]), ahead=st.sampled_from([1, 1, 2, 4, 0, -1]))
    def tell(self, what, ahead):
        version = self.model.version + ahead
        match what:
            case "announce":
                self._announce(version)
            case "advance":
                self._advance(version)
            case "checkpointed":
                self._checkpointed(self.model.version - ahead)

    @rule(
        what=st.sampled_from(["nothing", "nothing", "epoch", "rollback", "both", "both", "both", "reclaim", "drain"]),
        behind=st.integers(0, 5),
    )
    def upset(self, what, behind):
        """A learner starts again, or somebody ends what runs."""
        if what in ("epoch", "both"):
            self._begin_epoch()
        match what:  # the second of two requests finds nothing more, and its count is what is returned
            case "rollback" | "both":
                self._rollback(max(-1, self.model.version - behind))
            case "reclaim":
                assert self.anyone.reclaim() == self.model.reclaim() * (not self.twice)
            case "drain":
                answer, expected = self.anyone.drain(), self.model.drain()
                assert answer == expected or (self.twice and answer <= expected)

    # -- people --

    @rule(bounds=some_limits())
    def reopen(self, bounds):
        if self.idle:
            return
        order = self.model.limits.order  # stays: groups that are ready stay in their places
        bounds = replace(bounds, order=order, look_ahead=bounds.look_ahead if order is Order.FIFO else None)
        if any(sum(record.counts) > len(self.model.held(version)) for version, record in self.model.leases.items()):
            bounds = replace(bounds, tokens_per_batch=self.model.limits.tokens_per_batch)  # or who makes up for what?
        self.anyone.open(bounds)
        self.model.limits = bounds
        self.most = self.model.outstanding

    def _peek(self, name):
        group = self.model.groups[name]
        infos = [info for state in State for info in self.anyone.groups(state, 1000) if info.group == name]
        for info in infos:
            if group.damage:
                with pytest.raises(FormatError):
                    for index in group.members:
                        self.anyone.peek(info, index)
            else:
                for index in group.members:
                    assert self.anyone.peek(info, index).index == index

    # -- after everything --

    @invariant()
    def check(self):
        """All is where the model says, and nothing else is there."""
        if self.idle:
            return
        model = self.model
        model.sweep()
        stats = self.watcher.stats()
        assert stats.unaccounted == 0
        assert +Counter(stats.counters) == +model.counters
        assert (stats.reserved, stats.ready, stats.leased, stats.unsaved, stats.bytes) == (
            *(len(model.names(state)) for state in (RESERVED, READY, LEASED)),
            model.unsaved,
            model.bytes,
        )
        assert (stats.version, stats.epoch) == (model.version, model.epoch)
        assert stats.limits.fields() == model.limits.fields()
        oldest = [model.groups[name].oldest for name in model.names(READY)]
        assert stats.oldest_ready_version == min(oldest, default=None)
        assert bool(stats.next_expiry_worker) == bool(model.names(RESERVED))
        assert self.watcher.announced() == model.announced
        self.most = max(min(self.most, stats.outstanding), model.limits.max_groups)
        assert stats.outstanding <= self.most, "only a rollback or other limits may take it beyond the bound"
        attempts = self.raw.hgetall(f"{self.prefix}attempts")
        assert attempts == {str(task): str(failed) for task, failed in model.attempts.items()}
        assert sorted(map(int, self.raw.lrange(f"{self.prefix}retry", 0, -1))) == sorted(model.retry)
        self._check_groups()
        self._check_keys()

    def _check_groups(self):
        found = {info.group: info for state in State for info in self.watcher.groups(state, 1000)}
        expected = [*self.model.names(RESERVED, READY, LEASED), *self.model.kept()]
        assert sorted(found) == sorted(expected)
        for name, info in found.items():
            group = self.model.groups[name]
            assert info.state == (State.KEPT if group.state == SETTLED else group.state)
            assert [(member.index, member.bytes) for member in info.members] == [
                (index, group.members[index].bytes) for index in sorted(group.members)
            ]
            assert (info.task, info.worker, info.version, info.size) == (
                *(group.task, group.worker, group.version, group.size),
            )
            assert (info.oldest_version, info.bytes, info.tokens, info.uses, info.lease_version) == (
                *(group.oldest, group.bytes, group.tokens, group.uses, group.lease),
            )

    def _garbage(self):
        """What some client is going to delete from a payload instance."""
        return set(self.raw.lrange(f"{self.prefix}garbage", 0, -1))

    def _check_keys(self):
        names = [key.removeprefix(self.prefix) for key in set(self.raw.keys(f"{self.prefix}*")) - self._garbage()]
        payloads = [name for name in names if name.startswith("payload:")]
        assert sorted(tuple(name.split(":")[1:3]) for name in payloads) == sorted(
            (name, str(index)) for name, index in self.model.payloads()
        )
        groups = {name.removeprefix("group:") for name in names if name.startswith("group:")}
        assert groups == set(self.model.names(*LIVE))
        assert {
            name for name in names if name.split(":")[0] not in ("payload", "group", "past", "quarantine")
        } <= _KNOWN
        with self.raw.pipeline(transaction=False) as pipeline:
            for name in payloads:
                pipeline.ttl(self.prefix + name)
                pipeline.strlen(self.prefix + name)
            replies = pipeline.execute()
        assert set(replies[::2]) <= {-1}, "a payload that was admitted is going to expire"
        assert sum(replies[1::2]) == sum(
            self.model.groups[name].members[index].bytes for name, index in self.model.payloads()
        )


def walk(machine, server, seeds, steps):
    """Run a machine on ``server``, a new walk for each seed; return how often everything happened.

    Of many examples Hypothesis makes most from earlier ones. Of two, the first is the simplest there is, which idles,
    and the second is new.
    """
    seen = Counter()
    for number in seeds:
        on_server = seed(number)(type(machine.__name__, (machine,), {"server": server, "seen": seen}))
        run_state_machine_as_test(
            on_server, settings=repeatable(max_examples=2, stateful_step_count=steps, report_multiple_bugs=False)
        )
    return seen


def repeatable(**changes):
    health = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(deadline=None, database=None, suppress_health_check=health, **changes)


@pytest.mark.timeout(900)  # a failure is made small before it is told, which takes up to five minutes
def test_every_call_does_what_the_model_says(server):
    seen = walk(Protocol, server, range(45), steps=50)
    assert [name for name in _EVERYTHING if not seen[name]] == [], "nothing of this happened"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_call_does_what_the_model_says_for_long(server):
    walk(Protocol, server, range(1000, 4000), steps=80)


@pytest.mark.timeout(900)
def test_bytes_stay_within_their_bound(server):
    @seed(0)
    @repeatable(max_examples=100)
    @given(
        most=st.integers(1, 6),
        calls=st.lists(
            st.sampled_from(["reserve", "reserve", "commit", "commit", "commit", "train", "checkpoint", "resume"]),
            max_size=40,
        ),
    )
    def check(most, calls):
        _spend(server, most, calls)

    check()


def _spend(server, most, calls):
    """Go through ``calls`` in a buffer with room for the bytes of ``most`` groups, all of the same size."""
    buffer = Buffer(server.url, f"bytes-{next(_runs)}", timeout_seconds=5)
    names = (f"{position:04}" for position in itertools.count())
    size = 2 * len(encode(trajectory("0000", 0)))
    bounds = limits(max_staleness=9, groups_per_batch=1, group_size=2, max_bytes=most * size + size // 2)
    buffer.open(bounds)
    epoch, version, wanted = buffer.begin_epoch(), 0, []

    def reserve():
        """Reserve if the bytes stored, and those that the open slots and this one may bring, are within the bound."""
        before, kept = buffer.stats(), size * len(buffer.groups(State.KEPT, 99))
        free = bounds.max_bytes - before.bytes - (before.reserved + 1) * size
        name = next(names)
        slot = buffer._drive(buffer._operations.reserve(name, "worker", deadline=0))
        fits = free >= 0 or free + kept >= 0  # what is kept for a rollback gives way
        assert (slot is not None) == ((fits or not before.outstanding) and before.outstanding < bounds.max_groups)
        if slot:
            wanted.extend([(name, 0), (name, 1)])

    reserve()
    for call in ["commit", "commit", *calls]:
        match call:
            case "reserve":
                reserve()
            case "commit" if wanted:
                assert buffer.commit(trajectory(*wanted.pop(0), version)) == [Commit.ACCEPTED]
            case "train" if buffer.stats().ready:
                buffer.ack(buffer.lease(epoch, version, timeout=0), version + 1)
                version += 1
            case "checkpoint":
                buffer.checkpointed(epoch, version)
            case "resume":
                epoch = buffer.begin_epoch()
                buffer.rollback(epoch, -1)
        stats = buffer.stats()
        assert 0 <= stats.bytes <= bounds.max_bytes
        assert stats.unaccounted == 0
    buffer.close()
