"""The trained frontier: what a checkpoint has learned from is forgotten, the rest can come again."""

import pytest
from buffer_examples import complete, limits, train

from buffer import BufferError, Fenced, State


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
