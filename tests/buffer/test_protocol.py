"""What each transition does, one behaviour at a time."""

import asyncio
import math
import threading
import time
from dataclasses import fields

import pytest
from buffer_examples import complete, limits, trajectory

from buffer import BufferError, Commit, Fenced, FormatError, Limits, NotOpen, Order, WaitTimeout


def payloads(raw, run, slot=None, index="*"):
    return raw.keys(f"{{headrace:{run}}}:payload:{slot.group if slot else '*'}:{index}:*")


def let_pass(raw, run, slot, seconds):
    """Move the reservation of ``slot`` into the past."""
    raw.hincrby(f"{{headrace:{run}}}:group:{slot.group}", "born", -1000 * seconds)
    raw.zadd(f"{{headrace:{run}}}:ready_births", {slot.group: -1000 * seconds}, xx=True, incr=True)


def set_clock_back(raw, run, slot, seconds):
    """As seen from the server's clock, everything that it ever noted down moves into the future."""
    raw.hincrby(f"{{headrace:{run}}}:control", "clock", 1000 * seconds)
    raw.hincrby(f"{{headrace:{run}}}:group:{slot.group}", "born", 1000 * seconds)
    if raw.zscore(f"{{headrace:{run}}}:reserved", slot.group):
        raw.zincrby(f"{{headrace:{run}}}:reserved", 1000 * seconds, slot.group)


# --- admission -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_staleness", "groups_per_batch"), [(0, 1), (0, 3), (2, 2)])
def test_admission_is_bounded_by_what_can_still_be_fresh(buffer, workers, call, max_staleness, groups_per_batch):
    buffer.open(limits(max_staleness=max_staleness, groups_per_batch=groups_per_batch))
    for _ in range((max_staleness + 1) * groups_per_batch):
        call(workers.reserve("worker", timeout=0))
    with pytest.raises(WaitTimeout, match=r"no slot for worker late .* waits for the learner"):
        call(workers.reserve("late", timeout=0))


def test_ready_and_leased_groups_count_against_admission(buffer, workers, call):
    buffer.open(limits(max_staleness=0, groups_per_batch=2))
    epoch = buffer.begin_epoch()
    for _ in range(2):
        call(complete(workers))
    with pytest.raises(WaitTimeout, match="2 ready"):
        call(workers.reserve("worker", timeout=0))
    lease = buffer.lease(epoch, 0, timeout=0)
    with pytest.raises(WaitTimeout, match="2 leased"):
        call(workers.reserve("worker", timeout=0))
    buffer.ack(lease, 1)
    assert call(workers.reserve("worker", timeout=0)).version == 1


def test_admission_is_bounded_by_bytes_once_their_number_is_known(buffer, workers, call):
    buffer.open(limits(max_staleness=9, max_bytes=100_000))
    for _ in range(3):  # of about 26 kB each
        call(complete(workers, tokens=1000))
    with pytest.raises(WaitTimeout, match=r"3 of at most 20 groups .* of at most 100000 bytes"):
        call(workers.reserve("worker", timeout=0))
    buffer.open(limits(max_staleness=9, max_bytes=1 << 30))
    call(workers.reserve("worker", timeout=0))


def test_tasks_are_issued_in_order_and_slots_say_what_they_are(buffer, workers, call):
    buffer.open(limits(group_size=5, slot_seconds=7))
    slots = [call(workers.reserve("worker", timeout=0)) for _ in range(4)]
    assert [slot.task for slot in slots] == [0, 1, 2, 3]
    assert {(slot.group_size, slot.version, slot.seconds) for slot in slots} == {(5, 0, 7.0)}


