"""At least eight processes race for one buffer while they and Redis are killed: nothing stale, lost, or trained twice.

Six workers run groups (``race_worker.py``). A gang of two learner processes (``race_learner.py``) leases batches, each
its own shard, acks them, saves, releases, repeats acks and bumps the version. The test kills with ``kill -9``, once the
learner made progress since the last kill:

* workers, which are replaced: what they had reserved expires,
* Redis, which its guard starts again: everybody repeats what was not answered,
* the gang, which is replaced after so long that what is ready by then is too old: the new one begins an epoch, rolls
  back to the last checkpoint, and goes on. What was trained after that checkpoint does not count as trained.

Redis and the learner are not killed within the same few seconds: with ``appendfsync everysec`` a server that is killed
may forget up to two seconds, when its disk is slow, and it is the learner who tells it again what it held and acked. It
hardly ever does, so in one race up to a second of what it wrote is cut off.

The learners look at every trajectory of every lease: none is too old. At the end every group is looked up: those that a
worker got are all there, each ended in exactly one outcome, the counters agree with that, and the acked ones are those
that the learners wrote down as trained, no more and no fewer, as often as they may be; every task is trained, given up
or waits to be issued again. Groups that were reserved just before a kill of Redis may be unknown to it, and only those.

To see this test fail, copy the repository, break a script in the copy, and run the test there::

    cp -r . /tmp/copy && cd /tmp/copy && $EDITOR buffer/scripts/lease.lua
    PYTHONPATH=/tmp/copy python -m pytest tests/buffer/test_race.py

* ``lease.lua``, no staleness check (``evict`` begins with ``do return false end``): a learner meets a stale trajectory.
* ``ack.lua``, no idempotence (without the three lines that look for ``id`` in ``closed``): a repeated ack is refused.
  If its groups are also consumed whatever they are (without ``settled``), they are counted twice.
* ``ledger.lua``, no expiry (``sweep`` begins with ``do return end``): the slots of killed workers never return.
"""

import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from pathlib import Path

import psutil
import pytest
import redis
from buffer_examples import limits
from race_rules import PATIENCE_SECONDS, Rules, patiently, recorded

from buffer import OUTCOMES, Buffer, Order, State

_HERE = Path(__file__).parent
_RUN = "race"
_PREFIX = f"{{headrace:{_RUN}}}:"
_WORKERS = 6
_LIMITS = {
    "max_staleness": 3,
    "max_age_seconds": 3,
    "groups_per_batch": 4,
    "group_size": 3,
    "min_group_size": 2,
    "slot_seconds": 2,
    "max_attempts": 4,
    "max_member_attempts": 2,
}
_FORGETS_SECONDS = 3
"""What a server was told so long before it was killed, it has not forgotten: it writes down within two seconds."""
_OVERDUE_SECONDS = 20
"""No slot is open for so long after its deadline: somebody sweeps long before."""
_BATCHES_BETWEEN_KILLS = 5
_REDIS_KILLS_PER_MINUTE = 4
"""The guard leaves a server alone that ends more often than five times."""
_KINDS = ("acked", "stale", "stale:age", "expired", "abandoned", "redelivered", "rolled_back", "short_groups")


