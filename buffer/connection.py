"""Connections to Redis: run a script by its digest after some commands, and send commands.

Each kind of class comes twice with the same methods, once blocking and once for asyncio; what can be shared is above
them. In a Redis Cluster a run has one slot, so a connection follows it to the node that has it.

Retries are redis-py's, three of them with jittered backoff, on a broken connection or a call that takes longer
than the timeout. That is safe because every call of the protocol is idempotent; it bridges a failing link,
while a server that stays away is reported as ``BufferUnavailable`` and left to the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from buffer.errors import BufferError, BufferFull, BufferUnavailable
from buffer.lua import script
from buffer.requests import Command, Run, Send

_RETRIES = 3
_ASYNC_CONNECTIONS = 16


class Address:
    """Where a Redis is, in words that are safe to print: never the password."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:  # its message may show the password
            raise BufferUnavailable(
                "the Redis URL cannot be read; expected redis://user:password@host:port/db: write the characters "
                ": / ? # @ of a password as %3A %2F %3F %23 %40"
            ) from error
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise BufferUnavailable(
                f"the Redis URL has scheme {parts.scheme!r}; expected redis://host:port, rediss://host:port "
                "or unix:///path: correct buffer.url"
            )
        self.where = parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{port or 6379}"

    @contextmanager
    def named(self) -> Iterator[None]:
        """Turn redis-py's errors into the buffer's, which name the server."""
        try:
            yield
        except (AuthenticationError, AuthorizationError) as error:
            raise BufferUnavailable(
                f"Redis at {self.where} refused the user or password ({error}): "
                "correct them in buffer.url (redis://user:password@host:port)"
            ) from error
        except NoPermissionError as error:
            raise BufferError(
                f"Redis at {self.where} does not permit a call ({error}): give the user the rights that "
                "`headrace buffer acl` prints"
            ) from error
        except (redis.ConnectionError, redis.TimeoutError, ClusterDownError, ReadOnlyError, TryAgainError) as error:
            # The last three: a cluster, or a pair of master and replica, is about to put another node in charge.
            remedy = "check ?ssl_ca_certs= of" if "certificate" in str(error) else "start it, or correct"
            raise BufferUnavailable(
                f"no answer from Redis at {self.where} ({type(error).__name__}: {error}): {remedy} buffer.url"
            ) from error
        except ResponseError as error:
            if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in str(error):
                raise BufferFull(
                    f"Redis at {self.where} is at its maxmemory: raise it, or lower buffer.max_bytes well below it"
                ) from error
            needs = ": headrace needs a Redis 6.2 or newer with Lua" if "unknown command" in str(error).lower() else ""
            raise BufferError(f"Redis at {self.where} refused a call ({error}){needs}") from error


def _takes_flags(info: dict[str, Any]) -> bool:
    """Whether a server of this ``INFO`` knows script flags."""
    return int(str(info["redis_version"]).split(".")[0]) >= 7


def _moved(replies: list[Any]) -> MovedError | None:
    """The answer of a cluster's node that does not have the run's slot, if there is one among ``replies``."""
    return next((reply for reply in replies if isinstance(reply, MovedError)), None)


