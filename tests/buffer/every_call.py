"""Every method of both clients, each with cases of what it may meet: for tests of what must hold of all of them."""

import inspect
from dataclasses import replace

import pytest
import redis
from buffer_examples import limits, trajectory
from cutting_proxy import Proxy, through

from buffer import AsyncBuffer, Buffer, NotOpen, State, WaitTimeout

WAITED = "nothing came in time"


def waited(action):
    with pytest.raises(WaitTimeout):
        action()
    return WAITED


def uncounted(done):
    """How many there were: what was done before a reply was lost is missing from that."""
    assert done >= 0


class World:
    """One run of its own: ``client`` calls through proxies, ``beside`` arranges and looks.

    Its limits admit four groups of two members, two in a batch.
    """

    def __init__(self, run, kind, call, servers, timeout_seconds):
        """Open the run on ``servers``, the first of which is the control instance; ``kind`` is that of ``client``."""
        self.run, self.prefix = run, f"{{headrace:{run}}}:"
        self.proxies = [Proxy(each.port) for each in servers]
        url, *payload_urls = (through(proxy, each.url) for proxy, each in zip(self.proxies, servers, strict=True))
        client = kind(url, run, timeout_seconds=timeout_seconds, payload_urls=payload_urls)
        self.client = client if kind is Buffer else Blocking(client, call)
        url, *payload_urls = (each.admin_url for each in servers)
        self.beside = Buffer(url, run, timeout_seconds=5, payload_urls=payload_urls)
        self._stores = [redis.Redis.from_url(each) for each in (url, *payload_urls)]
        self.control, self.payloads = self._stores[0], self._stores[1:] or self._stores
        self.control.config_set("hz", 500)  # Redis 6.2 looks this often for waits that are over
        self.beside.open(limits(max_member_attempts=2))
        self.epoch = self.beside.begin_epoch()

    def close(self):
        for each in (self.client, self.beside, *self._stores, *self.proxies):
            each.close()

    def play(self, case, disturb=lambda: None):
        """Arrange ``case``, disturb it, and make its call; return the result and the state afterwards."""
        action = self.arrange(case)
        disturb()
        result = action()
        return result, self.state()

    def arrange(self, case):
        """Arrange ``case``; return the call to make."""
        action = case(self)
        if case is not open_:
            self.client.stats()  # the first call of a client is another one: it asks what the server is
        for proxy in self.proxies:
            proxy.requests.clear()
        return lambda: action(self.client)

    def slots(self, number=1):
        return [self.beside.reserve("worker", timeout=0) for _ in range(number)]

    def ready(self, number=1, version=0):
        slots = self.slots(number)
        for slot in slots:
            self.beside.commit(*(trajectory(slot.group, index, version, task=slot.task) for index in range(2)))
        return slots

    def leased(self):
        self.ready(2)
        return self.beside.lease(self.epoch, 0, timeout=0)

    def trained(self):
        self.beside.ack(self.leased(), 1)

    def damaged(self):
        """Damage a payload of the first of three ready groups."""
        self.ready(3)
        [info, *_] = self.beside.groups(State.READY, 1)
        name = f"{self.prefix}payload:{info.group}:1:{info.members[1].nonce}"
        [store] = [store for store in self.payloads if store.exists(name)]
        store.set(name, b"damaged")

    def state(self):
        """All that there is, but for what is drawn or depends on the clock."""
        try:
            stats = self.beside.stats()
        except NotOpen:
            return [name for store in (self.control, *self.payloads) for name in store.keys(f"{self.prefix}*")]
        groups = [
            (info.task, replace(info, group="", members=(), age_seconds=0.0, expires_seconds=None), members)
            for state in State
            for info in self.beside.groups(state, 100)
            for members in [[(member.index, member.bytes) for member in info.members]]
        ]
        next_expiry = round(stats.next_expiry_seconds, -2)  # slots last 100 s or 1000 s
        kept = [
            (name.removeprefix(self.prefix.encode()).partition(b":")[0], store.ttl(name) > 0)
            for store in self.payloads
            for kind in ("payload", "quarantine")
            for name in store.keys(f"{self.prefix}{kind}:*")
        ]
        names = self.control.keys(f"{self.prefix}*")
        return {
            "stats": replace(stats, epoch=0, next_expiry_seconds=next_expiry, oldest_ready_seconds=0.0),
            "announced": self.beside.announced(),
            "groups": sorted(groups, key=repr),
            "payloads": sorted(kept),
            "quarantined": self.control.llen(f"{self.prefix}quarantine"),
            "tasks to issue again": sorted(self.control.lrange(f"{self.prefix}retry", 0, -1)),
            "failed attempts": self.control.hgetall(f"{self.prefix}attempts"),
            "kinds of keys": {name.removeprefix(self.prefix.encode()).partition(b":")[0] for name in names} - {b"wake"},
        }


# Each arranges a world and returns the call to make, whose result is what can be compared between two runs.


def open_(world):
    return lambda client: client.open(limits(max_staleness=3, slot_seconds=1000))


def version(world):
    world.beside.advance(world.epoch, 7)
    return lambda client: client.version()


def announced(world):
    world.beside.announce(world.epoch, 7)
    return lambda client: client.announced()


def stats(world):
    world.ready(3)
    return lambda client: (client.stats().ready, client.stats().counters)


def groups(world):
    world.ready(2)
    return lambda client: [info.task for info in client.groups(State.READY, 100)]


def payload_instances(world):
    return lambda client: client.payload_instances()


def peek(world):
    world.ready()
    [info] = world.beside.groups(State.READY, 1)
    return lambda client: client.peek(info).index


def reserve(world):
    return lambda client: client.reserve("worker", timeout=0).task


