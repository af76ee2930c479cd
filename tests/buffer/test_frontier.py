"""The trained frontier: what a checkpoint has learned from is forgotten, the rest can come again.

And a server that forgets: one that was killed before it had written everything down is told again what a living learner
holds and has acked.
"""

import queue
import threading

import pytest
from buffer_examples import complete, limits, trajectory

from buffer import Buffer, BufferError, Fenced, State, WaitTimeout


def train(buffer, epoch, versions):
    """Lease and ack a batch at each of ``versions``; return the groups of each."""
    batches = []
    for version in versions:
        lease = buffer.lease(epoch, version, timeout=0)
        batches.append(lease.group_ids)
        buffer.ack(lease, version + 1)
    return batches


def keys_of(raw, run, kind):
    return raw.keys(f"{{headrace:{run}}}:{kind}:*")


def test_payloads_are_kept_until_a_checkpoint_is_durable(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    for _ in range(3):
        call(complete(workers))
    train(buffer, epoch, range(3))
    assert (len(keys_of(raw, run, "payload")), buffer.stats().unsaved) == (6, 3)
    buffer.checkpointed(epoch, 2)
    assert (len(keys_of(raw, run, "payload")), buffer.stats().unsaved) == (2, 1)
    for _ in range(2):
        buffer.checkpointed(epoch, 3)
    stats = buffer.stats()
    assert (keys_of(raw, run, "payload"), keys_of(raw, run, "group"), stats.unsaved, stats.bytes) == ([], [], 0, 0)
    assert (stats.counters["acked"], stats.unaccounted) == (3, 0)


def test_a_rollback_puts_back_what_was_trained_after_the_checkpoint_in_its_old_place(buffer, workers, call):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(4)]
    train(buffer, epoch, range(3))
    epoch = buffer.begin_epoch()
    assert buffer.rollback(epoch, 1) == 2
    stats = buffer.stats()
    assert (stats.version, stats.ready, stats.counters["acked"]) == (3, 3, 1)
    assert (stats.counters["rolled_back"], stats.unaccounted) == (2, 0)
    assert train(buffer, epoch, range(4, 7)) == [[slot.group] for slot in slots[1:]]


def test_a_rollback_to_the_beginning_undoes_everything(buffer, workers, call):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(2)]
    train(buffer, epoch, range(2))
    epoch = buffer.begin_epoch()
    assert buffer.rollback(epoch, -1) == 2
    assert buffer.rollback(epoch, -1) == 0
    assert train(buffer, epoch, range(2, 4)) == [[slot.group] for slot in slots]


def test_what_no_lease_could_take_any_more_is_played_again(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=1, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    slots = []
    for version in range(5):
        slots.append(call(complete(workers, version)))
        train(buffer, epoch, [version])
    # At version 5, what was sampled with versions 0 to 3 is too old for every lease: only tasks are kept.
    assert len(keys_of(raw, run, "payload")) == 2
    epoch = buffer.begin_epoch()
    assert buffer.rollback(epoch, 1) == 4
    stats = buffer.stats()
    assert (stats.ready, stats.counters["acked"], stats.counters["stale"], stats.unaccounted) == (1, 1, 3, 0)
    assert [call(workers.reserve("worker", timeout=0)).task] == [slots[1].task]
    assert stats.limits.max_groups == 2


def test_the_task_cursor_follows_the_trained_frontier(buffer, workers, call):
    """Every task is trained exactly once in the life of the surviving weights, whatever came after the checkpoint."""
    buffer.open(limits(max_staleness=0, groups_per_batch=2, group_size=1))
    tasks, version, checkpoint = [], 0, (0, -1)
    epoch = buffer.begin_epoch()
    for step in range(1, 13):
        for _ in range(2):
            call(complete(workers, version))
        lease = buffer.lease(epoch, version, timeout=0)
        buffer.ack(lease, version + 1)
        version += 1
        tasks += [t.task for t in lease.trajectories]
        if step in (3, 9):
            checkpoint = (len(tasks), version)
            buffer.checkpointed(epoch, version)
        if step in (2, 5, 11):  # the learner dies and goes on from the checkpoint
            epoch = buffer.begin_epoch()
            buffer.rollback(epoch, checkpoint[1])
            version += 1
            buffer.advance(epoch, version)
            del tasks[checkpoint[0] :]
    assert sorted(tasks) == list(range(len(tasks)))


def test_a_group_used_twice_is_forgotten_when_both_uses_are_saved(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=1, group_size=1, max_uses=2))
    epoch = buffer.begin_epoch()
    call(complete(workers))
    train(buffer, epoch, range(2))
    buffer.checkpointed(epoch, 1)
    assert len(keys_of(raw, run, "group")) == 1
    epoch = buffer.begin_epoch()
    assert buffer.rollback(epoch, 1) == 1
    assert (buffer.stats().ready, buffer.stats().counters["acked"]) == (1, 0)
    train(buffer, epoch, [3])
    buffer.checkpointed(epoch, 4)
    stats = buffer.stats()
    assert (keys_of(raw, run, "group"), stats.counters["acked"], stats.counters["uses"]) == ([], 1, 3)