def _at(url: str, node: MovedError) -> str:
    """``url`` with the host and port of another node of its cluster."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    host = f"[{node.host}]" if ":" in node.host else node.host
    return urlunsplit(parts._replace(netloc=f"{user}{at}{host}:{node.port}"))


def _split(replies: list[Any]) -> tuple[list[Any], Any]:
    """Replies of the commands before a script, and that of the script, whose failure is raised."""
    *first, reply = replies
    if isinstance(reply, Exception):
        raise reply
    return first, reply


class _Instance:
    """One Redis, blocking."""

    def __init__(self, url: str, timeout_seconds: float) -> None:
        self._url, self._timeout = url, timeout_seconds
        self.address = Address(url)
        try:
            self._first = self._client = self._connect(url)
            self._first.connection_pool.make_connection()  # which does not connect yet
        except (TypeError, ValueError) as error:
            raise BufferUnavailable(
                f"the URL of Redis at {self.address.where} is not usable ({error}): correct it"
            ) from error
        self._left: list[Any] = []  # clients of other nodes; some thread or task may still be using one

    def send(self, commands: Sequence[Command], *, raise_on_error: bool) -> list[Any]:
        """Send commands in one pipeline; failures are raised or are among the replies."""
        with self.address.named():
            try:
                replies = self._send(self._client, commands)
                if moved := _moved(replies):
                    replies = self._send(self._go_to(self._connect(_at(self._url, moved))), commands)
            except (redis.ConnectionError, redis.TimeoutError):
                self._go_to(self._first)  # the node may be gone; whoever was given first knows where the slot is now
                raise
            for reply in replies:
                if raise_on_error and isinstance(reply, Exception):
                    raise reply
            return replies

    def close(self) -> None:
        """Close the connections."""
        for client in (self._first, self._client, *self._left):
            client.close()

    def _connect(self, url: str) -> redis.Redis:
        return redis.Redis.from_url(
            url,
            socket_timeout=self._timeout,
            socket_connect_timeout=self._timeout,
            retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.5), _RETRIES),
        )

    def _go_to(self, client: redis.Redis) -> redis.Redis:
        """Use ``client`` from now on."""
        if self._client is not self._first:
            self._left.append(self._client)
        self._client = client
        return client

    def _send(self, client: redis.Redis, commands: Sequence[Command]) -> list[Any]:
        if len(commands) == 1:
            try:
                return [client.execute_command(*commands[0])]
            except ResponseError as error:
                return [error]
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return pipeline.execute(raise_on_error=False)


class Connection:
    """Blocking connections to the control instance and the payload instances (pools; safe to share between threads)."""

    def __init__(self, url: str, payload_urls: Sequence[str], control: str, timeout_seconds: float) -> None:
        self._key = control
        self._control = _Instance(url, timeout_seconds)
        self._payloads = [_Instance(each, timeout_seconds) for each in payload_urls]
        self.address = self._control.address
        self._flags: bool | None = None

    def perform(self, request: Run | Send) -> Any:
        """Do what an operation asks for."""
        if isinstance(request, Run):
            return self._run(request)
        instance = self._control if request.instance is None else self._payloads[request.instance]
        return instance.send(request.commands, raise_on_error=not request.may_fail)

    def close(self) -> None:
        """Close the connections."""
        for instance in (self._control, *self._payloads):
            instance.close()

    def _run(self, request: Run) -> tuple[list[Any], Any]:
        if self._flags is None:
            [info] = self._control.send((("INFO", "server"),), raise_on_error=True)
            self._flags = _takes_flags(info)
        code = script(request.name, self._flags)
        commands = (*request.first, ("EVALSHA", code.digest, 1, self._key, *request.arguments))
        replies = self._control.send(commands, raise_on_error=False)
        if isinstance(replies[-1], NoScriptError):
            self._control.send((("SCRIPT LOAD", code.source),), raise_on_error=True)
            replies = self._control.send(commands, raise_on_error=False)
        with self.address.named():
            return _split(replies)


class _AsyncInstance:
    """One Redis, for asyncio."""

    def __init__(self, url: str, timeout_seconds: float) -> None:
        self._url, self._timeout = url, timeout_seconds
        self.address = Address(url)
        try:
            self._first = self._client = self._connect(url)
            self._first.connection_pool.make_connection()  # which does not connect yet
        except (TypeError, ValueError) as error:
            raise BufferUnavailable(
                f"the URL of Redis at {self.address.where} is not usable ({error}): correct it"
            ) from error
        self._left: list[Any] = []  # clients of other nodes; some thread or task may still be using one

    async def send(self, commands: Sequence[Command], *, raise_on_error: bool) -> list[Any]:
        """Send commands in one pipeline; failures are raised or are among the replies."""
        with self.address.named():
            try:
                replies = await self._send(self._client, commands)
                if moved := _moved(replies):
                    replies = await self._send(self._go_to(self._connect(_at(self._url, moved))), commands)
            except (redis.ConnectionError, redis.TimeoutError):
                self._go_to(self._first)  # the node may be gone; whoever was given first knows where the slot is now
                raise
            for reply in replies:
                if raise_on_error and isinstance(reply, Exception):
                    raise reply
            return replies

    async def close(self) -> None:
        """Close the connections."""
        for client in (self._first, self._client, *self._left):
            await client.aclose()

    def _connect(self, url: str) -> redis.asyncio.Redis:
        # Many episodes may commit at once; more connections than this would not make one server faster.
        return redis.asyncio.Redis.from_pool(
            redis.asyncio.BlockingConnectionPool.from_url(
                url,
                max_connections=_ASYNC_CONNECTIONS,
                timeout=self._timeout,
                socket_timeout=self._timeout,
                socket_connect_timeout=self._timeout,
                retry=AsyncRetry(ExponentialWithJitterBackoff(base=0.02, cap=0.5), _RETRIES),
            )
        )

    def _go_to(self, client: redis.asyncio.Redis) -> redis.asyncio.Redis:
        """Use ``client`` from now on."""
        if self._client is not self._first:
            self._left.append(self._client)
        self._client = client
        return client

    async def _send(self, client: redis.asyncio.Redis, commands: Sequence[Command]) -> list[Any]:
        if len(commands) == 1:
            try:
                return [await client.execute_command(*commands[0])]
            except ResponseError as error:
                return [error]
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return await pipeline.execute(raise_on_error=False)


class AsyncConnection:
    """Connections for asyncio (pools; for one event loop)."""

    def __init__(self, url: str, payload_urls: Sequence[str], control: str, timeout_seconds: float) -> None:
        self._key = control
        self._control = _AsyncInstance(url, timeout_seconds)
        self._payloads = [_AsyncInstance(each, timeout_seconds) for each in payload_urls]
        self.address = self._control.address
        self._flags: bool | None = None

    async def perform(self, request: Run | Send) -> Any:
        """Do what an operation asks for."""
        if isinstance(request, Run):
            return await self._run(request)
        instance = self._control if request.instance is None else self._payloads[request.instance]
        return await instance.send(request.commands, raise_on_error=not request.may_fail)

    async def close(self) -> None:
        """Close the connections."""
        for instance in (self._control, *self._payloads):
            await instance.close()

    async def _run(self, request: Run) -> tuple[list[Any], Any]:
        if self._flags is None:
            [info] = await self._control.send((("INFO", "server"),), raise_on_error=True)
            self._flags = _takes_flags(info)
        code = script(request.name, self._flags)
        commands = (*request.first, ("EVALSHA", code.digest, 1, self._key, *request.arguments))
        replies = await self._control.send(commands, raise_on_error=False)
        if isinstance(replies[-1], NoScriptError):
            await self._control.send((("SCRIPT LOAD", code.source),), raise_on_error=True)
            replies = await self._control.send(commands, raise_on_error=False)
        with self.address.named():
            return _split(replies)
