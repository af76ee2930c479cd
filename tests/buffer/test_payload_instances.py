"""Payloads on instances of their own, behind one control instance."""

import os
import signal
import time
from contextlib import closing, suppress

import pytest
import redis
from buffer_examples import limits, trajectory
from every_call import World

from buffer import Buffer, BufferError, BufferFull, BufferUnavailable, Commit, EmbeddedRedis, WaitTimeout

INSTANCES = 2


@pytest.fixture
def world(new_world):
    """A run whose client has two payload instances, each behind a proxy; ``slots`` of one member, one in a batch."""
    with new_world(Buffer, INSTANCES, timeout_seconds=1) as world:
        world.client.open(limits(groups_per_batch=1, group_size=2, max_staleness=99))
        yield world


def payloads(world, kind="payload"):
    """Names of the payloads on each instance; on the control instance there are none."""
    assert not world.control.keys(f"{world.prefix}{kind}:*")
    return [sorted(store.keys(f"{world.prefix}{kind}:*")) for store in world.payloads]


def times_to_live(world, kind="payload"):
    """Seconds until each payload is gone; -1 for one that stays."""
    on = zip(world.payloads, payloads(world, kind), strict=True)
    return [store.ttl(name) for store, names in on for name in names]


def groups_on(world):
    """Groups with payloads on each instance."""
    return [{name.decode().split(":")[-3] for name in names} for names in payloads(world)]


def complete_on(world, instance):
    """Complete groups until there is one whose payloads are on ``instance``; return its slot."""
    while True:
        [slot] = world.ready()
        if slot.group in groups_on(world)[instance]:
            return slot


def test_payloads_are_on_their_instances_only_and_members_of_a_group_together(world):
    for _ in range(16):
        world.ready()
    on = groups_on(world)
    assert all(on)
    assert not set.intersection(*on)
    assert [len(names) for names in payloads(world)] == [2 * len(groups) for groups in on]
    assert {
        store.ttl(name) for store, names in zip(world.payloads, payloads(world), strict=True) for name in names
    } == {-1}


def test_a_group_lives_its_whole_life(world, call):
    slots = world.ready(8)
    for version in range(8):
        lease = world.client.lease(world.epoch, version, timeout=0)
        assert lease.group_ids == [slots[version].group]
        assert [member.index for member in lease.trajectories] == [0, 1]
        world.client.ack(lease, version + 1)
    assert sum(map(len, payloads(world))) == 16  # until a checkpoint holds what was learned from them
    world.client.checkpointed(world.epoch, 8)
    assert payloads(world) == [[], []]
    stats = world.client.stats()
    assert (stats.counters["acked"], stats.bytes, stats.unaccounted) == (8, 0, 0)


def test_what_is_rolled_back_is_still_there(world):
    slots = world.ready(4)
    for version in range(4):
        world.client.ack(world.client.lease(world.epoch, version, timeout=0), version + 1)
    epoch = world.client.begin_epoch()
    assert world.client.rollback(epoch, 1) == 3
    assert world.client.lease(epoch, 4, timeout=0).group_ids == [slots[1].group]


def test_payloads_of_groups_that_are_given_up_are_deleted_by_the_next_call_of_the_learner(world):
    stale = world.ready(4)
    abandoned, refused = world.slots(2)
    world.client.commit(trajectory(abandoned.group, 0))
    world.client.abandon(abandoned.group, "timeout")
    assert world.client.commit(trajectory(abandoned.group, 1), trajectory("nobody", 0)) == [Commit.EXPIRED] * 2
    world.client.commit(trajectory(refused.group, 0, version=500))
    fresh = world.client.lease(world.epoch, 0, timeout=0)
    assert fresh.group_ids == [stale[0].group]
    assert set.union(*groups_on(world)) == {slot.group for slot in (*stale, refused)}
    world.client.ack(fresh, 500)
    with pytest.raises(WaitTimeout):
        world.client.lease(world.epoch, 500, timeout=0)
    world.client.checkpointed(world.epoch, 500)
    assert set.union(*groups_on(world)) == {refused.group}
    assert world.client.drain() == 1
    assert payloads(world) == [[], []]
    assert world.control.llen(f"{world.prefix}garbage") == 0


def test_damaged_payloads_are_kept_where_they_are_and_not_too_many(world):
    world.client.open(limits(groups_per_batch=1, max_staleness=99, max_attempts=1))
    damaged = world.ready(40)
    for store, names in zip(world.payloads, payloads(world), strict=True):
        for name in names:
            store.append(name, "x")
    [sound] = world.ready()
    lease = world.client.lease(world.epoch, 0, timeout=0)
    assert lease.group_ids == [sound.group]
    assert world.client.stats().counters["quarantined"] == len(damaged)
    assert set.union(*groups_on(world)) == {sound.group}
    kept = payloads(world, "quarantine")
    assert all(kept)
    assert sum(map(len, kept)) == 64
    assert all(
        0 < store.ttl(name) <= 24 * 3600 for store, names in zip(world.payloads, kept, strict=True) for name in names
    )


@pytest.fixture(params=[0, 1, 3])
def other(request, world, server, payload_servers):
    """A client of the same run with another number of instances."""
    urls = [each.url for each in (*payload_servers, *payload_servers)][: request.param]
    with closing(Buffer(server.url, world.run, timeout_seconds=1, payload_urls=urls)) as client:
        yield client


