"""The embedded server: reachable by its owner only, and never outliving its driver, however that ends."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import redis
from buffer_examples import limits, trajectory
from conftest import MOST_SLOW, SERVERS
from redis.backoff import NoBackoff
from redis.retry import Retry

from buffer import Buffer, BufferUnavailable, EmbeddedRedis, PortInUse, ServerError
from buffer.guard import LEAST_SECONDS, MOST_RESTARTS

_ROOT = Path(__file__).parents[2]

AT_ONCE = Retry(NoBackoff(), 0)
"""redis-py would try again, seconds apart."""

_DRIVER = """
import signal, subprocess, sys, time
import redis
from buffer import EmbeddedRedis

server = EmbeddedRedis(sys.argv[1])

def save_and_stop(*_):
    client = redis.Redis.from_url(server.admin_url)
    client.set("saved", 1)
    server.stop()
    print("saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGINT, lambda *_: None)
signal.signal(signal.SIGTERM, save_and_stop)
# A child of the driver that inherits whatever can be inherited, and stays.
child = subprocess.Popen(["sleep", "60"], close_fds=False)
print(server.pid, child.pid, flush=True)
while True:
    time.sleep(0.05)  # short: a signal taken by another thread does not interrupt the main thread's sleep
"""


@pytest.fixture
def driver(tmp_path):
    """A driver process that runs a server; yields (driver, its server, its child)."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_DRIVER), str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        start_new_session=True,
    )
    pids = process.stdout.readline().split()
    server, child = (psutil.Process(int(pid)) for pid in pids)
    yield psutil.Process(process.pid), server, child, process
    for left in (process, child, server):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    process.communicate()


def ended(process, seconds=20):
    return not psutil.wait_procs([process], timeout=seconds)[1]


def test_kill_9_of_the_driver_stops_the_server(driver):
    process, server, _, popen = driver
    guard = server.parent()
    process.kill()
    popen.wait()
    assert ended(server)
    assert ended(guard)


def test_signals_to_the_drivers_process_tree_leave_the_server_alive_until_the_driver_stops_it(driver, tmp_path):
    process, server, _, popen = driver
    tree = [process, *process.children(recursive=True)]
    assert server not in tree
    for member in reversed(tree):
        member.send_signal(signal.SIGTERM)
    output, _ = popen.communicate(timeout=30)
    assert output.split() == ["saved"]
    assert ended(server)
    with EmbeddedRedis(tmp_path / "data") as again, redis.Redis.from_url(again.admin_url) as client:
        assert client.get("saved") == b"1"


def test_signals_to_the_drivers_group_leave_the_server_alive(driver):
    process, server, _, popen = driver
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = popen.communicate(timeout=30)
    assert output.split() == ["saved"]
    assert ended(server)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_kill_9_of_the_guard_stops_the_server(driver):
    _, server, _, _ = driver
    server.parent().kill()
    assert ended(server)


# --- its death -------------------------------------------------------------------------------------------------


def kill(server):
    """Kill the server when it is no longer at its start; return its process."""
    time.sleep(LEAST_SECONDS + 0.1)
    process = psutil.Process(server.pid)
    process.kill()
    return process


def answers(server, seconds=20):
    """Return whether the server answers within that time."""
    deadline = time.monotonic() + seconds
    with redis.Redis.from_url(server.admin_url, retry=AT_ONCE) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(redis.ConnectionError):
                return client.ping()
            time.sleep(0.01)
    return False


@pytest.mark.parametrize("own_server", SERVERS, indirect=True)
def test_a_killed_server_is_started_again_with_its_data_and_clients_go_on(own_server):
    with closing(Buffer(own_server.url, "x", timeout_seconds=5)) as buffer:
        buffer.open(limits(groups_per_batch=1))
        epoch = buffer.begin_epoch()
        slot = buffer.reserve("worker", timeout=0)
        buffer.commit(*(trajectory(slot.group, index) for index in range(2)))
        killed, port = kill(own_server), own_server.port
        assert ended(killed)
        assert answers(own_server)
        assert own_server.pid != killed.pid
        assert listening(own_server) == [("127.0.0.1", port)]
        assert buffer.lease(epoch, 0, timeout=0).group_ids == [slot.group]


