"""Which groups a lease takes: orders, look-ahead, budgets of tokens, shards, and groups that are used again."""

import math
import random
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from buffer_examples import complete, limits, trajectory
from scipy.stats import chisquare

from buffer import Buffer, BufferError, Commit, Failure, Order, WaitTimeout


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    """A draw depends on the names of the groups, so that it can be repeated."""
    rng = random.Random(0)
    monkeypatch.setattr("buffer.operations.uuid.uuid4", lambda: uuid.UUID(int=rng.getrandbits(128)))


def ready(buffer, workers, call, weights, version=0):
    """Complete a group of one for each weight; return their names."""
    groups = []
    for weight in weights:
        slot = call(workers.reserve("worker", timeout=0))
        call(workers.commit(trajectory(slot.group, 0, version), weight=weight))
        groups.append(slot.group)
    return groups


# --- orders ----------------------------------------------------------------------------------------------------


def draw(buffer, workers, call, order, weights, batch, times):
    """Lease ``times`` batches, each from new groups of these weights; return their positions and corrections."""
    buffer.open(limits(max_staleness=99, groups_per_batch=batch, group_size=1, order=order))
    epoch = buffer.begin_epoch()
    positions, corrections = [], []
    for version in range(times):
        groups = ready(buffer, workers, call, weights, version)
        lease = buffer.lease(epoch, version, timeout=0)
        positions.append([groups.index(group) for group in lease.group_ids])
        corrections.append(lease.corrections)
        buffer.ack(lease, version + 1)
        buffer.drain()
    return np.array(positions), np.array(corrections)


def test_a_uniform_draw_takes_every_group_equally_often(buffer, workers, call):
    positions_TB, corrections_TB = draw(buffer, workers, call, Order.UNIFORM, [1.0] * 6, batch=2, times=200)
    assert chisquare(np.bincount(positions_TB.ravel(), minlength=6)).pvalue > 1e-4
    assert (corrections_TB == 1).all()


def test_a_priority_draw_follows_the_weights_and_its_corrections_undo_the_bias(buffer, workers, call):
    weights_N = np.array([8.0, 4.0, 2.0, 1.0, 0.5])
    positions_TB, corrections_TB = draw(buffer, workers, call, Order.PRIORITY, weights_N, batch=2, times=300)
    firsts_N = np.bincount(positions_TB[:, 0], minlength=5)
    assert chisquare(firsts_N, 300 * weights_N / weights_N.sum()).pvalue > 1e-4
    # The weighted mean over a batch estimates the plain mean over all groups, whatever is averaged.
    for values_N in (np.ones(5), np.arange(5.0), np.array([0.0, 0, 0, 0, 1])):
        estimates_T = (corrections_TB * values_N[positions_TB]).mean(axis=1)
        error = estimates_T.mean() - values_N.mean()
        assert abs(error) < 4 * estimates_T.std() / math.sqrt(len(estimates_T))


def test_a_group_that_waited_is_drawn_as_if_it_were_new(buffer, workers, call):
    """The odds of what is left do not depend on how often it was passed over, nor on when it came."""
    buffer.open(limits(max_staleness=99, groups_per_batch=1, group_size=1, order=Order.PRIORITY))
    epoch = buffer.begin_epoch()
    second = []
    for version in range(0, 400, 2):
        [light, _] = ready(buffer, workers, call, [1.0, 1000.0], version)  # the heavy one nearly always goes first
        leases = [buffer.lease(epoch, version, timeout=0)]
        ready(buffer, workers, call, [1.0], version)
        leases.append(buffer.lease(epoch, version + 1, timeout=0))
        second.append(leases[1].group_ids == [light])
        for lease in leases:
            buffer.ack(lease, lease.version + 1)
        buffer.drain()
    assert 0.36 < np.mean(second) < 0.64