def test_a_client_with_another_number_of_instances_cannot_open_the_run(other):
    with pytest.raises(BufferError, match="are on 2 payload instances, and another number was given"):
        other.open(limits())


def test_a_client_with_another_number_of_instances_cannot_commit(world, other):
    [slot] = world.slots()
    with pytest.raises(BufferError, match="are on 2 payload instances, and another number was given"):
        other.commit(trajectory(slot.group, 0))
    assert world.client.commit(trajectory(slot.group, 0)) == [Commit.ACCEPTED]


def test_an_instance_that_is_down_is_named_and_nothing_is_lost(world, call):
    slots = [complete_on(world, instance) for instance in range(INSTANCES)]
    outstanding = world.client.stats().ready
    [open_slot] = world.slots()
    where = [f"127.0.0.1:{proxy.port}" for proxy in world.proxies]
    for proxy in world.proxies[1:]:
        proxy.down = True
    named = f"no answer from Redis at ({where[1]}|{where[2]}) "
    with pytest.raises(BufferUnavailable, match=named):
        world.client.commit(trajectory(open_slot.group, 0))
    with pytest.raises(BufferUnavailable, match=named):
        world.client.lease(world.epoch, 0, timeout=0)
    assert world.client.renew(open_slot.group)
    assert (world.client.stats().leased, world.client.stats().ready) == (1, outstanding - 1)
    for proxy in world.proxies[1:]:
        proxy.down = False
    assert world.client.commit(trajectory(open_slot.group, 0)) == [Commit.ACCEPTED]
    leased = [world.client.lease(world.epoch, version, timeout=0).group_ids[0] for version in range(outstanding)]
    assert {slot.group for slot in slots} <= set(leased)
    assert world.client.stats().counters["lost"] == 0


def test_a_commit_that_could_not_be_confirmed_is_confirmed_by_its_repetition(new_world, monkeypatch):
    monkeypatch.setattr("buffer.connection._RETRIES", 0)
    with new_world(Buffer, INSTANCES) as world:
        [slot] = world.slots()
        for proxy in world.proxies[1:]:
            proxy.cut("before", skip=1)  # the payload arrives, the request to keep it does not
        with pytest.raises(BufferUnavailable):
            world.client.commit(trajectory(slot.group, 0))
        assert world.client.commit(trajectory(slot.group, 0)) == [Commit.DUPLICATE]
        assert sorted(times_to_live(world))[0] == -1  # besides the bytes of the repetition, which nobody needs


def test_a_full_instance_is_named_and_its_payloads_are_committed_later(world):
    [slot] = world.slots()
    batch = [trajectory(slot.group, index) for index in range(2)]
    before = world.state()
    for store in world.payloads:
        store.config_set("maxmemory", 1)
    try:
        with pytest.raises(
            BufferFull, match=f"Redis at 127.0.0.1:({'|'.join(str(p.port) for p in world.proxies[1:])}) is"
        ):
            world.client.commit(*batch)
        assert world.state() == before
        assert world.client.renew(slot.group)
    finally:
        for store in world.payloads:
            store.config_set("maxmemory", 0)
    assert world.client.commit(*batch) == [Commit.ACCEPTED] * 2


@pytest.fixture
def world_that_loses(server, run, tmp_path, call):
    """A run whose first payload instance loses its data when ``empty`` is called."""
    with (
        EmbeddedRedis(tmp_path / "0") as emptied,
        EmbeddedRedis(tmp_path / "1") as other,
        closing(World(run, Buffer, call, (server, emptied, other), timeout_seconds=5)) as world,
    ):

        def empty():
            time.sleep(1.1)  # one that is killed at its start is not started again
            (emptied.folder / "appendonly.aof").unlink()
            os.kill(emptied.pid, signal.SIGKILL)
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                with suppress(redis.ConnectionError):
                    return world.payloads[0].ping()

        world.empty = empty
        yield world


def test_an_instance_that_comes_back_empty_loses_its_groups_and_their_tasks_are_issued_again(world_that_loses):
    world = world_that_loses
    world.client.open(limits(groups_per_batch=1, max_staleness=99))
    slots = world.ready(12)
    lost, sound = ([slot for slot in slots if slot.group in groups] for groups in groups_on(world))
    assert lost
    assert sound
    [half_done] = world.slots()
    world.client.commit(trajectory(half_done.group, 0))
    world.empty()
    world.client.commit(trajectory(half_done.group, 1))  # it is lost, too, if it was there

    leases = []
    with pytest.raises(WaitTimeout):
        for version in range(20):
            leases.append(world.client.lease(world.epoch, version, timeout=0))
            world.client.ack(leases[-1], version + 1)
    leased = {group for lease in leases for group in lease.group_ids}
    assert leased - {half_done.group} == {slot.group for slot in sound}
    stats = world.client.stats()
    assert stats.counters["lost"] == len(slots) + 1 - len(leased)
    assert (stats.outstanding, stats.unaccounted) == (0, 0)
    again = {world.client.reserve("worker", timeout=0).task for _ in range(stats.counters["lost"])}
    assert again - {half_done.task} == {slot.task for slot in lost}
