"""A server that is killed comes back without its last writes, and nothing is trained on that should not be.

At any moment all keys of a run are noted down; later they are put back as they were, while the learner goes on with
what it holds. Only what a learner and its successor can rely on is checked, not where everything is: that is
``test_model``.
"""

import itertools
from collections import Counter

import pytest
import redis
from buffer_examples import limits, trajectory
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from test_model import idle, walk

from buffer import Buffer, BufferUnavailable, Commit, Fenced, WaitTimeout

_runs = itertools.count()
picks = st.integers(0, 7)

_CALLS = ("produce", "lease", "lease", "ack", "release", "jump")

_EVERYTHING = (
    "forget",
    "wait",
    "lease",
    "lease in turns",
    "asked again",
    "damage",
    "ack",
    "ack after all",
    "jump",
    "all gone",
)
"""What must happen in a run of the test, or it shows less than it seems to."""


class Forgetting(RuleBasedStateMachine):
    """A learner, perhaps a gang of two processes, workers, and a server that forgets."""

    server = None
    seen: Counter

    def __init__(self):
        super().__init__()
        self.run = f"forgetting-{next(_runs)}"
        self.prefix = f"{{headrace:{self.run}}}:"
        self.raw = redis.Redis.from_url(self.server.admin_url)
        self.workers = Buffer(self.server.url, self.run, timeout_seconds=5)
        self.learner = self.follower = None
        self.open_slots = []

    @initialize(
        max_staleness=st.integers(0, 3),
        groups=st.integers(1, 2),
        size=st.integers(1, 2),
        max_uses=st.integers(1, 2),
        tokens=st.sampled_from([None, None, 12]),
        shards=st.integers(1, 2),
        idle=idle,
    )
    def begin(self, max_staleness, groups, size, max_uses, tokens, shards, idle):
        self.idle, self.shards = idle, shards
        self.limits = limits(
            max_staleness=max_staleness,
            groups_per_batch=groups,
            tokens_per_batch=tokens,
            group_size=size,
            max_uses=max_uses,
            max_attempts=9,
        )
        self.ever_trained = set()
        self.workers.open(self.limits)
        self._new_learner()

    def _new_learner(self):
        for client in filter(None, (self.learner, self.follower)):
            client.close()
        self.learner = Buffer(self.server.url, self.run, timeout_seconds=5)
        self.follower = Buffer(self.server.url, self.run, timeout_seconds=5) if self.shards == 2 else None
        self.epoch = self.learner.begin_epoch()
        self.learner.rollback(self.epoch, -1)
        self.version = self.learner.version()
        self.next = self.version
        self.announced = self.learner.announced()
        self.held, self.unanswered, self.acked = [], [], []
        self.uses = Counter()
        self.snapshots = []

    def teardown(self):
        for client in filter(None, (self.learner, self.follower, self.workers)):
            client.close()
        if keys := self.raw.keys(f"{self.prefix}*"):
            self.raw.unlink(*keys)
        self.raw.close()

    # -- the server --

    def _note_down(self):
        names = self.raw.keys(f"{self.prefix}*")
        self.snapshots.append({name: (self.raw.dump(name), max(0, self.raw.pttl(name))) for name in names})

    def _forget(self, position):
        with self.raw.pipeline() as pipeline:
            pipeline.unlink(*self.raw.keys(f"{self.prefix}*"))
            for name, (content, ttl) in self.snapshots[position].items():
                pipeline.restore(name, ttl, content)
            pipeline.execute()
        del self.snapshots[position % len(self.snapshots) + 1 :]  # they are of a past that never was
        self.seen["forget"] += 1
        assert self.workers.stats().unaccounted == 0

    @rule()
    def note_down(self):
        if not self.idle:
            self._note_down()

    @precondition(lambda self: self.snapshots)
    @rule(pick=picks)
    def forget(self, pick):
        self._forget(pick % len(self.snapshots))

    @rule(calls=st.lists(st.sampled_from(_CALLS), min_size=1, max_size=5))
    def lapse(self, calls):
        """Forget the last few calls."""
        self._note_down()
        for call in calls:
            match call:
                case "produce":
                    self._produce(2, 0, True)
                case "lease":
                    self._lease(self.next)
                case "ack" if self.held and not self.unanswered:
                    self._ack_next(True)
                case "release" if self.held and not self.unanswered:
                    self.learner.release(self.held.pop())
                case "jump":
                    self._jump(1)
        self._forget(-1)

    # -- workers --

    def _produce(self, groups, lag, is_whole):
        """Complete so many groups, the last of them perhaps only later."""
        for left in reversed(range(groups)):
            try:
                slot = self.workers.reserve("worker", timeout=0)
            except WaitTimeout:
                return
            members = [trajectory(slot.group, i, max(0, self.version - lag)) for i in range(slot.group_size)]
            if left == 0 and not is_whole:
                self.open_slots.append(members)
                members = members[:-1]
            if members:
                self.workers.commit(*members)

    @rule(groups=st.integers(1, 4), lag=st.integers(0, 1), is_whole=st.booleans())
    def produce(self, groups, lag, is_whole):
        self._produce(groups, lag, is_whole)

    @precondition(lambda self: self.open_slots)
    @rule(pick=picks)
    def complete(self, pick):
        answers = self.workers.commit(*self.open_slots.pop(pick % len(self.open_slots)))
        assert set(answers) <= set(Commit)

    @rule(pick=picks)
    def damage(self, pick):
        """Somebody deletes a payload."""
        if not self.idle and (names := sorted(self.raw.keys(f"{self.prefix}payload:*"))):
            self.raw.delete(names[pick % len(names)])
            self.seen["damage"] += 1

    # -- the learner --

    def _check_knowledge(self):
        """The server knows what the learner told it."""
        stats = self.workers.stats()
        assert stats.unaccounted == 0
        assert stats.version == self.version
        assert self.learner.announced() >= max(self.announced, self.version or -1)
        ours = [group for lease in self.held for group in lease.batch]
        assert self._outcomes(ours) <= {None}, "what the learner holds was given up"
        trained = [group for lease, _ in self.acked for group in lease.batch]
        assert self._outcomes(trained) <= {None, b"acked"}, "what the learner has trained counts as something else"

        past = {name.decode().rpartition(":")[2]: name for name in self.raw.keys(f"{self.prefix}past:*")}
        others = [group for group in past if group not in self.ever_trained]
        assert b"acked" not in self._outcomes(others), "a group counts as trained that was not"

    def _outcomes(self, groups):
        return set(self.raw.mget(f"{self.prefix}past:{group}" for group in groups)) if groups else set()

    def _jump(self, by):
        """Publish weights that no batch led to."""
        if self.held or self.unanswered:
            return
        version = self.next + by
        self.learner.advance(self.epoch, version)
        self.version = self.next = version
        self.seen["jump"] += 1

    @rule(by=st.integers(1, 4))
    def jump(self, by):
        self._jump(by)

    @rule(groups=st.integers(0, 2), ahead=st.sampled_from([0, 0, 0, 1]), forgets=st.booleans())
    def lease(self, groups, ahead, forgets):
        self._produce(groups, 0, True)
        self._lease(self.next + ahead, forgets=forgets and self.shards == 2)

    @rule(groups=st.integers(0, 2), steps=st.integers(1, 3), is_announced=st.booleans())
    def train(self, groups, steps, is_announced):
        """What a learner does all day."""
        for _ in range(steps):
            self._produce(groups, 0, True)
            self._lease(self.next)
            if self.held and not self.unanswered:
                self._ack_next(is_announced)

    def _lease_shards(self, version, *, forgets=False):
        """Have every process of the gang lease its shard, however often that takes; the server may forget between."""
        if forgets:
            self._note_down()
        lease = self.learner.lease(self.epoch, version, timeout=0, shards=self.shards)
        if self.shards == 1:
            return lease
        if forgets:
            self._forget(-1)
        while True:
            try:
                other = self._follow(version)
                break
            except (WaitTimeout, Fenced):  # the lease was forgotten, or a group is to be made up for
                self.seen["asked again"] += 1
                lease = self.learner.lease(self.epoch, version, timeout=0, shards=2)
        assert (other.id, other.batch.keys()) == (lease.id, lease.batch.keys())
        assert sorted([*lease.group_ids, *other.group_ids]) == sorted(lease.batch)
        assert all(len(group) == self.limits.group_size for group in other.groups)
        self.seen["lease in turns"] += forgets
        return lease

    def _follow(self, version):
        return self.follower.lease(self.epoch, version, timeout=0, shard=1, shards=2)

    def _lease(self, version, *, forgets=False):
        try:
            lease = self._lease_shards(version, forgets=forgets)
        except WaitTimeout:
            self.seen["wait"] += 1
            if self.unanswered:
                return
            assert self.workers.version() == self.version, "the learner waits and has not noticed what was forgotten"
            return
        self.next = version + 1
        self.seen["lease"] += 1
        elsewhere = {group for other in self.held for group in other.batch}
        assert not elsewhere & lease.batch.keys(), "a group that is held is leased a second time"
        uses = self.uses + Counter(group for other, _ in self.unanswered for group in other.batch)
        assert max(uses[group] for group in lease.batch) < self.limits.max_uses, "it was acked and is leased again"
        assert all(len(group) == self.limits.group_size for group in lease.groups)
        assert lease.staleness_max <= self.limits.max_staleness
        self.held.append(lease)
        if not self.unanswered:
            self._check_knowledge()

    def _announce(self, version):
        self.learner.announce(self.epoch, version)
        self.announced = max(self.announced, version)

    def _ack(self, lease, version):
        self.learner.ack(lease, version)
        self.version = max(self.version, version)
        self.ever_trained |= lease.batch.keys()
        self.uses.update(lease.batch)
        self.acked.append((lease, version))
        if not self.unanswered:
            self._check_knowledge()

    @precondition(lambda self: self.held and not self.unanswered)
    @rule(is_announced=st.booleans())
    def ack(self, is_announced):
        self._ack_next(is_announced)

    def _ack_next(self, is_announced):
        lease = self.held.pop(0)
        if is_announced:
            self._announce(lease.version + 1)
        self._ack(lease, lease.version + 1)
        self.seen["ack"] += 1

    @precondition(lambda self: self.held and not self.unanswered)
    @rule(is_executed=st.booleans())
    def ack_without_answer(self, is_executed):
        """The server died before it answered, and the learner is going to repeat its call."""
        lease = self.held.pop(0)
        self._announce(lease.version + 1)
        perform = self.learner._connection.perform

        def unavailable(request):
            if is_executed:
                perform(request)
            raise BufferUnavailable("the server died")

        self.learner._connection.perform = unavailable
        try:
            with pytest.raises(BufferUnavailable):
                self.learner.ack(lease, lease.version + 1)
        finally:
            self.learner._connection.perform = perform
        self.unanswered.append((lease, lease.version + 1))

    @precondition(lambda self: self.unanswered)
    @rule()
    def ack_after_all(self):
        lease, version = self.unanswered.pop()
        self._ack(lease, version)
        self.seen["ack after all"] += 1

    @precondition(lambda self: self.acked and not self.unanswered)
    @rule(pick=picks)
    def ack_again(self, pick):
        lease, version = self.acked[pick % len(self.acked)]
        self.learner.ack(lease, version)
        self._check_knowledge()

    @precondition(lambda self: self.held and not self.unanswered)
    @rule(pick=picks)
    def release(self, pick):
        self.learner.release(self.held.pop(pick % len(self.held)))

    @precondition(lambda self: not self.unanswered)
    @rule(share=st.sampled_from([None, None, None, None, 1, 2]))
    def go_on(self, share):
        """Another learner takes over: it can lease, ack and forget everything that is there."""
        if share is None:
            return
        self._new_learner()
        while True:
            try:
                lease = self._lease_shards(self.next)
            except WaitTimeout:
                break
            assert all(len(group) == self.limits.group_size for group in lease.groups)
            self.next += 1
            self._ack(lease, self.next)
            if share == 2:
                return
        self.learner.checkpointed(self.epoch, self.version)
        self._new_learner()  # a lease of which a group was condemned is kept until another learner takes over
        self.workers.drain()
        stats = self.workers.stats()
        assert (stats.outstanding, stats.unaccounted, stats.unsaved, stats.bytes) == (0, 0, 0, 0)
        assert self.raw.keys(f"{self.prefix}group:*") == self.raw.keys(f"{self.prefix}payload:*") == []
        self.seen["all gone"] += 1


@pytest.mark.timeout(900)  # a failure is made small before it is told, which takes up to five minutes
def test_a_server_that_forgets_is_told_again(server):
    seen = walk(Forgetting, server, range(60), steps=30)
    assert [name for name in _EVERYTHING if not seen[name]] == [], "nothing of this happened"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_server_that_forgets_is_told_again_for_long(server):
    walk(Forgetting, server, range(1000, 4000), steps=50)