def test_a_waiting_worker_is_woken_by_the_ack(buffer, workers, call):
    buffer.open(limits(max_staleness=0, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    call(complete(workers))
    lease = buffer.lease(epoch, 0, timeout=0)

    async def wait_for_slot():
        waiting = [asyncio.create_task(workers.reserve("worker", timeout=30)) for _ in range(3)]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(buffer.ack, lease, 1)
        done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        return [task.result() for task in done]

    assert [slot.version for slot in call(wait_for_slot())] == [1]
    assert buffer.stats().outstanding == 1


def test_a_cancelled_reservation_leaves_no_slot_behind(buffer, workers, call):
    buffer.open(limits(max_staleness=50))

    async def cancel_at(moment):
        task = asyncio.create_task(workers.reserve("worker", timeout=5))
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        return (await asyncio.gather(task, return_exceptions=True))[0]

    granted = 0
    for moment in range(30):
        granted += not isinstance(call(cancel_at(moment)), BaseException)
    stats = buffer.stats()
    assert (stats.reserved, stats.unaccounted) == (granted, 0)


# --- commit ----------------------------------------------------------------------------------------------------


def test_a_group_is_ready_when_all_its_members_are_in(buffer, workers, call):
    buffer.open(limits(groups_per_batch=1, group_size=3))
    epoch = buffer.begin_epoch()
    slot = call(workers.reserve("worker", timeout=0))
    for index in (2, 0):
        assert call(workers.commit(trajectory(slot.group, index))) is Commit.ACCEPTED
        with pytest.raises(WaitTimeout):
            buffer.lease(epoch, 0, timeout=0)
    call(workers.commit(trajectory(slot.group, 1)))
    assert [member.index for member in buffer.lease(epoch, 0, timeout=0).trajectories] == [0, 1, 2]


def test_a_repeated_commit_is_a_duplicate_before_and_after_the_ack(buffer, workers, call, raw, run):
    buffer.open(limits(groups_per_batch=1))
    epoch = buffer.begin_epoch()
    slot = call(complete(workers))
    again = trajectory(slot.group, 0)
    assert call(workers.commit(again)) is Commit.DUPLICATE
    lease = buffer.lease(epoch, 0, timeout=0)
    assert call(workers.commit(again)) is Commit.DUPLICATE
    buffer.ack(lease, 1)
    assert call(workers.commit(again)) is Commit.DUPLICATE
    assert len(payloads(raw, run)) == 2  # those of the commits that were accepted, until a checkpoint
    buffer.checkpointed(epoch, 1)
    assert call(workers.commit(again)) is Commit.DUPLICATE
    assert payloads(raw, run) == []


def test_a_commit_without_a_slot_is_expired_and_leaves_nothing(buffer, workers, call, raw, run):
    buffer.open(limits())
    assert call(workers.commit(trajectory("nobody", 0))) is Commit.EXPIRED
    assert payloads(raw, run) == []


def test_a_stale_commit_retires_its_group_and_the_task_is_issued_again(buffer, workers, call):
    buffer.open(limits(max_staleness=1))
    epoch = buffer.begin_epoch()
    slot = call(workers.reserve("worker", timeout=0))
    buffer.advance(epoch, 2)
    assert call(workers.commit(trajectory(slot.group, 0, version=0))) is Commit.STALE
    assert call(workers.commit(trajectory(slot.group, 1, version=2))) is Commit.STALE
    assert call(workers.reserve("worker", timeout=0)).task == slot.task
    assert buffer.stats().counters["stale"] == 1


def test_a_commit_that_cannot_be_trained_on_is_refused(buffer, workers, call):
    buffer.open(limits(group_size=2))
    slot = call(workers.reserve("worker", timeout=0))
    with pytest.raises(ValueError, match="at least one sampled token"):
        call(workers.commit(trajectory(slot.group, 0, tokens=2)))
    with pytest.raises(ValueError, match="index is 2; expected one below the group size"):
        call(workers.commit(trajectory(slot.group, 2)))


# --- the slot's life -------------------------------------------------------------------------------------------


def test_an_expired_slot_is_swept_and_its_task_issued_again(buffer, workers, call):
    buffer.open(limits(slot_seconds=0.001, max_staleness=5))
    slot = call(workers.reserve("worker", timeout=0))
    deadline = time.monotonic() + 10
    while buffer.stats().reserved and time.monotonic() < deadline:
        pass
    assert buffer.stats().counters["expired"] == 1
    assert call(workers.commit(trajectory(slot.group, 0))) is Commit.EXPIRED
    assert not call(workers.renew(slot.group))
    assert call(workers.reserve("worker", timeout=0)).task == slot.task


def test_renewing_extends_the_deadline(buffer, workers, call):
    buffer.open(limits(slot_seconds=1000))
    slot = call(workers.reserve("worker-7", timeout=0))
    buffer.open(limits(slot_seconds=5000))
    assert buffer.stats().next_expiry_seconds < 1001
    assert call(workers.renew(slot.group))
    assert buffer.stats().next_expiry_seconds > 4000
    assert buffer.stats().next_expiry_worker == "worker-7"


def test_a_slot_that_can_no_longer_be_fresh_is_told_at_its_renewal(buffer, workers, call):
    buffer.open(limits(max_staleness=1))
    epoch = buffer.begin_epoch()
    slots = [call(workers.reserve("worker", timeout=0)) for _ in range(3)]
    call(workers.commit(trajectory(slots[1].group, 0, version=0)))
    buffer.advance(epoch, 1)
    assert all(call(workers.renew(slot.group, oldest_version=0)) for slot in slots)
    buffer.advance(epoch, 2)
    assert not call(workers.renew(slots[0].group, oldest_version=0))
    assert not call(workers.renew(slots[1].group, oldest_version=2))  # its other member is too old
    assert call(workers.renew(slots[2].group, oldest_version=1))
    assert (buffer.stats().counters["stale"], buffer.stats().reserved) == (2, 1)


def test_a_slot_whose_episodes_have_not_sampled_yet_can_still_be_fresh(buffer, workers, call):
    buffer.open(limits(max_staleness=0))
    epoch = buffer.begin_epoch()
    slot = call(workers.reserve("worker", timeout=0))
    buffer.advance(epoch, 5)
    assert call(workers.renew(slot.group))


def test_a_slot_too_old_to_be_fresh_is_told_at_its_renewal_and_at_its_commit(buffer, workers, call, raw, run):
    buffer.open(limits(max_age_seconds=100))
    slots = [call(workers.reserve("worker", timeout=0)) for _ in range(3)]
    assert all(call(workers.renew(slot.group)) for slot in slots)
    for slot in slots[:2]:
        let_pass(raw, run, slot, 101)
    assert not call(workers.renew(slots[0].group))
    assert call(workers.commit(trajectory(slots[1].group, 0))) is Commit.STALE
    assert call(workers.renew(slots[2].group))
    assert (buffer.stats().counters["stale:age"], buffer.stats().reserved) == (2, 1)


def test_a_clock_that_is_set_back_keeps_no_slot_open(buffer, workers, call, raw, run):
    buffer.open(limits(slot_seconds=1000))
    slot = call(workers.reserve("worker", timeout=0))
    set_clock_back(raw, run, slot, 3600)
    assert 0 < buffer.stats().next_expiry_seconds <= 1000
    buffer.open(limits(slot_seconds=0.001))
    assert call(workers.renew(slot.group))
    deadline = time.monotonic() + 10
    while buffer.stats().reserved and time.monotonic() < deadline:
        pass  # the run's clock goes on; it does not wait for the server's to catch up
    assert buffer.stats().counters["expired"] == 1


def test_a_clock_that_is_set_back_makes_no_group_younger(buffer, workers, call, raw, run):
    buffer.open(limits(max_age_seconds=100, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    slot = call(complete(workers))
    let_pass(raw, run, slot, 101)
    set_clock_back(raw, run, slot, 3600)
    with pytest.raises(WaitTimeout):
        buffer.lease(epoch, 0, timeout=0)
    assert buffer.stats().counters["stale:age"] == 1


def test_an_abandoned_task_is_issued_again_a_bounded_number_of_times(buffer, workers, call):
    buffer.open(limits(max_attempts=3))
    tasks = []
    for _ in range(5):
        slot = call(workers.reserve("worker", timeout=0))
        tasks.append(slot.task)
        assert call(workers.abandon(slot.group, "env_error"))
        assert not call(workers.abandon(slot.group, "env_error"))
    counters = buffer.stats().counters
    assert tasks == [0, 0, 0, 1, 1]
    assert (counters["abandoned"], counters["abandoned:env_error"], counters["tasks_given_up"]) == (5, 5, 1)


def test_abandoning_drops_what_was_committed(buffer, workers, call, raw, run):
    buffer.open(limits())
    slot = call(workers.reserve("worker", timeout=0))
    call(workers.commit(trajectory(slot.group, 0)))
    assert buffer.stats().bytes > 0
    call(workers.abandon(slot.group, "timeout"))
    assert (buffer.stats().bytes, payloads(raw, run)) == (0, [])


def test_a_complete_group_cannot_be_abandoned(buffer, workers, call):
    buffer.open(limits())
    slot = call(complete(workers))
    assert not call(workers.abandon(slot.group, "timeout"))
    assert buffer.stats().ready == 1


@pytest.mark.parametrize("reason", ["", "Env error: 'x'", "a" * 65])
def test_a_reason_must_be_able_to_name_a_counter(workers, call, reason):
    with pytest.raises(ValueError, match="expected a short word"):
        call(workers.abandon("g", reason))


def test_reclaim_expires_every_open_slot(buffer, workers, call):
    buffer.open(limits(max_staleness=99))
    for _ in range(100):
        call(workers.reserve("gone", timeout=0))
    call(complete(workers))
    assert buffer.reclaim() == 100
    stats = buffer.stats()
    assert (stats.reserved, stats.ready, stats.counters["expired"]) == (0, 1, 100)


# --- lease and ack ---------------------------------------------------------------------------------------------


def test_batches_are_whole_and_oldest_first(buffer, workers, call):
    buffer.open(limits(max_staleness=3, groups_per_batch=2, group_size=1))
    epoch = buffer.begin_epoch()
    slots = [call(workers.reserve("worker", timeout=0)) for _ in range(5)]
    for position in (4, 2, 0, 3, 1):
        call(workers.commit(trajectory(slots[position].group, 0)))
    first, second = buffer.lease(epoch, 0, timeout=0), buffer.lease(epoch, 1, timeout=0)
    assert first.group_ids + second.group_ids == [slot.group for slot in slots[:4]]
    with pytest.raises(WaitTimeout, match="no batch of 2 complete groups for version 2"):
        buffer.lease(epoch, 2, timeout=0)


def test_no_trajectory_older_than_the_limit_is_leased(buffer, workers, call):
    buffer.open(limits(max_staleness=2, groups_per_batch=1, group_size=1))
    epoch = buffer.begin_epoch()
    old, young = call(complete(workers, version=0)), call(complete(workers, version=1))
    lease = buffer.lease(epoch, 3, timeout=0)
    assert lease.group_ids == [young.group]
    assert (lease.staleness_mean, lease.staleness_max) == (2.0, 2)
    assert buffer.stats().counters["stale"] == 1
    assert call(workers.reserve("worker", timeout=0)).task == old.task


def test_no_trajectory_older_than_the_limit_in_seconds_is_leased(buffer, workers, call, raw, run):
    buffer.open(limits(max_age_seconds=100, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    old, young = (call(complete(workers)) for _ in range(2))
    let_pass(raw, run, old, 101)
    let_pass(raw, run, young, 50)
    lease = buffer.lease(epoch, 0, timeout=0)
    assert lease.group_ids == [young.group]
    stats = buffer.stats()
    assert (stats.counters["stale"], stats.counters["stale:age"], stats.unaccounted) == (1, 1, 0)
    assert call(workers.reserve("worker", timeout=0)).task == old.task


def test_a_lease_is_judged_by_age_once_and_again_after_its_redelivery(buffer, workers, call, raw, run):
    buffer.open(limits(max_age_seconds=100, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    slot = call(complete(workers))
    lease = buffer.lease(epoch, 0, timeout=0)
    let_pass(raw, run, slot, 101)
    assert buffer.lease(epoch, 0, timeout=0).group_ids == lease.group_ids
    buffer.release(lease)
    with pytest.raises(WaitTimeout):
        buffer.lease(epoch, 0, timeout=0)
    assert buffer.stats().counters["stale:age"] == 1


def test_without_a_bound_no_age_is_too_great(buffer, workers, call, raw, run):
    buffer.open(limits(max_age_seconds=math.inf, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    slot = call(complete(workers))
    let_pass(raw, run, slot, 10**9)
    assert buffer.lease(epoch, 0, timeout=0).group_ids == [slot.group]


def test_one_old_member_makes_its_group_stale(buffer, workers, call):
    buffer.open(limits(max_staleness=0, groups_per_batch=1))
    epoch = buffer.begin_epoch()
    slot = call(workers.reserve("worker", timeout=0))
    call(workers.commit(trajectory(slot.group, 0, version=5)))
    call(workers.commit(trajectory(slot.group, 1, version=4)))
    with pytest.raises(WaitTimeout):
        buffer.lease(epoch, 5, timeout=0)
    assert buffer.stats().counters["stale"] == 1


def test_many_stale_groups_are_evicted_in_one_call(buffer, workers, call):
    buffer.open(limits(max_staleness=149, groups_per_batch=1, group_size=1))
    epoch = buffer.begin_epoch()
    for _ in range(149):
        call(complete(workers, version=0))
    fresh = call(complete(workers, version=1))
    assert buffer.lease(epoch, 150, timeout=0).group_ids == [fresh.group]
    assert buffer.stats().counters["stale"] == 149


def test_strictly_on_policy_prefetch_waits_for_the_next_version(buffer, workers, call):
    buffer.open(limits(max_staleness=0, groups_per_batch=1, group_size=1))
    epoch = buffer.begin_epoch()
    call(complete(workers, version=0))
    lease = buffer.lease(epoch, 0, timeout=0)
    with pytest.raises(WaitTimeout):
        buffer.lease(epoch, 1, timeout=0)
    buffer.ack(lease, 1)
    slot = call(complete(workers, version=1))
    following = buffer.lease(epoch, 1, timeout=0)
    assert (slot.version, following.staleness_max) == (1, 0)


def test_the_same_lease_again_is_the_same_batch(buffer, workers, call):
    buffer.open(limits())
    epoch = buffer.begin_epoch()
    for _ in range(4):
        call(complete(workers))
    first = buffer.lease(epoch, 0, timeout=0)
    assert buffer.lease(epoch, 0, timeout=0).group_ids == first.group_ids
    assert buffer.stats().leased == 2


def test_a_waiting_learner_is_woken_by_the_last_commit(buffer, workers, call):
    buffer.open(limits(groups_per_batch=1, group_size=1))
    epoch = buffer.begin_epoch()
    leases = []
    learner = threading.Thread(target=lambda: leases.append(buffer.lease(epoch, 0, timeout=30)))
    learner.start()
    slot = call(complete(workers))
    learner.join()
    assert leases[0].group_ids == [slot.group]


def test_an_ack_consumes_the_batch_and_raises_the_version_once(buffer, workers, call, raw, run):
    buffer.open(limits())
    epoch = buffer.begin_epoch()
    for _ in range(2):
        call(complete(workers))
    lease = buffer.lease(epoch, 0, timeout=0)
    for _ in range(3):
        buffer.ack(lease, 1)
    stats = buffer.stats()
    assert (stats.version, stats.counters["acked"], stats.outstanding) == (1, 2, 0)
    assert (stats.counters["uses"], stats.unsaved) == (2, 2)


def test_a_task_that_was_trained_on_leaves_no_record_of_its_failures(buffer, workers, call, raw, run):
    buffer.open(limits(groups_per_batch=1))
    epoch = buffer.begin_epoch()
    call(workers.abandon(call(workers.reserve("worker", timeout=0)).group, "env_error"))
    assert raw.hlen(f"{{headrace:{run}}}:attempts") == 1
    call(complete(workers))
    buffer.ack(buffer.lease(epoch, 0, timeout=0), 1)
    assert raw.hlen(f"{{headrace:{run}}}:attempts") == 0


def test_an_ack_must_carry_a_newer_version(buffer, workers, call):
    buffer.open(limits(groups_per_batch=1))
    epoch = buffer.begin_epoch()
    call(complete(workers))
    with pytest.raises(ValueError, match="version is 0, but the lease was trained with 0"):
        buffer.ack(buffer.lease(epoch, 0, timeout=0), 0)


def test_a_released_batch_is_ready_again_in_its_old_place(buffer, workers, call):
    buffer.open(limits(groups_per_batch=1))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(2)]
    lease = buffer.lease(epoch, 0, timeout=0)
    buffer.release(lease)
    buffer.release(lease)
    with pytest.raises(Fenced, match="the lease is over"):
        buffer.ack(lease, 1)
    assert buffer.lease(epoch, 0, timeout=0).group_ids == [slots[0].group]
    assert buffer.stats().counters["redelivered"] == 1


def test_a_new_epoch_redelivers_and_fences_off_the_old_one(buffer, workers, call):
    buffer.open(limits(groups_per_batch=1))
    old = buffer.begin_epoch()
    call(complete(workers))
    lease = buffer.lease(old, 0, timeout=0)
    new = buffer.begin_epoch()
    for refused in (
        lambda: buffer.ack(lease, 1),
        lambda: buffer.release(lease),
        lambda: buffer.lease(old, 0, timeout=0),
        lambda: buffer.advance(old, 9),
        lambda: buffer.announce(old, 9),
    ):
        with pytest.raises(Fenced, match=f"epoch {new}"):
            refused()
    assert buffer.version() == 0
    assert buffer.lease(new, 0, timeout=0).group_ids == lease.group_ids


def test_an_announced_version_stays_announced_without_becoming_current(buffer):
    buffer.open(limits())
    assert buffer.announced() == -1
    epoch = buffer.begin_epoch()
    for version in (0, 3, 2):
        buffer.announce(epoch, version)
    buffer.open(limits())
    assert (buffer.announced(), buffer.version()) == (3, 0)


def test_the_version_never_goes_back(buffer):
    buffer.open(limits())
    epoch = buffer.begin_epoch()
    buffer.advance(epoch, 7)
    buffer.advance(epoch, 3)
    assert buffer.version() == 7
    with pytest.raises(BufferError, match="older than the current version 7"):
        buffer.lease(epoch, 6, timeout=0)


def test_opening_again_keeps_the_state_and_changes_the_limits(buffer, workers, call):
    buffer.open(limits(max_staleness=0, groups_per_batch=1))
    buffer.advance(buffer.begin_epoch(), 4)
    call(workers.reserve("worker", timeout=0))
    buffer.open(limits(max_staleness=0, groups_per_batch=2))
    assert (buffer.version(), buffer.stats().reserved) == (4, 1)
    assert call(workers.reserve("worker", timeout=0)).task == 1


# --- damage ----------------------------------------------------------------------------------------------------


def test_a_damaged_payload_quarantines_its_group_and_the_batch_is_made_up(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=2, groups_per_batch=2))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(3)]
    raw.setrange(*payloads(raw, run, slots[0], 1), 40, b"\xff\xff\xff")
    lease = buffer.lease(epoch, 0, timeout=0)
    assert lease.group_ids == [slots[1].group, slots[2].group]
    assert buffer.stats().counters["quarantined"] == 1
    kept = raw.keys(f"{{headrace:{run}}}:quarantine:*")
    assert len(kept) == 2
    assert all(0 < raw.ttl(name) <= 24 * 3600 for name in kept)
    assert call(workers.reserve("worker", timeout=0)).task == slots[0].task


def test_a_payload_of_another_group_is_damage(buffer, workers, call, raw, run):
    buffer.open(limits(groups_per_batch=1))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(2)]
    raw.copy(*(payloads(raw, run, slots[i], 0)[0] for i in (1, 0)), replace=True)
    assert buffer.lease(epoch, 0, timeout=0).group_ids == [slots[1].group]


def test_a_missing_payload_loses_its_group_and_the_batch_waits_to_be_made_up(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=2, groups_per_batch=2))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(2)]
    raw.delete(*payloads(raw, run, slots[0], 0))
    with pytest.raises(WaitTimeout):
        buffer.lease(epoch, 0, timeout=0)
    assert buffer.stats().counters["lost"] == 1
    again = call(complete(workers))
    assert again.task == slots[0].task
    assert buffer.lease(epoch, 0, timeout=0).group_ids == [slots[1].group, again.group]


def test_quarantine_is_bounded(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=99, groups_per_batch=1, group_size=1))
    epoch = buffer.begin_epoch()
    for _ in range(70):
        slot = call(complete(workers))
        raw.set(*payloads(raw, run, slot, 0), "not a trajectory")
    with pytest.raises(WaitTimeout):
        buffer.lease(epoch, 0, timeout=0)
    assert buffer.stats().counters["quarantined"] == 70
    assert len(raw.keys(f"{{headrace:{run}}}:quarantine:*")) == 64


def test_a_batch_larger_than_one_reply_arrives_in_slices(buffer, workers, call, monkeypatch):
    monkeypatch.setattr("buffer.payloads.FETCH_BYTES", 20_000)
    buffer.open(limits(groups_per_batch=4, group_size=3))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers, tokens=tokens)) for tokens in (10, 700, 3000, 10)]
    lease = buffer.lease(epoch, 0, timeout=0)
    assert lease.group_ids == [slot.group for slot in slots]
    assert [len(member.tokens) for member in lease.trajectories] == [10] * 3 + [700] * 3 + [3000] * 3 + [10] * 3


