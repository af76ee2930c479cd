"""The buffer on a real Redis Cluster of three nodes: a run lies on one of them, whichever is named in the URL."""

import asyncio
import contextlib
import subprocess
import time

import pytest
import redis
from buffer_examples import complete, limits
from conftest import SERVERS

from buffer import AsyncBuffer, Buffer, PortInUse, WaitTimeout
from buffer.keys import Keys
from buffer.server import _free_port, _server_binary

SLOTS = 16384


def node_port():
    """A free port; the nodes talk to each other on the one 10 000 above it."""
    while True:
        port = _free_port("127.0.0.1", 0)
        if port < 55_000:
            with contextlib.suppress(PortInUse):
                _free_port("127.0.0.1", port + 10_000)
                return port


@pytest.fixture(scope="module", params=["bundled", "valkey"])
def nodes(request, tmp_path_factory):
    """Ports of the nodes; the i-th has the i-th third of the slots."""
    binary = SERVERS[request.param] or str(_server_binary())
    ports = [node_port() for _ in range(3)]
    processes = []
    for port in ports:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes", "--save", ""]
        folder = tmp_path_factory.mktemp("node")
        processes.append(subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL))
    clients = [redis.Redis(port=port) for port in ports]
    for position, client in enumerate(clients):
        while True:
            try:
                client.execute_command("CLUSTER ADDSLOTS", *range(SLOTS * position // 3, SLOTS * (position + 1) // 3))
                break
            except redis.ConnectionError:
                time.sleep(0.05)
    for port in ports[1:]:
        clients[0].execute_command("CLUSTER MEET", "127.0.0.1", port)
    while any(client.execute_command("CLUSTER INFO")["cluster_state"] != "ok" for client in clients):
        time.sleep(0.1)
    yield ports
    for process in processes:
        process.kill()
        process.wait()


def owner(ports, run):
    slot = redis.Redis(port=ports[0]).execute_command("CLUSTER KEYSLOT", Keys(run).control)
    return slot * 3 // SLOTS


@pytest.mark.parametrize("run", ["quick-1", "quick-2", "quick-3"])
def test_a_run_lives_on_one_node_whichever_is_asked(nodes, run):
    home = owner(nodes, run)
    urls = [f"redis://127.0.0.1:{port}/0" for port in nodes]

    async def play(url):
        workers = AsyncBuffer(url, run, timeout_seconds=10)
        for _ in range(2):
            await complete(workers)
        await workers.close()

    for url in urls:
        buffer = Buffer(url, run, timeout_seconds=10)
        buffer.open(limits(max_staleness=9, groups_per_batch=2))
        asyncio.run(play(url))
        epoch, version = buffer.begin_epoch(), buffer.version()
        lease = buffer.lease(epoch, version, timeout=5)
        with pytest.raises(WaitTimeout):
            buffer.lease(epoch, version + 1, timeout=0.1)
        buffer.ack(lease, version + 1)
        buffer.checkpointed(epoch, version + 1)
    other = Buffer(urls[(home + 1) % 3], run, timeout_seconds=10)
    stats = buffer.stats()
    buffer.close()
    assert (stats.counters["acked"], stats.version, stats.unaccounted) == (6, 3, 0)
    sizes = [redis.Redis(port=port).keys(f"{Keys(run).prefix}*") for port in nodes]
    assert [bool(keys) for keys in sizes] == [position == home for position in range(3)]
    assert other.delete() > 0
    assert not redis.Redis(port=nodes[home]).keys(f"{Keys(run).prefix}*")
    other.close()
