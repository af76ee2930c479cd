"""A server that was killed before it had written everything down is told again what a living learner did.

Case by case; ``test_forgetting`` walks at random.
"""

import queue
import threading
from contextlib import closing

import pytest
from buffer_examples import complete, limits, train, trajectory

from buffer import Buffer, BufferUnavailable, Fenced, Order, State, WaitTimeout


class Memory:
    """All keys of a run as they are now; ``restore`` makes the server forget what came after."""

    def __init__(self, raw, run):
        self._raw, self._pattern = raw, f"{{headrace:{run}}}:*"
        self._dump = {key: raw.dump(key) for key in raw.keys(self._pattern)}

    def restore(self):
        with self._raw.pipeline() as pipeline:
            pipeline.unlink(*self._raw.keys(self._pattern))
            for key, value in self._dump.items():
                pipeline.restore(key, 0, value)
            pipeline.execute()


def between(buffer, script, *, before=lambda: None, after=lambda: None):
    """Around the next run of ``script`` do what another thread and a kill do meanwhile."""
    perform = buffer._connection.perform

    def once(request):
        if getattr(request, "name", None) != script:
            return perform(request)
        buffer._connection.perform = perform
        before()
        reply = perform(request)
        after()
        return reply

    buffer._connection.perform = once


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
    with pytest.raises(WaitTimeout, match="waits for that of shard 0"):
        other.lease(epoch, 0, timeout=0, shard=1, shards=2)
    memory = Memory(raw, run)
    lease = buffer.lease(epoch, 0, timeout=0, shard=0, shards=2)
    half = other.lease(epoch, 0, timeout=0, shard=1, shards=2)
    assert half.id == lease.id
    memory.restore()
    with pytest.raises(Fenced, match="wait until the process that began the epoch tells it again"):
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


def test_an_ack_that_was_forgotten_while_a_lease_was_under_way_is_told_again(buffer, workers, call, raw, run):
    """The lease waits in a server that is killed (redis-py repeats it as it was) while an ack is answered."""
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    for _ in range(4):
        call(complete(workers))
    held = buffer.lease(epoch, 0, timeout=0)
    memory = Memory(raw, run)

    thread = threading.Thread(target=buffer.ack, args=(held, 1))

    def meanwhile():
        thread.start()
        thread.join(0.3)
        memory.restore()

    between(buffer, "lease", before=meanwhile)
    ahead = buffer.lease(epoch, 1, timeout=0)
    thread.join()
    buffer.ack(ahead, 2)
    stats = buffer.stats()
    assert (stats.counters["acked"], stats.leased, stats.version) == (2, 0, 2)


def test_a_lease_that_was_forgotten_while_an_ack_was_under_way_is_told_again(buffer, workers, call, raw, run):
    """The ack waits in a server that is killed while a lease is answered."""
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    for _ in range(4):
        call(complete(workers))
    held = buffer.lease(epoch, 0, timeout=0)
    memory = Memory(raw, run)
    ahead = []

    thread = threading.Thread(target=lambda: ahead.append(buffer.lease(epoch, 1, timeout=0)))

    def meanwhile():
        thread.start()
        thread.join(0.3)
        memory.restore()

    between(buffer, "ack", before=meanwhile)
    buffer.ack(held, 1)
    thread.join()
    third = buffer.lease(epoch, 2, timeout=0)
    assert third.group_ids != ahead[0].group_ids
    buffer.ack(ahead[0], 2)