def test_a_group_weighs_what_its_members_weigh_on_average(buffer, workers, call, raw, run):
    buffer.open(limits(group_size=3, order=Order.PRIORITY))
    slot = call(workers.reserve("worker", timeout=0))
    for index, weight in enumerate((1.0, 4.0, 1.0)):
        call(workers.commit(trajectory(slot.group, index), weight=weight))
    assert float(raw.hget(f"{{headrace:{run}}}:group:{slot.group}", "weight")) == 2.0


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_an_impossible_weight_is_refused(buffer, workers, call, weight):
    buffer.open(limits())
    slot = call(workers.reserve("worker", timeout=0))
    with pytest.raises(ValueError, match=r"weight is .*; expected a number from 0\.001 to 1000"):
        call(workers.commit(trajectory(slot.group, 0), weight=weight))


def test_the_order_may_change_in_mid_run(buffer, workers, call):
    buffer.open(limits(groups_per_batch=1, max_staleness=5, order=Order.UNIFORM))
    epoch = buffer.begin_epoch()
    groups = {call(complete(workers)).group for _ in range(3)}
    buffer.open(limits(groups_per_batch=1, max_staleness=5, order=Order.FIFO))
    groups |= {call(complete(workers)).group for _ in range(2)}
    assert {group for version in range(5) for group in buffer.lease(epoch, version, timeout=0).batch} == groups


# --- look-ahead ------------------------------------------------------------------------------------------------


def test_no_more_than_look_ahead_groups_overtake_one_that_still_runs(buffer, workers, call):
    buffer.open(limits(max_staleness=9, groups_per_batch=1, group_size=1, look_ahead=2))
    epoch = buffer.begin_epoch()
    slow = call(workers.reserve("slow-one", timeout=0))
    for _ in range(3):
        call(complete(workers))
    for version in range(2):
        buffer.lease(epoch, version, timeout=0)
    with pytest.raises(WaitTimeout, match="the oldest running group is that of worker slow-one"):
        buffer.lease(epoch, 2, timeout=0)
    call(workers.commit(trajectory(slow.group, 0)))
    assert buffer.lease(epoch, 2, timeout=0).group_ids == [slow.group]
    assert len(buffer.lease(epoch, 3, timeout=0).groups) == 1


def test_a_slow_group_that_is_given_up_stalls_nobody(buffer, workers, call):
    buffer.open(limits(max_staleness=9, groups_per_batch=1, group_size=1, look_ahead=0))
    epoch = buffer.begin_epoch()
    slow = call(workers.reserve("slow-one", timeout=0))
    call(complete(workers))
    with pytest.raises(WaitTimeout):
        buffer.lease(epoch, 0, timeout=0)
    call(workers.abandon(slow.group, "timeout"))
    buffer.lease(epoch, 0, timeout=0)


# --- tokens ----------------------------------------------------------------------------------------------------


def test_a_batch_ends_before_the_group_that_would_exceed_its_tokens(buffer, workers, call):
    buffer.open(limits(max_staleness=9, groups_per_batch=4, group_size=1, tokens_per_batch=100))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers, tokens=tokens)) for tokens in (40, 50, 30, 300, 10, 10, 10)]
    with pytest.raises(WaitTimeout):
        buffer.open(limits(max_staleness=9, groups_per_batch=9, group_size=1, tokens_per_batch=10_000))
        buffer.lease(epoch, 0, timeout=0)  # neither groups nor tokens enough
    buffer.open(limits(max_staleness=9, groups_per_batch=3, group_size=1, tokens_per_batch=100))
    batches = [buffer.lease(epoch, version, timeout=0).group_ids for version in range(4)]
    expected = [slots[:2], slots[2:3], slots[3:4], slots[4:]]  # two that fit; the next; one that never fits; three
    assert batches == [[slot.group for slot in batch] for batch in expected]


