"""Every call of both clients loses its connection, at each of its requests: its effect is that of one call.

Each case is played in runs of its own: undisturbed, then, for each request that was seen, with the connection cut
before the server sees it, cut after the server executed it, and cut while the request is on its way, so that it
arrives after the client has repeated it.
"""

import pytest
from conftest import MOST_SLOW
from every_call import CASES, methods, parameters
from redis.backoff import NoBackoff

from buffer import AsyncBuffer, Buffer


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    monkeypatch.setattr("buffer.connection.ExponentialWithJitterBackoff", lambda **_: NoBackoff())


def cut_everywhere(new_world, kind, case, instances=0):
    def play(position=0, moment=None, skip=0):
        with new_world(kind, instances) as world:
            action, proxy = world.arrange(case), world.proxies[position]
            if moment:
                proxy.cut(moment, skip)
            result = action()
            requests = [list(each.requests) for each in world.proxies]
            # How often a wait looks before it gives up is a matter of time, so there may be fewer requests.
            assert proxy.cuts == bool(moment) or len(requests[position]) <= skip
            if moment == "late" and proxy.cuts:
                proxy.pass_on()
            return result, world.state(), requests

    play()  # now the server knows the scripts
    result, state, requests = play()
    assert any(requests)
    for position, of_proxy in enumerate(requests):
        for skip, request in enumerate(of_proxy):
            for moment in ("before", "after", "late"):
                cut = play(position, moment, skip)
                assert cut[:2] == (result, state), f"connection cut {moment} request {request}"


@pytest.mark.parametrize("kind", [Buffer, AsyncBuffer])
def test_every_method_has_a_case(kind):
    assert methods(kind) <= CASES.keys()
    assert methods(Buffer) == CASES.keys()


@pytest.mark.parametrize("server", MOST_SLOW, indirect=True)
@pytest.mark.parametrize(("kind", "case"), parameters())
def test_a_lost_connection_changes_nothing(new_world, kind, case):
    cut_everywhere(new_world, kind, case)


@pytest.mark.parametrize("server", ["bundled"], indirect=True)
@pytest.mark.parametrize("name", ["ack", "checkpointed", "commit", "delete", "lease"])
def test_a_lost_connection_to_a_payload_instance_changes_nothing(new_world, name):
    for case in CASES[name]:
        cut_everywhere(new_world, AsyncBuffer if name == "commit" else Buffer, case, instances=1)


def test_an_epoch_is_not_fenced_off_by_its_own_late_request(new_world):
    with new_world(Buffer) as world:
        world.client.stats()
        world.proxies[0].cut("late")
        epoch = world.client.begin_epoch()
        world.proxies[0].pass_on()
        world.client.announce(epoch, 1)
