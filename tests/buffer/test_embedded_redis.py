"""The embedded server: reachable by its owner only, and never outliving its driver, however that ends."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from buffer import EmbeddedRedis, PortInUse, ServerError

_ROOT = Path(__file__).parents[2]

_DRIVER = """
import signal, subprocess, sys, time
import redis
from buffer import EmbeddedRedis

server = EmbeddedRedis(sys.argv[1])

def save_and_stop(*_):
    client = redis.Redis.from_url(server.url)
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
    with EmbeddedRedis(tmp_path / "data") as again, redis.Redis.from_url(again.url) as client:
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


def test_data_survive_a_restart(tmp_path):
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        assert client.get("key") == b"value"


def test_it_listens_on_the_loopback_interface_only_and_wants_a_password(server):
    listening = [c.laddr for c in psutil.Process(server.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", server.port)]
    at_once = Retry(NoBackoff(), 0)  # redis-py would try a refused password again, seconds apart
    with redis.Redis(port=server.port, retry=at_once) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


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
    with redis.Redis.from_url(server.url) as client:
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