def test_kept_payloads_give_way_to_new_work(buffer, workers, call, raw, run):
    """They must not be what a full buffer waits for: the checkpoint that would free them may be many steps away."""
    buffer.open(limits(max_staleness=9, groups_per_batch=1, group_size=1, max_bytes=60_000))
    epoch = buffer.begin_epoch()
    for version in range(8):
        call(complete(workers, version, tokens=2000))  # 26 kB
        train(buffer, epoch, [version])
    assert buffer.stats().bytes <= 60_000
    buffer.rollback(buffer.begin_epoch(), -1)
    stats = buffer.stats()
    assert stats.ready + stats.counters["stale"] == 8 and stats.unaccounted == 0


def test_a_rollback_is_for_the_current_epoch_and_before_any_lease(buffer, workers, call):
    buffer.open(limits(groups_per_batch=1))
    old, new = buffer.begin_epoch(), buffer.begin_epoch()
    for refused in (lambda: buffer.rollback(old, 0), lambda: buffer.checkpointed(old, 0)):
        with pytest.raises(Fenced):
            refused()
    call(complete(workers))
    buffer.lease(new, 0, timeout=0)
    with pytest.raises(BufferError, match="1 groups are leased; expected none"):
        buffer.rollback(new, 0)


def test_what_is_inside_can_be_looked_at(buffer, workers, call):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(3)]
    open_slot = call(workers.reserve("worker-7", timeout=0))
    train(buffer, epoch, [0])
    buffer.lease(epoch, 1, timeout=0)
    by_state = {state: buffer.groups(state, 10) for state in State}
    assert {state: [info.group for info in infos] for state, infos in by_state.items()} == {
        State.KEPT: [slots[0].group],
        State.LEASED: [slots[1].group],
        State.READY: [slots[2].group],
        State.RESERVED: [open_slot.group],
    }
    [leased], [running] = by_state[State.LEASED], by_state[State.RESERVED]
    assert (leased.lease_version, leased.tokens, leased.oldest_version) == (1, 12, 0)
    assert (running.worker, running.members, running.oldest_version) == ("worker-7", (), None)
    assert 0 < running.expires_seconds <= 60
    assert [buffer.peek(leased).index, buffer.peek(leased, 1).index] == [0, 1]
    with pytest.raises(ValueError, match="has the members none"):
        buffer.peek(running)


def test_a_drained_buffer_holds_what_the_learner_holds_and_its_tasks_come_again(buffer, workers, call):
    buffer.open(limits(max_staleness=9, groups_per_batch=1, max_attempts=1))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(3)]
    open_slot = call(workers.reserve("worker", timeout=0))
    lease = buffer.lease(epoch, 0, timeout=0)
    assert buffer.drain() == 3
    stats = buffer.stats()
    assert (stats.reserved, stats.ready, stats.leased, stats.counters["abandoned:drained"]) == (0, 0, 1, 3)
    again = {call(workers.reserve("worker", timeout=0)).task for _ in range(3)}
    assert again == {slots[1].task, slots[2].task, open_slot.task}
    buffer.ack(lease, 1)
    assert buffer.stats().unaccounted == 0


