"""One process of the learner's gang for the race test: ``race_learner.py FOLDER SHARD CHANNEL_FD SEED``.

The gang has two processes, each of which pulls its shard of every lease. That of shard 0 leads: it begins the epoch and
rolls back to the last checkpoint, as a learner that was restarted does, tells the other one what to lease, acks, makes
checkpoints and bumps the version. It holds up to two leases. What it trained on, it writes down:

* ``begin``: epoch, and the version of the checkpoint from which it goes on (-1: from the beginning),
* ``acking``: before the ack, tasks by group, and the version that the weights get; ``acked``: after it,
* ``saved``: after a checkpoint is durable, and before the buffer is told; ``leased``, ``released`` and ``bumped``.

Both look at every trajectory of every lease: none may be too old, in versions or in seconds.
"""

import json
import os
import random
import socket
import sys
import time

from race_rules import PATIENCE_SECONDS, Records, Rules, patiently, recorded

from buffer import Buffer, BufferUnavailable, Fenced, Lease, WaitTimeout

SHARDS = 2
_CLOCK_SECONDS = 0.002
"""The server's clock counts whole milliseconds."""


def check(lease, rules, asked):
    """Judge a shard without asking the buffer; ``asked`` is a moment before the buffer judged it."""
    for group in lease.groups:
        members = [member.index for member in group]
        assert {member.group for member in group} == {group[0].group}
        assert members == sorted(set(members)) and rules.least_members <= len(members) <= rules.group_size, members
    stale = [m.group for m in lease.trajectories if lease.version - m.oldest_version > rules.max_staleness]
    assert not stale, f"leased for version {lease.version} although too many versions old: {stale}"
    most = rules.max_age_seconds + _CLOCK_SECONDS
    # A slot is not received before it is given, so this is at most what the buffer sees as the group's age.
    too_old = [m.group for m in lease.trajectories if asked - m.metadata["received"] > most]
    assert not too_old, f"leased for version {lease.version} although too many seconds old: {too_old}"


def describe(lease):
    """What the processes of a gang compare."""
    return {"id": lease.id, "groups": {group[0].group: group[0].task for group in lease.groups}}


class Follower:
    """Shard 1: leases what it is told."""

    def __init__(self, buffer, rules, channel):
        self._buffer, self._rules, self._channel = buffer, rules, channel

    def run(self):
        for line in self._channel:
            order = json.loads(line)
            try:
                lease = patiently(self._buffer.lease, order["epoch"], order["version"], 1, shard=1, shards=SHARDS)
            except (WaitTimeout, Fenced):  # Redis was killed since the leader got its shard, and forgot the lease
                answer = {"id": None}
            else:
                check(lease, self._rules, order["asked"])
                answer = describe(lease)
            self._channel.write(json.dumps(answer) + "\n")
            self._channel.flush()