class Race:
    """The processes, and what they wrote down."""

    def __init__(self, server, folder, bounds, *, forgets):
        self.server, self.folder, self.bounds, self.forgets = server, folder, bounds, forgets
        self.rng = random.Random(0)
        self.buffer = Buffer(server.url, _RUN, timeout_seconds=5)
        self.raw = redis.Redis.from_url(server.admin_url, decode_responses=True)
        self.workers, self.gang = {}, {}
        self.started = 0
        self.redis_kills = []
        self.log = Path(server.folder) / "appendonly.aof"
        self.log_sizes = deque(maxlen=100)

    # -- its course --

    def run(self, rounds):
        """Kill everything ``rounds`` times, and more often until everything has happened that can."""
        self.start()
        self.let_train()
        done = 0
        while done < rounds or (missing := self.missing()):
            assert done < rounds + 4, f"in {done} rounds nothing was ever {missing}"
            self.replace_worker()
            self.kill_redis()
            self.let_train()
            self.replace_worker()
            self.replace_gang()
            self.let_train()
            done += 1
        self.finish()

    def start(self):
        names = ("max_staleness", "max_age_seconds", "groups_per_batch", "group_size", "least_members")
        Rules.write(self.folder, url=self.server.url, run=_RUN, **{name: getattr(self.bounds, name) for name in names})
        self.buffer.open(self.bounds)
        for _ in range(_WORKERS):
            self.start_worker()
        self.start_gang()

    def let_train(self):
        """Wait until some more batches are trained, and until Redis has written down everything so far."""
        goal = self.acks() + _BATCHES_BETWEEN_KILLS
        self.watch(_FORGETS_SECONDS)
        assert self.watch(PATIENCE_SECONDS, lambda: self.acks() >= goal), f"no batches for {PATIENCE_SECONDS} s"
        self.keep_outcomes()

    def finish(self):
        """End the workers at once, the gang when it has acked what it holds; open slots must return by themselves."""
        for process in self.workers.values():
            _kill(process)
        self.workers = {}
        (self.folder / "stop").touch()
        for name, process in self.gang.items():
            status = process.wait(PATIENCE_SECONDS)
            assert status == 0, f"{name} ended with {status}:\n{self.last_words(name)}"
        self.gang = {}
        returned = self.watch(PATIENCE_SECONDS, lambda: self.buffer.stats().reserved == 0)
        assert returned, "the slots of killed workers do not return"

    def stop(self):
        """End everything, whatever it is doing."""
        for process in (*self.workers.values(), *self.gang.values()):
            _kill(process)
        self.buffer.close()
        self.raw.close()

    def watch(self, seconds, ready=lambda: False):
        """Wait so long, or until ``ready``; return whether it is. See to it that all is well meanwhile."""
        deadline = time.monotonic() + seconds
        while not (found := ready()) and time.monotonic() < deadline:
            self.check()
            time.sleep(0.1)
        return found

    def check(self):
        """No process ended by itself, no more is admitted than may be, and no slot outlives its deadline."""
        if self.forgets:
            self.log_sizes.append((time.time(), self.log.stat().st_size))
        if any(process.poll() is not None for process in (*self.workers.values(), *self.gang.values())):
            time.sleep(1)  # one process of the gang ends with the other
            ended = [name for name, process in (self.workers | self.gang).items() if process.poll() is not None]
            pytest.fail("\n\n".join(f"{name} ended by itself:\n{self.last_words(name)}" for name in ended))
        stats = patiently(self.buffer.stats)
        most = self.bounds.max_groups + stats.counters["rolled_back"]  # what is put back is not admitted
        assert stats.outstanding <= most, f"{stats.outstanding} groups are outstanding, at most {most} may be"
        for group in patiently(self.buffer.groups, State.RESERVED, 1):
            overdue = -group.expires_seconds
            assert overdue < _OVERDUE_SECONDS, f"a slot of {group.worker} expired {overdue:.0f} s ago and is still open"

    # -- its processes --

    def start_worker(self):
        self.started += 1
        name = f"worker-{self.started}"
        self.workers[name] = self.start_process(name, "race_worker.py", name)

    def start_gang(self):
        self.started += 1
        for shard, end in enumerate(socket.socketpair()):
            name = f"learner-{self.started}-{shard}"
            arguments = (str(shard), str(end.fileno()), str(self.started))
            self.gang[name] = self.start_process(name, "race_learner.py", *arguments, descriptors=(end.fileno(),))
            end.close()

    def start_process(self, name, script, *arguments, descriptors=()):
        path = os.pathsep.join([str(_HERE.parents[1]), str(_HERE)])
        with (self.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, str(_HERE / script), str(self.folder), *arguments],
                env=os.environ | {"PYTHONPATH": path},
                stderr=log,
                pass_fds=descriptors,
            )

    def last_words(self, name):
        return (self.folder / f"{name}.log").read_text()[-3000:]

    def replace_worker(self):
        _kill(self.workers.pop(self.rng.choice(list(self.workers))))
        self.start_worker()

    def replace_gang(self):
        """Kill it when it holds a lease, and has trained what is in no checkpoint."""
        assert self.watch(PATIENCE_SECONDS, self.worth_a_kill), f"nothing was held and unsaved for {PATIENCE_SECONDS} s"
        for name in self.rng.sample(list(self.gang), len(self.gang)):
            _kill(self.gang.pop(name))
        self.watch(1.2 * self.bounds.max_age_seconds)
        self.start_gang()

    def kill_redis(self):
        earlier = self.redis_kills[-_REDIS_KILLS_PER_MINUTE:]
        if len(earlier) == _REDIS_KILLS_PER_MINUTE:
            self.watch(earlier[0] + 60 - time.time())
        victim = psutil.Process(self.server.pid)
        if self.forgets:
            victim.suspend()
            moment = time.time() - self.rng.uniform(0, 1)
            os.truncate(self.log, max(size for noted, size in self.log_sizes if noted < moment))
        victim.kill()
        self.redis_kills.append(time.time())
        assert self.watch(PATIENCE_SECONDS, lambda: self.server.pid != victim.pid), "Redis was not started again"

    def keep_outcomes(self):
        """Keep what Redis would forget after some minutes: what became of groups."""
        with self.raw.pipeline(transaction=False) as pipeline:
            for key in self.raw.scan_iter(f"{_PREFIX}past:*", count=1000):
                pipeline.persist(key)
            pipeline.execute()

    # -- what is known of it --

    @property
    def records(self):
        return recorded(self.folder / "learner.records")

    def acks(self):
        return sum(record["event"] == "acked" for record in self.records)

    def worth_a_kill(self):
        """Whether the learner holds a lease, and has acked after its last checkpoint."""
        events = [record["event"] for record in self.records]
        events = events[len(events) - events[::-1].index("begin") :]
        held = events.count("leased") - events.count("acked") - events.count("released")
        return held > 0 and [event for event in events if event in ("acked", "saved")][-1:] == ["acked"]

    def missing(self):
        """What has not happened yet."""
        counters = patiently(self.buffer.stats).counters
        by_version = counters["stale"] - counters["stale:age"]
        return [kind for kind in _KINDS if counters[kind] == 0] + ["stale in versions"] * (by_version == 0)

    def near_a_kill(self, moment):
        """Whether Redis may have forgotten what it was told then."""
        return any(abs(moment - kill) < _FORGETS_SECONDS for kill in self.redis_kills)

    def slots(self):
        """Record of each group that a worker got."""
        return {record["group"]: record for path in self.folder.glob("*.slots") for record in recorded(path)}

    def trained(self):
        """Group and task of each training that the last learner's weights have seen."""
        batches = []
        for record in self.records:
            if record["event"] == "begin":
                batches = [batch for batch in batches if batch["version"] <= record["checkpoint"]]
            elif record["event"] == "acked":
                batches.append(record)
        return [pair for batch in batches for pair in batch["tasks"].items()]

    def outcomes(self):
        """Look behind the protocol: what became of each group that Redis knows."""
        outcomes = {}
        for key in self.raw.scan_iter(f"{_PREFIX}past:*", count=1000):
            outcomes[key.removeprefix(f"{_PREFIX}past:")] = self.raw.get(key)
        for key in self.raw.scan_iter(f"{_PREFIX}group:*", count=1000):
            group = key.removeprefix(f"{_PREFIX}group:")
            assert group not in outcomes, f"group {group} is forgotten and still there"
            assert self.raw.hget(key, "settled"), (
                f"group {group} is neither outstanding nor in an outcome: {self.raw.hgetall(key)}"
            )
            outcomes[group] = "acked"
        return outcomes

    def account(self):
        """Account for every group that was ever reserved."""
        self.buffer.drain()
        stats = self.buffer.stats()
        counters = stats.counters
        print(f"\n{stats}\n{ {name: value for name, value in counters.items() if value} }")
        outcomes, slots, trained = self.outcomes(), self.slots(), self.trained()

        # Each group that Redis knows ended in exactly one outcome, and the counters say which.
        assert (stats.unaccounted, stats.outstanding) == (0, 0), "some are counted twice, or not at all"
        assert Counter(outcomes.values()) == {name: counters[name] for name in OUTCOMES if counters[name]}
        assert counters["reserved"] == len(outcomes)
        assert counters["quarantined"] == 0
        assert counters["lost"] == 0 or self.forgets

        # It knows each group that a worker got.
        assert {group for group, _ in trained} <= slots.keys()
        forgotten = slots.keys() - outcomes.keys()
        unexplained = {group for group in forgotten if not self.near_a_kill(slots[group]["time"])}
        assert not unexplained, f"reserved, and nowhere to be found: {unexplained}"

        # What counts as acked was trained; what was trained counts as acked, as often as it was.
        times = Counter(group for group, _ in trained if group not in forgotten)
        acked = {group for group, outcome in outcomes.items() if outcome == "acked"}
        assert not acked - times.keys(), f"counted as acked, and not trained: {acked - times.keys()}"
        others = {group: outcomes[group] for group in times.keys() - acked}
        assert not others, f"trained, and counted as something else: {others}"
        repeated = {group: n for group, n in times.items() if n > self.bounds.max_uses}
        assert not repeated, f"trained too often: {repeated}"
        assert counters["uses"] - counters["rolled_back"] == times.total(), "a training is counted twice, or not at all"

        # No task is lost, and none is trained in two groups.
        tasks = {group: task for group, task in trained if group in acked}
        assert len(set(tasks.values())) == len(tasks)
        issued, waiting = int(self.raw.hget(f"{_PREFIX}control", "cursor")), self.raw.llen(f"{_PREFIX}retry")
        found = len(tasks) + counters["tasks_given_up"] + waiting
        assert found == issued, f"{issued} tasks were issued, {found} are accounted for"

        # Every version names one set of weights. Nothing is stored that nobody knows of.
        versions = [record["version"] for record in self.records if record["event"] in ("acking", "bumped")]
        assert versions == sorted(set(versions))
        assert stats.version == versions[-1]
        stored = [key for key in self.raw.scan_iter(f"{_PREFIX}payload:*", count=1000) if self.raw.ttl(key) == -1]
        assert stats.bytes == sum(self.raw.strlen(key) for key in stored) or self.forgets

        # An ack was refused only if Redis had forgotten it.
        refused = [record for record in self.records if record["event"] == "refused"]
        unexplained = [record for record in refused if not self.near_a_kill(record["time"])]
        assert not unexplained, f"a repeated ack was refused: {unexplained}"

        events = Counter(record["event"] for record in self.records)
        print(
            f"learners: {dict(events)}; Redis was killed {len(self.redis_kills)} times, forgot {len(forgotten)} groups"
        )


def _kill(process):
    process.kill()
    process.wait()


@pytest.fixture
def race(own_server, tmp_path):
    """Runs a race and accounts for it."""

    def run(rounds, *, forgets=False, **changes):
        race = Race(own_server, tmp_path, limits(**(_LIMITS | changes)), forgets=forgets)
        try:
            race.run(rounds)
            race.account()
        finally:
            race.stop()

    return run


@pytest.mark.parametrize("own_server", ["bundled"], indirect=True)
def test_no_group_is_stale_lost_or_trained_on_twice_whatever_is_killed(race):
    race(rounds=2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("own_server", ["bundled", "valkey", "installed"], indirect=True)
def test_nor_is_any_in_a_long_race_on_any_server(race):
    race(rounds=8)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("own_server", ["bundled"], indirect=True)
def test_nor_is_any_if_redis_forgets_what_it_was_told_last(race):
    race(rounds=10, forgets=True, slot_seconds=10)  # or slots expire of which the renewals were forgotten


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("own_server", ["bundled"], indirect=True)
def test_a_group_that_may_be_trained_on_twice_is_trained_on_no_more_often(race):
    race(rounds=4, max_uses=2, order=Order.PRIORITY)
