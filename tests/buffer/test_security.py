"""Who may do what: the limited user, passwords, TLS."""

import re
import shutil
import socket
import subprocess
import time
from contextlib import closing, contextmanager, suppress
from importlib.resources import files

import pytest
import redis
from buffer_examples import complete, limits
from conftest import SERVERS
from every_call import CASES, World, methods
from redis.backoff import NoBackoff
from redis.retry import Retry
from tls import Authority, Front

from buffer import AsyncBuffer, Buffer, BufferError, BufferUnavailable, EmbeddedRedis
from buffer.acl import CLIENT_COMMANDS, SCRIPT_COMMANDS, USER

# --- the limited user ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=SERVERS)
def server_of_a(request, tmp_path_factory):
    """A server whose clients may touch the run ``a`` only."""
    binary = SERVERS[request.param]
    if binary is None and request.param != "bundled":
        pytest.skip(f"this machine has no {request.param} server")
    with EmbeddedRedis(tmp_path_factory.mktemp("redis-of-a"), run="a", binary=binary) as embedded:
        yield embedded


@pytest.fixture
def limited(server_of_a):
    with redis.Redis.from_url(server_of_a.url, retry=Retry(NoBackoff(), 0)) as client:
        yield client


def test_the_commands_of_the_scripts_are_those_that_the_user_may_call():
    called = set()
    for script in (files("buffer") / "scripts").iterdir():
        called |= {name.lower() for name in re.findall(r"redis\.p?call\('(\w+)'", script.read_text())}
        assert not re.findall(r"redis\.p?call\((?!')", script.read_text()), "a command that cannot be seen here"
    assert called == set(SCRIPT_COMMANDS)


def test_the_whole_protocol_is_within_the_rights_of_the_user(server_of_a, payload_servers, call):
    sent = set()
    for kind, payload_instances in ((Buffer, 1), (AsyncBuffer, 0)):
        for case in (case for name in methods(kind) for case in CASES[name]):
            servers = (server_of_a, *payload_servers[:payload_instances])
            with closing(World("a", kind, call, servers, timeout_seconds=5)) as world:
                world.play(case, world.control.script_flush)
                sent |= {name.lower() for proxy in world.proxies for request in proxy.requests for name in request}
                world.beside.delete()
    # The user has no rights that nobody needs, beyond those to connect.
    needed = sent - {"set", "persist", "unlink"}
    assert needed == {name.partition("|")[0] for name in CLIENT_COMMANDS} - {"auth", "hello", "ping", "select"}


def test_a_client_of_another_run_is_told_which_rights_it_lacks(server_of_a, call):
    with closing(Buffer(server_of_a.url, "b", timeout_seconds=5)) as buffer:
        for refused in (lambda: buffer.open(limits()), buffer.version, buffer.stats, buffer.begin_epoch):
            with pytest.raises(BufferError, match=r"not permit a call \(.*permissions.*: give the user the rights"):
                refused()
    workers = AsyncBuffer(server_of_a.url, "b", timeout_seconds=5)
    with pytest.raises(BufferError, match="does not permit a call"):
        call(workers.reserve("worker", timeout=0))
    call(workers.close())


@pytest.mark.parametrize(
    "command",
    [
        *("GET {headrace:b}:control", "SET {headrace:b}:control 1", "HGET {headrace:b}:control version"),
        *("GET other", "SET other 1", "UNLINK other", "EXPIRE other 1", "MGET {headrace:a}:control other"),
        *("RENAME {headrace:a}:control {headrace:b}:control", "BLPOP other 0.01", "LRANGE other 0 -1"),
        *("FLUSHALL", "FLUSHDB", "SWAPDB 0 0", "KEYS *", "RANDOMKEY", "DBSIZE", "MONITOR", "SAVE", "SHUTDOWN NOSAVE"),
        *("CONFIG GET requirepass", "CONFIG SET dir /tmp", "DEBUG SLEEP 0", "MODULE LOAD /tmp/x.so"),
        *("ACL LIST", "ACL SETUSER headrace +@all", "ACL WHOAMI", "CLIENT LIST", "CLIENT KILL TYPE normal"),
        *("SCRIPT FLUSH", "SCRIPT KILL", "REPLICAOF localhost 1", "MIGRATE localhost 1 other 0 1", "SUBSCRIBE x"),
        *(
            "EVAL return+1 0",
            "FCALL x 0",
            "DUMP {headrace:a}:control",
            "OBJECT HELP",
            "COPY {headrace:a}:x {headrace:a}:y",
        ),
    ],
)
def test_the_user_cannot(limited, command):
    with pytest.raises(redis.ResponseError, match=r"(?i)noperm|no permissions|unknown command|not allowed"):
        limited.execute_command(*command.split())