def test_a_bad_group_makes_a_batch_of_tokens_smaller(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=9, groups_per_batch=4, group_size=1, tokens_per_batch=100))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers, tokens=40)) for _ in range(3)]
    raw.delete(*raw.keys(f"{{headrace:{run}}}:payload:{slots[0].group}:*"))
    lease = buffer.lease(epoch, 0, timeout=0)
    assert lease.group_ids == [slots[1].group]
    buffer.ack(lease, 1)
    stats = buffer.stats()
    assert (stats.counters["lost"], stats.counters["acked"], stats.leased, stats.unaccounted) == (1, 1, 0, 0)


# --- shards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "shards"), [(5, 2), (8, 4), (3, 3), (2, 4)])
def test_shards_are_disjoint_complete_and_of_like_size(buffer, workers, call, groups, shards):
    buffer.open(limits(groups_per_batch=groups, group_size=2))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers, tokens=100 * (1 + position % 3))) for position in range(groups)]
    leases = [buffer.lease(epoch, 0, timeout=0, shard=shard, shards=shards) for shard in range(shards)]
    assert len({lease.id for lease in leases}) == 1
    assert sorted(g for lease in leases for g in lease.group_ids) == sorted(slot.group for slot in slots)
    tokens = [sum(len(member.tokens) for member in lease.trajectories) for lease in leases]
    assert max(tokens) - min(tokens) <= 2 * 300  # the largest group
    assert all(set(lease.batch) == {slot.group for slot in slots} for lease in leases)
    again = [buffer.lease(epoch, 0, timeout=0, shard=shard, shards=shards).group_ids for shard in range(shards)]
    assert again == [lease.group_ids for lease in leases]
    buffer.ack(leases[0], 1)
    assert buffer.stats().counters["acked"] == groups


def test_a_bad_group_is_made_up_for_in_its_own_shard(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=3, groups_per_batch=4, group_size=1))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(5)]
    before = [buffer.lease(epoch, 0, timeout=0, shard=shard, shards=2).group_ids for shard in range(2)]
    victim = before[1][0]
    raw.delete(*raw.keys(f"{{headrace:{run}}}:payload:{victim}:*"))
    with pytest.raises(WaitTimeout, match="waits for that of shard 0 to make the lease, or to ask for it again"):
        buffer.lease(epoch, 0, timeout=0, shard=1, shards=2)
    after = [buffer.lease(epoch, 0, timeout=0, shard=shard, shards=2) for shard in range(2)]
    assert set(after[1].group_ids) == {before[1][1], slots[4].group}
    assert after[0].group_ids == before[0]
    buffer.ack(after[0], 1)
    assert buffer.stats().counters["acked"] == 4


def test_an_ack_before_every_shard_is_whole_is_refused(buffer, workers, call, raw, run):
    buffer.open(limits(max_staleness=3, groups_per_batch=4, group_size=1))
    epoch = buffer.begin_epoch()
    for _ in range(4):
        call(complete(workers))
    first = buffer.lease(epoch, 0, timeout=0, shard=0, shards=2)
    victim = next(group for group, shard in first.batch.items() if shard == 1)
    raw.delete(*raw.keys(f"{{headrace:{run}}}:payload:{victim}:*"))
    with pytest.raises(WaitTimeout):
        buffer.lease(epoch, 0, timeout=0, shard=1, shards=2)
    with pytest.raises(BufferError, match="groups of this lease were condemned"):
        buffer.ack(first, 1)
    assert buffer.stats().counters["acked"] == 0


def test_processes_must_agree_on_the_number_of_shards(buffer, workers, call):
    buffer.open(limits(groups_per_batch=2))
    epoch = buffer.begin_epoch()
    for _ in range(2):
        call(complete(workers))
    buffer.lease(epoch, 0, timeout=0, shard=0, shards=2)
    with pytest.raises(BufferError, match="this lease has 2 shards"):
        buffer.lease(epoch, 0, timeout=0, shard=0, shards=3)
    with pytest.raises(ValueError, match="shard is 2 of 2"):
        buffer.lease(epoch, 0, timeout=0, shard=2, shards=2)