# --- a server that forgets -------------------------------------------------------------------------------------


class Memory:
    """All keys of a run as they are now; ``restore`` makes the server forget what came after."""

    def __init__(self, raw, run):
        self._raw, self._pattern = raw, f"{{headrace:{run}}}:*"
        self._dump = {key: raw.dump(key) for key in raw.keys(self._pattern)}

    def restore(self):
        if after := self._raw.keys(self._pattern):
            self._raw.delete(*after)
        for key, value in self._dump.items():
            self._raw.restore(key, 0, value)


def test_acks_that_the_server_forgot_are_told_again_before_anything_is_trained_twice(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    for _ in range(4):
        call(complete(workers))
    trained = train(buffer, epoch, [0])
    memory = Memory(raw, run)
    trained += train(buffer, epoch, [1, 2])
    memory.restore()
    trained += train(buffer, epoch, [3])
    assert len({group for batch in trained for group in batch}) == 4
    stats = buffer.stats()
    assert (stats.version, stats.counters["acked"], stats.outstanding, stats.unaccounted) == (4, 4, 0, 0)


def test_a_held_lease_that_the_server_forgot_is_leased_to_nobody_else(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=2))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(4)]
    memory = Memory(raw, run)
    held = buffer.lease(epoch, 0, timeout=0)
    memory.restore()
    ahead = buffer.lease(epoch, 1, timeout=0)
    assert held.group_ids + ahead.group_ids == [slot.group for slot in slots]
    buffer.ack(held, 1)
    buffer.ack(ahead, 2)
    assert (buffer.stats().counters["acked"], buffer.stats().version) == (4, 2)


def test_the_ack_of_a_lease_that_the_server_forgot_consumes_it(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=2))
    epoch = buffer.begin_epoch()
    slot = call(workers.reserve("worker", timeout=0))
    call(workers.commit(trajectory(slot.group, 0)))
    memory = Memory(raw, run)  # one group whose second member will be forgotten, one that will be forgotten altogether
    call(workers.commit(trajectory(slot.group, 1)))
    call(complete(workers))
    lease = buffer.lease(epoch, 0, timeout=0)
    memory.restore()
    buffer.ack(lease, 1)
    buffer.ack(lease, 1)
    stats = buffer.stats()
    assert (stats.version, stats.counters["acked"], stats.outstanding, stats.unaccounted) == (1, 1, 0, 0)


def test_a_group_that_was_made_up_for_stays_out_of_a_lease_that_the_server_forgot(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(2)]
    assert buffer.lease(epoch, 0, timeout=0).group_ids == [slots[0].group]
    memory = Memory(raw, run)
    [name] = raw.keys(f"{{headrace:{run}}}:payload:{slots[0].group}:0:*")
    raw.delete(name)
    lease = buffer.lease(epoch, 0, timeout=0)
    assert lease.group_ids == [slots[1].group]
    memory.restore()
    buffer.ack(lease, 1)
    assert [info.group for info in buffer.groups(State.READY, 10)] == [slots[0].group]
    stats = buffer.stats()
    assert (stats.counters["acked"], stats.leased, stats.unaccounted) == (1, 0, 0)


def test_the_processes_of_a_gang_wait_for_the_lease_that_the_first_one_makes(server, buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=2))
    epoch = buffer.begin_epoch()
    for _ in range(2):
        call(complete(workers))
    other = Buffer(server.url, run, timeout_seconds=5)
    with pytest.raises(WaitTimeout, match="waits for that with shard 0"):
        other.lease(epoch, 0, timeout=0, shard=1, shards=2)
    memory = Memory(raw, run)
    lease = buffer.lease(epoch, 0, timeout=0, shard=0, shards=2)
    half = other.lease(epoch, 0, timeout=0, shard=1, shards=2)
    assert half.id == lease.id
    memory.restore()
    with pytest.raises(Fenced, match="the process that began the epoch has not told it again"):
        other.lease(epoch, 0, timeout=0, shard=1, shards=2)
    waiting = queue.Queue()
    thread = threading.Thread(target=lambda: waiting.put(other.lease(epoch, 0, timeout=60, shard=1, shards=2)))
    thread.start()
    assert buffer.lease(epoch, 0, timeout=0, shard=0, shards=2).batch == lease.batch
    thread.join()
    assert waiting.get().group_ids == half.group_ids
    other.close()