@pytest.mark.parametrize(
    "code",
    [
        "return redis.call('GET', 'other')",
        "return redis.call('SET', '{headrace:b}:control', 1)",
        "return redis.call('FLUSHALL')",
        "return redis.call('CONFIG', 'GET', 'requirepass')",
        "return redis.call('KEYS', '*')",
    ],
)
def test_a_script_of_the_user_cannot_either(limited, code):
    digest = limited.script_load(code)
    with pytest.raises(
        redis.ResponseError, match=r"(?i)can't run this command|can't access|no permission|NOPERM|not allowed"
    ):
        limited.evalsha(digest, 1, "{headrace:a}:control")


def test_the_user_without_a_password_is_nobody(server_of_a):
    for credentials in ("", f"{USER}:@", f"{USER}:wrong@", "default:@", "nobody:x@"):
        url = f"redis://{credentials}127.0.0.1:{server_of_a.port}"
        with closing(Buffer(url, "a", timeout_seconds=1)) as buffer, pytest.raises(BufferUnavailable, match="refused"):
            buffer.version()


# --- TLS -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("this machine has no openssl to make certificates with")
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@contextmanager
def server_with_tls(authority, folder):
    """The URL of an installed Redis that speaks TLS itself."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    binary = SERVERS["installed"] or pytest.skip("this machine has no installed server")
    files = {"tls-cert-file": authority.certificate, "tls-key-file": authority.key, "tls-ca-cert-file": authority.ca}
    lines = [f"port 0\ntls-port {port}\ntls-auth-clients no\nrequirepass word\ndir {folder}\nsave ''\n"]
    (folder / "tls.conf").write_text("".join(lines + [f"{name} {path}\n" for name, path in files.items()]))
    process = subprocess.Popen([binary, folder / "tls.conf"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            if process.poll() is not None:
                pytest.skip("the installed server speaks no TLS")
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.01)
        yield f"rediss://:word@127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["front", "server"])
def tls_url(request, authority, tmp_path):
    """The URL of a server behind a front that ends TLS, and of one that speaks TLS itself."""
    if request.param == "server":
        with server_with_tls(authority, tmp_path) as url:
            yield url
    else:
        with EmbeddedRedis(tmp_path) as embedded, closing(Front(embedded.port, authority)) as front:
            yield embedded.url.replace("redis://", "rediss://").replace(f":{embedded.port}/", f":{front.port}/")


def test_tls_settings_in_the_url_are_used(tls_url, authority, call):
    url = f"{tls_url}?ssl_ca_certs={authority.ca}"
    with closing(Buffer(url, "x", timeout_seconds=5, payload_urls=[url])) as buffer:
        buffer.open(limits(groups_per_batch=1))
        epoch = buffer.begin_epoch()
        workers = AsyncBuffer(url, "x", timeout_seconds=5, payload_urls=[url])
        slot = call(complete(workers, tokens=100_000))  # many TLS records
        assert buffer.lease(epoch, 0, timeout=0).group_ids == [slot.group]
        call(workers.close())


@pytest.mark.parametrize("trusting", ["", "?ssl_ca_certs={stranger}"], ids=["default", "stranger"])
def test_a_server_whose_certificate_is_not_trusted_is_refused_in_one_line(tls_url, call, tmp_path, trusting):
    url = tls_url + trusting.format(stranger=Authority(tmp_path / "stranger").ca if trusting else "")
    workers = AsyncBuffer(url, "x", timeout_seconds=5)
    with closing(Buffer(url, "x", timeout_seconds=5)) as buffer:
        for refused in (buffer.version, lambda: call(workers.version())):
            with pytest.raises(BufferUnavailable, match=r"127\.0\.0\.1:\d+ .*certificate verify failed") as failure:
                refused()
            assert "\n" not in str(failure.value)
    call(workers.close())


def test_a_server_with_tls_is_not_spoken_to_without(tls_url):
    url = tls_url.replace("rediss://", "redis://")
    with closing(Buffer(url, "x", timeout_seconds=1)) as buffer, pytest.raises(BufferUnavailable):
        buffer.version()