# --- used again ------------------------------------------------------------------------------------------------


def test_a_group_may_be_used_max_uses_times_and_is_counted_once(buffer, workers, call):
    buffer.open(limits(max_staleness=9, groups_per_batch=2, group_size=1, max_uses=2))
    epoch = buffer.begin_epoch()
    slots = [call(complete(workers)) for _ in range(3)]
    used = []
    for version in range(3):
        lease = buffer.lease(epoch, version, timeout=0)
        used += lease.group_ids
        buffer.ack(lease, version + 1)
    assert used == [slots[i].group for i in (0, 1, 2, 0, 1, 2)]  # what was used goes to the end
    stats = buffer.stats()
    assert (stats.counters["acked"], stats.counters["uses"], stats.outstanding, stats.unaccounted) == (3, 6, 0, 0)


def test_a_used_group_that_becomes_stale_has_served_its_purpose(buffer, workers, call):
    buffer.open(limits(max_staleness=1, groups_per_batch=1, group_size=1, max_uses=5))
    epoch = buffer.begin_epoch()
    slot = call(complete(workers))
    buffer.ack(buffer.lease(epoch, 0, timeout=0), 1)
    assert buffer.stats().ready == 1
    with pytest.raises(WaitTimeout):
        buffer.lease(epoch, 2, timeout=0)
    stats = buffer.stats()
    assert (stats.counters["acked"], stats.counters["stale"], stats.unaccounted) == (1, 0, 0)
    assert call(workers.reserve("worker", timeout=0)).task != slot.task


# --- smaller groups --------------------------------------------------------------------------------------------


def test_a_member_is_tried_again_a_bounded_number_of_times_then_done_without(buffer, workers, call):
    buffer.open(limits(groups_per_batch=1, group_size=3, min_group_size=2, max_member_attempts=2))
    epoch = buffer.begin_epoch()
    slot = call(workers.reserve("worker", timeout=0))
    call(workers.commit(trajectory(slot.group, 0)))
    assert call(workers.fail(slot.group, 1, 1, "env_error")) is Failure.RETRY
    assert call(workers.fail(slot.group, 1, 1, "env_error")) is Failure.RETRY  # the same failure, reported twice
    assert call(workers.fail(slot.group, 1, 2, "timeout")) is Failure.DROPPED
    assert call(workers.fail(slot.group, 1, 2, "timeout")) is Failure.DROPPED
    assert call(workers.commit(trajectory(slot.group, 1))) is Commit.EXPIRED
    call(workers.commit(trajectory(slot.group, 2)))
    assert [member.index for member in buffer.lease(epoch, 0, timeout=0).trajectories] == [0, 2]
    counters = buffer.stats().counters
    assert (counters["short_groups"], counters["failed:env_error"], counters["failed:timeout"]) == (1, 1, 1)


def test_a_group_is_complete_when_its_last_missing_member_is_given_up(buffer, workers, call):
    buffer.open(limits(groups_per_batch=1, group_size=2, min_group_size=1, max_member_attempts=1))
    slot = call(workers.reserve("worker", timeout=0))
    call(workers.commit(trajectory(slot.group, 1)))
    assert call(workers.fail(slot.group, 0, 1, "env_error")) is Failure.DROPPED
    assert buffer.stats().ready == 1


def test_a_group_too_small_is_abandoned_with_the_reason(buffer, workers, call):
    buffer.open(limits(group_size=3, min_group_size=2, max_member_attempts=1))
    slot = call(workers.reserve("worker", timeout=0))
    assert call(workers.fail(slot.group, 0, 1, "env_error")) is Failure.DROPPED
    assert call(workers.fail(slot.group, 2, 1, "timeout")) is Failure.GONE
    assert call(workers.commit(trajectory(slot.group, 1))) is Commit.EXPIRED
    assert buffer.stats().counters["abandoned:timeout"] == 1
    assert call(workers.reserve("worker", timeout=0)).task == slot.task


