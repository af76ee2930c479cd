"""One real Redis for all tests of the buffer; each test has a run of its own in it."""

import asyncio
import itertools

import pytest
import redis

from buffer import AsyncBuffer, Buffer, EmbeddedRedis

_runs = itertools.count()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as embedded:
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
def raw(server):
    """A bare client, to look behind the protocol and to do damage."""
    with redis.Redis.from_url(server.url) as client:
        yield client