def test_an_announcement_that_the_server_forgot_is_made_again(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    for _ in range(2):
        call(complete(workers))
    memory = Memory(raw, run)
    train(buffer, epoch, [0])
    buffer.announce(epoch, 7)
    memory.restore()
    train(buffer, epoch, [1])
    assert (buffer.announced(), buffer.version()) == (7, 2)


def test_a_released_lease_is_not_taken_for_a_forgotten_one(buffer, workers, call):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    call(complete(workers))
    lease = buffer.lease(epoch, 0, timeout=0)
    buffer.release(lease)
    with pytest.raises(Fenced, match="the lease is over"):
        buffer.ack(lease, 1)
    assert buffer.lease(epoch, 0, timeout=0).group_ids == lease.group_ids
    with pytest.raises(WaitTimeout):
        buffer.lease(epoch, 1, timeout=0)


def test_an_ack_that_is_repeated_after_a_kill_brings_back_the_one_before_it(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    for _ in range(3):
        call(complete(workers))
    leases = [buffer.lease(epoch, version, timeout=0) for version in range(2)]
    memory = Memory(raw, run)
    buffer.ack(leases[0], 1)
    buffer.ack(leases[1], 2)  # its reply is lost in the kill, so it is repeated
    memory.restore()
    buffer.ack(leases[1], 2)
    stats = buffer.stats()
    assert (stats.counters["acked"], stats.leased, stats.version, stats.unaccounted) == (2, 0, 2, 0)


def test_an_epoch_that_the_server_forgot_goes_on(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    for _ in range(2):
        call(complete(workers))
    memory = Memory(raw, run)
    epoch = buffer.begin_epoch()
    lease = buffer.lease(epoch, 0, timeout=0)
    memory.restore()
    buffer.ack(lease, 1)
    train(buffer, epoch, [1])
    stats = buffer.stats()
    assert (stats.epoch, stats.counters["acked"], stats.version, stats.unaccounted) == (epoch, 2, 2, 0)


def test_an_epoch_that_the_server_forgot_does_not_take_over_from_a_newer_one(server, buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    call(complete(workers))
    memory = Memory(raw, run)
    epoch = buffer.begin_epoch()
    memory.restore()
    newer = Buffer(server.url, run, timeout_seconds=5)
    assert newer.begin_epoch() == newer.begin_epoch() - 1 == epoch
    with pytest.raises(Fenced, match="a newer learner has taken over"):
        buffer.lease(epoch, 0, timeout=0)
    newer.close()


def test_a_rollback_that_the_server_forgot_is_made_again(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(4)]
    train(buffer, epoch, range(3))
    epoch = buffer.begin_epoch()
    memory = Memory(raw, run)
    buffer.rollback(epoch, 1)
    retrained = train(buffer, epoch, [4])
    memory.restore()
    retrained += train(buffer, epoch, [5, 6])
    buffer.checkpointed(epoch, 7)
    assert retrained == [[slot.group] for slot in slots[1:]]
    stats = buffer.stats()
    assert (stats.counters["acked"], stats.counters["rolled_back"], stats.unaccounted) == (4, 2, 0)


def test_leasing_beside_acks_is_no_sign_of_a_server_that_forgets(buffer, workers, call, caplog):
    """The learner leases in one thread and acks in another."""
    buffer.open(limits(max_staleness=99, groups_per_batch=1, group_size=1, max_uses=3))
    epoch = buffer.begin_epoch()
    for _ in range(60):
        call(complete(workers))
    held = queue.Queue()

    def ack():
        while (lease := held.get()) is not None:
            buffer.ack(lease, lease.version + 1)

    acking = threading.Thread(target=ack)
    acking.start()
    for version in range(90):
        held.put(buffer.lease(epoch, version, timeout=5))
    held.put(None)
    acking.join()
    assert "lost its last writes" not in caplog.text
    stats = buffer.stats()
    assert (stats.counters["uses"], stats.counters["redelivered"], stats.leased) == (90, 0, 0)