def test_a_lease_whose_answer_arrives_after_the_server_was_told_again_is_told_as_well(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    for _ in range(4):
        call(complete(workers))
    held = buffer.lease(epoch, 0, timeout=0)
    memory = Memory(raw, run)

    def other_thread():
        buffer.ack(held, 1)
        memory.restore()
        buffer.announce(epoch, 2)

    thread = threading.Thread(target=other_thread)

    def meanwhile():
        thread.start()
        thread.join(0.3)

    between(buffer, "lease", after=meanwhile)
    ahead = buffer.lease(epoch, 1, timeout=0)
    thread.join()
    third = buffer.lease(epoch, 2, timeout=0)
    assert third.group_ids != ahead.group_ids
    buffer.ack(ahead, 2)


@pytest.mark.timeout(20)
@pytest.mark.timeout(20)  # it must not ask for ever
def test_an_epoch_that_was_forgotten_while_an_older_learner_went_on_is_begun_again(
    server, buffer, workers, call, raw, run
):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    for _ in range(4):
        call(complete(workers))
    with closing(Buffer(server.url, run, timeout_seconds=5)) as older:
        old = older.begin_epoch()
        memory = Memory(raw, run)
        epoch = buffer.begin_epoch()
        memory.restore()
        for version in range(3):
            older.announce(old, version)
        buffer.lease(epoch, 0, timeout=0)
        with pytest.raises(Fenced):
            older.lease(old, 1, timeout=0)


def test_two_learners_never_share_an_epoch_of_which_one_was_forgotten(server, buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    for _ in range(4):
        call(complete(workers))
    memory = Memory(raw, run)
    epoch = buffer.begin_epoch()
    memory.restore()
    with closing(Buffer(server.url, run, timeout_seconds=5)) as newer:
        newer.lease(newer.begin_epoch(), 0, timeout=0)
        with pytest.raises(Fenced):
            buffer.lease(epoch, 0, timeout=0)


def test_what_was_made_up_for_in_another_shard_is_told_again(server, buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=2))
    epoch = buffer.begin_epoch()
    for _ in range(3):
        call(complete(workers))
    lease = buffer.lease(epoch, 0, timeout=0, shard=0, shards=2)
    [bad] = [group for group, shard in lease.batch.items() if shard == 1]
    raw.delete(*raw.keys(f"{{headrace:{run}}}:payload:{bad}:*"))
    memory = Memory(raw, run)
    with closing(Buffer(server.url, run, timeout_seconds=5)) as other:
        with pytest.raises(WaitTimeout):
            other.lease(epoch, 0, timeout=0, shard=1, shards=2)
        lease = buffer.lease(epoch, 0, timeout=0, shard=0, shards=2)
        half = other.lease(epoch, 0, timeout=0, shard=1, shards=2)
    assert half.id == lease.id and half.group_ids != [bad]
    memory.restore()
    buffer.ack(lease, 1)
    assert [info.group for info in buffer.groups(State.READY, 9)] == [bad]
    assert buffer.stats().counters["acked"] == 2


def test_a_group_that_was_condemned_and_not_made_up_for_does_not_count_as_trained(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=2, tokens_per_batch=1000))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(2)]
    assert len(buffer.lease(epoch, 0, timeout=0).batch) == 2
    memory = Memory(raw, run)
    bad = slots[0].group
    [name] = raw.keys(f"{{headrace:{run}}}:payload:{bad}:0:*")
    raw.delete(name)
    lease = buffer.lease(epoch, 0, timeout=0)
    assert lease.group_ids == [slots[1].group]
    memory.restore()
    buffer.ack(lease, 1)
    assert buffer.stats().counters["acked"] == 1, "a group that was not trained on counts as acked"


def test_a_group_that_is_taken_up_again_is_as_old_as_it_was(server, payload_servers, call, raw, run):
    with closing(Buffer(server.url, run, timeout_seconds=5, payload_urls=[payload_servers[0].url])) as buffer:
        buffer.open(limits(max_staleness=1, groups_per_batch=1))
        epoch = buffer.begin_epoch()
        slot = buffer.reserve("worker", timeout=0)
        memory = Memory(raw, run)
        buffer.commit(*(trajectory(slot.group, i, 0) for i in range(2)))
        lease = buffer.lease(epoch, 1, timeout=0)
        memory.restore()
        buffer.release(lease)
        buffer.advance(epoch, 2)
        with pytest.raises(WaitTimeout):
            buffer.lease(epoch, 2, timeout=0)
        assert buffer.stats().counters["stale"] == 1