@pytest.mark.parametrize("end", ["expired", "abandoned"])
def test_enough_members_make_a_group_when_its_worker_goes_away(buffer, workers, call, end):
    buffer.open(limits(groups_per_batch=1, group_size=3, min_group_size=2))
    epoch = buffer.begin_epoch()
    slot = call(workers.reserve("worker", timeout=0))
    for index in range(2):
        call(workers.commit(trajectory(slot.group, index)))
    if end == "expired":
        buffer.reclaim()
    else:
        assert call(workers.abandon(slot.group, "drained"))
    assert call(workers.commit(trajectory(slot.group, 2))) is Commit.EXPIRED
    assert len(buffer.lease(epoch, 0, timeout=0).trajectories) == 2
    stats = buffer.stats()
    assert (stats.counters[end], stats.counters["short_groups"], stats.unaccounted) == (0, 1, 0)


# --- draws that were disturbed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("disturbance", ["release", "begin_epoch", "rollback", "change of order"])
def test_corrections_stay_unbiased_whatever_put_the_groups_back(buffer, workers, call, disturbance):
    weights_N, batch = np.array([4.0, 2.0, 1.0, 1.0, 0.5]), 2
    bounds = limits(max_staleness=9999, groups_per_batch=batch, group_size=1, order=Order.PRIORITY)
    if disturbance == "change of order":
        buffer.open(replace(bounds, order=Order.FIFO))
    else:
        buffer.open(bounds)
    epoch, version, estimates = buffer.begin_epoch(), 0, []
    for _ in range(150):
        if disturbance == "change of order":
            buffer.open(replace(bounds, order=Order.FIFO))
        groups = ready(buffer, workers, call, weights_N, version)
        buffer.open(bounds)
        lease = buffer.lease(epoch, version, timeout=0) if disturbance != "change of order" else None
        if disturbance == "release":
            buffer.release(lease)
        elif disturbance == "begin_epoch":
            epoch = buffer.begin_epoch()
        elif disturbance == "rollback":
            buffer.checkpointed(epoch, version)
            buffer.ack(lease, version + 1)
            epoch = buffer.begin_epoch()
            buffer.rollback(epoch, version)
            version += 1
        lease = buffer.lease(epoch, version, timeout=0)
        values = np.array([groups.index(group) for group in lease.group_ids], float)
        estimates.append((lease.corrections * values).mean())
        version += 1
        buffer.ack(lease, version)
        buffer.drain()
    error = np.mean(estimates) - np.arange(5).mean()
    assert abs(error) < 4.5 * np.std(estimates) / math.sqrt(len(estimates))


def test_groups_of_an_older_order_are_not_starved(buffer, workers, call):
    bounds = limits(max_staleness=99, groups_per_batch=1, group_size=1)
    buffer.open(bounds)
    epoch = buffer.begin_epoch()
    old = set(ready(buffer, workers, call, [1.0] * 10))
    buffer.open(replace(bounds, order=Order.UNIFORM))
    ready(buffer, workers, call, [1.0] * 10)
    leased = {group for version in range(10) for group in buffer.lease(epoch, version, timeout=0).batch}
    assert 1 <= len(leased & old) <= 9


def test_every_process_of_a_gang_is_woken(server, run, buffer, workers, call):
    buffer.open(limits(groups_per_batch=4, group_size=1))
    epoch = buffer.begin_epoch()
    clients = [Buffer(server.url, run, timeout_seconds=20) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        leases = [threads.submit(client.lease, epoch, 0, 10, shard=k, shards=4) for k, client in enumerate(clients)]
        for _ in range(4):
            call(complete(workers))
        groups = [group for lease in leases for group in lease.result().group_ids]
    assert len(set(groups)) == 4
    for client in clients:
        client.close()
