"""Several processes race for one buffer while some of them are killed: nothing stale, nothing lost, nothing twice.

Four workers run groups; one learner leases a batch ahead, acks, and sometimes jumps two versions. Every so often a
worker is killed with ``kill -9`` and another takes its place, and the learner, with leases outstanding, is replaced by
a new epoch, which begins so late that what the old one held is too old in seconds.

To see this test fail, break a script and run it again, for example:

* ``lease.lua``: drop the staleness check (``if true then`` in place of ``if not retire_if_stale(...) then``): stale
  trajectories reach the learner. So they do without one of the two comparisons in ``ledger.lua``.
* ``ack.lua``: leave out the loop that retires: nothing is consumed, so groups are trained on twice.
* ``ledger.lua``: let ``sweep`` do nothing: the slots of killed workers never return.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from buffer_examples import limits

from buffer import Fenced, WaitTimeout

_BATCHES_BETWEEN_KILLS = 10
_STARVED_SECONDS = 60
_WORKERS = 4
_LIMITS = limits(
    max_staleness=2, max_age_seconds=1.5, groups_per_batch=4, group_size=2, slot_seconds=1, max_attempts=10
)
_HERE = Path(__file__).parent


def start_worker(server, run, seed):
    path = os.pathsep.join([str(_HERE.parents[1]), str(_HERE)])
    command = [sys.executable, str(_HERE / "race_worker.py"), server.url, run, str(seed)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})


class Learner:
    """Holds up to two leases, and writes down what it trained on."""

    def __init__(self, buffer, rng):
        self.buffer, self.rng = buffer, rng
        self.trained = []
        self.begin()

    def begin(self):
        """Take over, as a restarted learner does: what was held is not ours any more."""
        self.epoch = self.buffer.begin_epoch()
        self.version = self.buffer.version()
        self.held = []

    def lease(self):
        version = self.version + len(self.held)  # the one that this batch is going to be trained with
        asked = time.time()  # not after the lease is judged, as a slot is not received before it is given
        lease = self.buffer.lease(self.epoch, version, timeout=0.2 if self.held else _STARVED_SECONDS)
        assert len(lease.groups) == _LIMITS.groups_per_batch
        for group in lease.groups:
            assert [(member.group, member.index) for member in group] == [
                (group[0].group, index) for index in range(_LIMITS.group_size)
            ]
        stale = [m.group for m in lease.trajectories if version - m.oldest_version > _LIMITS.max_staleness]
        assert not stale, f"leased for version {version} although stale: {stale}"
        too_old = [m.group for m in lease.trajectories if asked - m.metadata["received"] > _LIMITS.max_age_seconds]
        assert not too_old, f"leased although too old in seconds: {too_old}"
        self.held.append(lease)

    def ack(self):
        lease = self.held.pop(0)
        self.version += 1
        for _ in range(1 + (self.rng.random() < 0.2)):  # now and then as a retry does
            self.buffer.ack(lease, self.version)
        self.trained += lease.group_ids

    def step(self):
        try:
            self.lease()
        except WaitTimeout:
            assert self.held, "no batch for a minute: the slots of killed workers do not return"
            self.ack()
        if len(self.held) == 2:
            self.ack()
        if self.rng.random() < 0.15:
            while self.held:
                self.ack()
            self.version += 2
            self.buffer.advance(self.epoch, self.version)

    def replace(self):
        """End with a lease outstanding; the next one gets its groups again."""
        if not self.held:
            self.lease()
        lost = self.held
        time.sleep(1.1 * _LIMITS.max_age_seconds)
        self.begin()
        for lease in lost:
            with pytest.raises(Fenced):
                self.buffer.ack(lease, lease.version + 1)


@pytest.mark.parametrize("batches", [24, pytest.param(120, marks=pytest.mark.slow)])
def test_no_group_is_stale_lost_or_trained_on_twice_whatever_is_killed(server, run, buffer, batches):
    rng = random.Random(0)
    buffer.open(_LIMITS)
    workers = [start_worker(server, run, seed) for seed in range(_WORKERS)]
    try:
        learner = Learner(buffer, rng)
        kills = 0
        while len(learner.trained) < batches * _LIMITS.groups_per_batch:
            learner.step()
            if len(learner.trained) > (kills + 1) * _BATCHES_BETWEEN_KILLS * _LIMITS.groups_per_batch:
                kills += 1
                victim = rng.randrange(_WORKERS)
                workers[victim].kill()
                workers[victim].wait()
                workers[victim] = start_worker(server, run, f"replacement-{kills}")
                learner.replace()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    while learner.held:
        learner.ack()
    expired = buffer.stats().counters["expired"]
    buffer.reclaim()
    stats = buffer.stats()
    print(f"\n{stats}\n{stats.counters}")
    assert stats.unaccounted == 0
    assert len(set(learner.trained)) == len(learner.trained) == stats.counters["acked"]
    assert (stats.reserved, stats.leased) == (0, 0)
    assert stats.counters["quarantined"] == stats.counters["lost"] == 0
    # The race was one: everything that can happen to a group did.
    old_versions = stats.counters["stale"] - stats.counters["stale:age"]
    assert min(old_versions, expired, *(stats.counters[name] for name in ("stale:age", "abandoned", "redelivered"))) > 0