# --- what is refused -------------------------------------------------------------------------------------------


def test_a_run_that_nobody_opened_is_named(buffer, workers, call, run):
    for refused in (
        buffer.version,
        buffer.stats,
        buffer.begin_epoch,
        buffer.reclaim,
        lambda: buffer.lease(0, 0, timeout=0),
        lambda: buffer.advance(0, 0),
        lambda: call(workers.reserve("worker", timeout=0)),
        lambda: call(workers.renew("g")),
        lambda: call(workers.commit(trajectory("g", 0))),
        lambda: call(workers.abandon("g", "timeout")),
    ):
        with pytest.raises(NotOpen, match=f"run '{run}' has no buffer"):
            refused()


def test_another_control_format_is_refused(buffer, raw, run):
    raw.hset(f"{{headrace:{run}}}:control", "format", 99)
    with pytest.raises(FormatError, match="control format 99"):
        buffer.open(limits())


@pytest.mark.parametrize("name", [field.name for field in fields(Limits) if field.name != "order"])
def test_impossible_limits_name_the_field_and_the_value(name):
    with pytest.raises(ValueError, match=rf"Limits\.{name} is -1; expected"):
        limits(**{name: -1})


@pytest.mark.parametrize("max_age_seconds", [2.5, math.inf])
def test_limits_come_back_as_they_were_set(buffer, max_age_seconds):
    wanted = limits(
        max_staleness=3,
        max_age_seconds=max_age_seconds,
        groups_per_batch=5,
        group_size=7,
        max_bytes=1 << 40,
        slot_seconds=1.25,
        max_attempts=2,
        tokens_per_batch=1000,
        min_group_size=6,
        max_member_attempts=4,
        order=Order.PRIORITY,
        max_uses=3,
    )
    buffer.open(wanted)
    assert buffer.stats().limits == wanted