@pytest.mark.slow
def test_a_server_that_keeps_ending_is_left_alone_after_some_restarts(tmp_path):
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.admin_url) as client:
        pids = []
        for number in range(MOST_RESTARTS):
            client.rpush("kills", number)
            pids.append(kill(server).pid)
            assert answers(server)
            assert client.llen("kills") == number + 1
        assert len({*pids, server.pid}) == MOST_RESTARTS + 1
        guard = psutil.Process(server.pid).parent()
        assert ended(kill(server))
        assert ended(guard)
        assert not answers(server, seconds=0.1)
        with closing(Buffer(server.url, "x", timeout_seconds=1)) as buffer, pytest.raises(BufferUnavailable):
            buffer.version()
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.admin_url) as client:
        assert client.llen("kills") == MOST_RESTARTS


@pytest.mark.parametrize("own_server", MOST_SLOW, indirect=True)
def test_a_server_that_somebody_stops_stays_stopped(own_server):
    process = psutil.Process(own_server.pid)
    guard = process.parent()
    process.terminate()
    assert ended(process)
    assert ended(guard)
    assert not answers(own_server, seconds=0.1)
    own_server.stop()


def test_stopping_a_server_that_is_being_started_again_stops_it(tmp_path):
    with EmbeddedRedis(tmp_path) as server:
        guard = psutil.Process(server.pid).parent()
        kill(server)
    assert ended(guard)
    assert not answers(server, seconds=0.1)


# --- its data --------------------------------------------------------------------------------------------------


def test_data_survive_a_restart(tmp_path):
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.admin_url) as client:
        client.set("key", "value")
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.admin_url) as client:
        assert client.get("key") == b"value"


# --- who reaches it --------------------------------------------------------------------------------------------


def listening(server):
    connections = psutil.Process(server.pid).net_connections()
    return [(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN]


@pytest.fixture
def other_address():
    """An address of this machine that other machines may know."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return each.address
    pytest.skip("this machine has the loopback interface only")


def test_it_listens_on_the_loopback_interface_only_and_wants_a_password(server):
    assert listening(server) == [("127.0.0.1", server.port)]
    with redis.Redis(port=server.port, retry=AT_ONCE) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_it_is_unreachable_by_another_address_of_the_machine(server, other_address):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other_address, server.port), timeout=5)


def test_it_listens_on_another_address_if_asked_and_there_only(tmp_path, other_address):
    with EmbeddedRedis(tmp_path, host=other_address) as server:
        assert listening(server) == [(other_address, server.port)]
        for url in (server.url, server.admin_url):
            assert f"@{other_address}:{server.port}/" in url
            with redis.Redis.from_url(url) as client:
                assert client.ping()
        nobody = redis.Redis(host=other_address, port=server.port, retry=AT_ONCE)
        with nobody, pytest.raises(redis.AuthenticationError):
            nobody.ping()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused_before_anything_starts(tmp_path, host):
    with pytest.raises(PortInUse, match=f"on {host} is not available"):
        EmbeddedRedis(tmp_path / "data", host=host)
    assert not (tmp_path / "data").exists()


def test_the_password_is_only_where_its_owner_alone_can_read_it(server):
    password = server.url.split(":")[2].split("@")[0]
    process = psutil.Process(server.pid)
    for arguments in (process.cmdline(), process.parent().cmdline()):
        assert password not in " ".join(arguments)
    assert password not in repr(server)
    holding = [path for path in server.folder.iterdir() if path.is_file() and password in path.read_text("latin-1")]
    assert [path.name for path in holding] == ["redis.conf"]
    assert stat.S_IMODE(holding[0].stat().st_mode) == 0o600


def test_a_full_store_refuses_rather_than_evicts(server):
    with redis.Redis.from_url(server.admin_url) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("append*")["appendfsync"] == "everysec"


def test_an_occupied_port_is_refused_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is not available"):
            EmbeddedRedis(tmp_path / "data", port=port)
    assert not (tmp_path / "data").exists()


def test_a_given_port_is_used(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with EmbeddedRedis(tmp_path, port=port) as server:
        assert f":{port}/" in server.url


def test_a_server_that_cannot_start_says_why(tmp_path):
    (tmp_path / "appendonly.aof").write_text("this is no log of Redis")
    with pytest.raises(ServerError, match=r"did not start on port \d+: .*(Bad file format|log:)"):
        EmbeddedRedis(tmp_path)


def test_stopping_twice_is_stopping_once(tmp_path):
    server = EmbeddedRedis(tmp_path / 'a "quoted" folder')
    process = psutil.Process(server.pid)
    server.stop()
    server.stop()
    assert ended(process, seconds=0)


@pytest.mark.slow
def test_a_folder_in_use_by_another_server_is_refused(tmp_path):
    with EmbeddedRedis(tmp_path), pytest.raises(ServerError, match="another Redis uses"):
        EmbeddedRedis(tmp_path)