class Leader:
    """Shard 0: leads the gang."""

    def __init__(self, buffer, rules, channel, rng):
        self._buffer, self._rules, self._channel, self._rng = buffer, rules, channel, rng
        self._records = Records(rules.records)
        self._checkpoint = rules.folder / "checkpoint"
        # The held leases, oldest first, each with the tasks of its groups. The first is trained with self._version.
        self._held = []
        self._saved = None  # version of a checkpoint that the buffer does not know yet

    def run(self):
        self._begin()
        while not (self._rules.folder / "stop").exists():
            self._step()
        while self._held:
            self._ack()

    def _begin(self):
        """Go on from the last durable checkpoint; the version goes on from the last that was handed out."""
        saved = int(self._checkpoint.read_text()) if self._checkpoint.exists() else -1
        earlier = [record for record in recorded(self._rules.records) if record["event"] == "leased"]
        self._epoch = patiently(self._buffer.begin_epoch)
        self._records.add("begin", epoch=self._epoch, checkpoint=saved)
        patiently(self._buffer.rollback, self._epoch, saved)
        if earlier:
            self._see_refused(earlier[-1])
        self._version = max(patiently(self._buffer.version), patiently(self._buffer.announced))
        self._bump(1)

    def _see_refused(self, record):
        """See to it that the gang that was killed could not ack any more."""
        lease = Lease(record["epoch"], record["version"], record["id"], 0, SHARDS, {}, [], [])
        try:
            patiently(self._buffer.ack, lease, lease.version + 1)
        except Fenced:
            return
        raise AssertionError(f"epoch {lease.epoch} could ack in epoch {self._epoch}")

    def _bump(self, by):
        self._version += by
        patiently(self._buffer.announce, self._epoch, self._version)
        patiently(self._buffer.advance, self._epoch, self._version)
        self._records.add("bumped", epoch=self._epoch, version=self._version)

    def _step(self):
        if len(self._held) < 2 and not (self._held and self._rng.random() < 0.2):
            self._lease()
        else:
            self._ack()
            time.sleep(0.02)
        luck = self._rng.random()
        if luck < 0.03:
            self._release()
        elif luck < 0.06:
            while self._held:
                self._ack()
            self._bump(1 + self._rules.max_staleness)  # whatever was sampled before is too old now

    def _lease(self):
        """Have the whole gang lease what is trained after all that is held; without a whole batch, ack."""
        version = self._version + len(self._held)
        lease, asked = self._first_shard(version)
        if lease is None:
            if self._held:  # which keeps slots from the workers
                self._ack()
            return
        other = self._ask_follower(version, asked)
        deadline = time.monotonic() + PATIENCE_SECONDS
        # If Redis was killed between the two, it may have forgotten the lease. It is told when that is asked for again.
        while other["id"] != lease.id:
            assert time.monotonic() < deadline, f"the gang's processes do not get the same lease of version {version}"
            lease = patiently(self._own_shard, version, PATIENCE_SECONDS)
            other = self._ask_follower(version, asked)
        check(lease, self._rules, asked)
        own, others = describe(lease)["groups"], other["groups"]
        assert own.keys().isdisjoint(others), f"in both shards: {own.keys() & others.keys()}"
        assert own.keys() | others.keys() == lease.batch.keys() and len(lease.batch) == self._rules.groups_per_batch
        self._held.append((lease, own | others))
        self._records.add("leased", epoch=self._epoch, version=version, id=lease.id)

    def _first_shard(self, version):
        """Lease, or, if something is held or the race is over, only look once; return a moment before it was judged."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        asked = time.time()
        while True:
            try:
                return self._own_shard(version, timeout=0.05), asked
            except BufferUnavailable:  # but the batch may have been leased, and judged, all the same
                time.sleep(0.1)
            except WaitTimeout as error:
                if self._held or (self._rules.folder / "stop").exists():
                    return None, asked
                assert time.monotonic() < deadline, f"no batch for {PATIENCE_SECONDS} s: {error}"
                asked = time.time()

    def _own_shard(self, version, timeout):
        return self._buffer.lease(self._epoch, version, timeout, shard=0, shards=SHARDS)

    def _ask_follower(self, version, asked):
        self._channel.write(json.dumps({"epoch": self._epoch, "version": version, "asked": asked}) + "\n")
        self._channel.flush()
        answer = self._channel.readline()
        assert answer, "the other process of the gang has ended"
        return json.loads(answer)

    def _ack(self):
        lease, tasks = self._held.pop(0)
        self._version += 1
        patiently(self._buffer.announce, self._epoch, self._version)
        facts = {"epoch": self._epoch, "version": self._version, "id": lease.id, "tasks": tasks}
        self._records.add("acking", **facts)
        patiently(self._buffer.ack, lease, self._version)
        self._records.add("acked", **facts)
        if self._rng.random() < 0.2:
            patiently(self._buffer.ack, lease, self._version)
        if self._rng.random() < 0.2:
            self._ack_by_another(lease)
        if self._saved is not None and self._rng.random() < 0.3:
            self._confirm_saved()
        if self._saved is None and self._rng.random() < 0.15:
            self._save()

    def _ack_by_another(self, lease):
        """Repeat an ack through a client that has never heard of the lease."""
        another = Buffer(self._rules.url, self._rules.run, timeout_seconds=5)
        try:
            patiently(another.ack, lease, self._version)
        except Fenced as error:  # Redis was killed since, and forgot the ack; the test finds out whether that may be
            self._records.add("refused", id=lease.id, error=str(error))
            patiently(self._buffer.ack, lease, self._version)
        finally:
            another.close()

    def _save(self):
        """Make a checkpoint; the buffer is told later, as when it is written beside the training."""
        draft = self._checkpoint.with_suffix(".draft")
        with draft.open("w") as file:
            file.write(str(self._version))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._checkpoint)
        self._records.add("saved", epoch=self._epoch, version=self._version)
        self._saved = self._version

    def _confirm_saved(self):
        patiently(self._buffer.checkpointed, self._epoch, self._saved)
        self._saved = None

    def _release(self):
        if self._held:
            lease, _ = self._held.pop()
            patiently(self._buffer.release, lease)
            self._records.add("released", epoch=self._epoch, version=lease.version, id=lease.id)


def main(folder, shard, channel_fd, seed):
    rules = Rules(folder)
    buffer = Buffer(rules.url, rules.run, timeout_seconds=5)
    with socket.socket(fileno=int(channel_fd)) as end, end.makefile("rw") as channel:
        if shard == "0":
            Leader(buffer, rules, channel, random.Random(seed)).run()
        else:
            Follower(buffer, rules, channel).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