@pytest.mark.parametrize("asks_again", [True, False])
def test_a_release_that_never_arrived_does_not_undo_a_later_ack(buffer, workers, call, raw, run, asks_again):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    for _ in range(3):
        call(complete(workers))
    lease = buffer.lease(epoch, 0, timeout=0)
    perform = buffer._connection.perform

    def unavailable(request):
        raise BufferUnavailable("the server died")

    buffer._connection.perform = unavailable
    with pytest.raises(BufferUnavailable):
        buffer.release(lease)
    buffer._connection.perform = perform
    if asks_again:
        assert buffer.lease(epoch, 0, timeout=0).id == lease.id
    memory = Memory(raw, run)
    buffer.ack(lease, 1)
    memory.restore()
    assert buffer.lease(epoch, 1, timeout=0).group_ids != lease.group_ids, "acked and leased again"
    assert buffer.version() == 1


def test_an_ack_of_another_client_hides_nothing_that_was_forgotten(server, buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    for _ in range(4):
        call(complete(workers))
    first = buffer.lease(epoch, 0, timeout=0)
    buffer.ack(first, 1)
    memory = Memory(raw, run)
    held = buffer.lease(epoch, 1, timeout=0)
    memory.restore()
    with closing(Buffer(server.url, run, timeout_seconds=5)) as another:
        another.ack(first, 1)
    ahead = buffer.lease(epoch, 2, timeout=0)
    assert ahead.group_ids != held.group_ids
    buffer.ack(held, 2)


@pytest.mark.timeout(20)  # it must not wait for ever
def test_an_interrupt_while_the_server_is_told_again_blocks_nobody(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    for _ in range(2):
        call(complete(workers))
    memory = Memory(raw, run)
    lease = buffer.lease(epoch, 0, timeout=0)
    memory.restore()

    def interrupted():
        raise KeyboardInterrupt

    between(buffer, "hold", before=interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffer.ack(lease, 1)
    buffer.release(lease)  # what a learner does on its way out
    assert buffer.stats().leased == 0


def test_two_threads_that_tell_the_server_again_do_not_undo_each_other(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    call(complete(workers))
    memory = Memory(raw, run)
    buffer.release(buffer.lease(epoch, 0, timeout=0))
    lease = buffer.lease(epoch, 1, timeout=0)  # the same group again
    memory.restore()
    between(buffer, "hold", before=lambda: buffer.announce(epoch, 1))
    buffer.announce(epoch, 2)
    assert [info.lease_version for info in buffer.groups(State.LEASED, 9)] == [1]
    buffer.ack(lease, 2)
    assert (buffer.stats().counters["acked"], buffer.announced()) == (1, 2)


def test_late_in_a_long_epoch_a_server_is_told_again_as_well(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    for _ in range(2):
        call(complete(workers))
    for version in range(1100):
        buffer.announce(epoch, version)
    memory = Memory(raw, run)
    held = buffer.lease(epoch, 0, timeout=0)
    memory.restore()
    assert buffer.lease(epoch, 1, timeout=0).group_ids != held.group_ids


def test_corrections_of_a_lease_that_was_forgotten_are_those_it_had(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=2, group_size=1, order=Order.PRIORITY))
    epoch = buffer.begin_epoch()
    for weight in (1, 2, 3, 50, 1):
        slot = buffer.reserve("worker", timeout=0)
        buffer.commit(trajectory(slot.group, 0), weights=[weight])
    memory = Memory(raw, run)
    lease = buffer.lease(epoch, 0, timeout=0)
    memory.restore()
    buffer.announce(epoch, 1)
    again = buffer.lease(epoch, 0, timeout=0)
    assert (again.id, again.mean_correction, list(again.corrections)) == (
        *(lease.id, lease.mean_correction, list(lease.corrections)),
    )