def reserve_in_vain(world):
    world.slots(4)
    return lambda client: waited(lambda: client.reserve("worker", timeout=0.02))


def renew(world):
    [slot] = world.slots()
    world.beside.open(limits(slot_seconds=1000))
    return lambda client: client.renew(slot.group, 0)


def renew_too_late(world):
    [slot] = world.slots()
    world.beside.advance(world.epoch, 5)
    return lambda client: client.renew(slot.group)


def commit_first_member(world):
    [slot] = world.slots()
    return lambda client: client.commit(trajectory(slot.group, 0))


def commit_last_member(world):
    [slot] = world.slots()
    world.beside.commit(trajectory(slot.group, 0))
    return lambda client: client.commit(trajectory(slot.group, 1))


def commit_again(world):
    [slot] = world.ready()
    return lambda client: client.commit(trajectory(slot.group, 1))


def commit_without_slot(world):
    return lambda client: client.commit(trajectory("nobody", 0))


def commit_stale(world):
    [slot] = world.slots()
    world.beside.advance(world.epoch, 5)
    world.beside.open(limits(max_staleness=5))
    world.beside.commit(trajectory(slot.group, 0))
    world.beside.open(limits(max_staleness=1))
    return lambda client: client.commit(trajectory(slot.group, 1))


def fail_once(world):
    [slot] = world.slots()
    return lambda client: client.fail(slot.group, 0, 1, "env_error")


def fail_for_good(world):
    world.beside.open(limits(max_member_attempts=2, min_group_size=1))
    [slot] = world.slots()
    return lambda client: client.fail(slot.group, 0, 2, "env_error")


def fail_the_group(world):
    [slot] = world.slots()
    world.beside.commit(trajectory(slot.group, 0))
    return lambda client: client.fail(slot.group, 1, 2, "env_error")


def abandon(world):
    [slot] = world.slots()
    world.beside.commit(trajectory(slot.group, 0))
    return lambda client: client.abandon(slot.group, "timeout") or True


def begin_epoch(world):
    world.leased()
    return lambda client: client.begin_epoch() > world.epoch


def lease(world):
    world.ready(4)
    return lambda client: [member.task for member in client.lease(world.epoch, 0, timeout=0).trajectories]


def lease_in_vain(world):
    world.ready()
    return lambda client: waited(lambda: client.lease(world.epoch, 0, timeout=0.02))


def lease_of_stale(world):
    world.ready(2)
    return lambda client: waited(lambda: client.lease(world.epoch, 5, timeout=0))


def lease_of_damaged(world):
    world.damaged()
    return lambda client: [member.task for member in client.lease(world.epoch, 0, timeout=0).trajectories]


def announce(world):
    return lambda client: client.announce(world.epoch, 3)


def ack(world):
    leased = world.leased()
    world.ready()
    return lambda client: client.ack(leased, 1)


def release(world):
    leased = world.leased()
    return lambda client: client.release(leased)


def checkpointed(world):
    world.trained()
    return lambda client: client.checkpointed(world.epoch, 1)


def rollback(world):
    world.trained()
    return lambda client: uncounted(client.rollback(world.epoch, -1))


def rollback_of_stale(world):
    world.trained()
    world.beside.advance(world.epoch, 4)
    world.ready(2, version=4)
    world.beside.ack(world.beside.lease(world.epoch, 4, timeout=0), 5)
    return lambda client: uncounted(client.rollback(world.epoch, -1))


def advance(world):
    world.ready()
    return lambda client: client.advance(world.epoch, 3)


def reclaim(world):
    world.slots(3)
    return lambda client: uncounted(client.reclaim())


def drain(world):
    world.ready(2)
    world.slots(2)
    return lambda client: uncounted(client.drain())


def delete(world):
    world.trained()
    world.ready(2)
    world.slots(2)
    return lambda client: uncounted(client.delete())


def close(world):
    """A client that was closed connects again."""
    world.client.version()
    return lambda client: (client.close(), client.version())


CASES = {
    "open": [open_],
    "version": [version],
    "announced": [announced],
    "stats": [stats],
    "groups": [groups],
    "peek": [peek],
    "payload_instances": [payload_instances],
    "reserve": [reserve, reserve_in_vain],
    "renew": [renew, renew_too_late],
    "commit": [commit_first_member, commit_last_member, commit_again, commit_without_slot, commit_stale],
    "fail": [fail_once, fail_for_good, fail_the_group],
    "abandon": [abandon],
    "begin_epoch": [begin_epoch],
    "lease": [lease, lease_in_vain, lease_of_stale, lease_of_damaged],
    "announce": [announce],
    "ack": [ack],
    "release": [release],
    "checkpointed": [checkpointed],
    "rollback": [rollback, rollback_of_stale],
    "advance": [advance],
    "reclaim": [reclaim],
    "drain": [drain],
    "delete": [delete],
    "close": [close],
}


def methods(kind):
    """Public methods of a client, by introspection."""
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


class Blocking:
    """An ``AsyncBuffer`` that is called like a ``Buffer``."""

    def __init__(self, workers, call):
        self._workers, self._call = workers, call

    def __getattr__(self, name):
        method = getattr(self._workers, name)
        return lambda *arguments, **options: self._call(method(*arguments, **options))


def parameters(kinds=(Buffer, AsyncBuffer), most=None, slow=()):
    """Parameters (kind, case) of a test: up to ``most`` cases of every method of each kind of client."""
    return [
        pytest.param(
            kind,
            case,
            id=f"{kind.__name__}-{case.__name__.rstrip('_')}",
            marks=[pytest.mark.slow] if kind in slow else [],
        )
        for kind in kinds
        for name in sorted(methods(kind))
        for case in CASES[name][:most]
    ]
