"""Connections to Redis: run a script by its digest after some commands, and send commands.

Two classes with the same methods, one blocking and one for asyncio; what can be shared is above them.

Retries are redis-py's, three of them with jittered backoff, on a broken connection or a call that takes longer
than the timeout. That is safe because every call of the protocol is idempotent; it bridges a failing link,
while a server that stays away is reported as ``BufferUnavailable`` and left to the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ResponseError,
)
from redis.retry import Retry

from buffer.errors import BufferError, BufferFull, BufferUnavailable
from buffer.lua import Script, script
from buffer.operations import Command, Run, Send

_RETRIES = 3
_ASYNC_CONNECTIONS = 16


class Address:
    """Where a Redis is, in words that are safe to print: never the password."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise BufferUnavailable(
                f"the Redis URL has scheme {parts.scheme!r}; expected redis://host:port, rediss://host:port "
                "or unix:///path: correct buffer.url"
            )
        self.where = parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"

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
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise BufferUnavailable(
                f"no answer from Redis at {self.where} ({type(error).__name__}: {error}): "
                "start it, or correct buffer.url"
            ) from error
        except ResponseError as error:
            if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in str(error):
                raise BufferFull(
                    f"Redis at {self.where} is at its maxmemory: raise it, or lower buffer.max_bytes well below it"
                ) from error
            raise BufferError(
                f"Redis at {self.where} refused a call ({error}): headrace needs a Redis 6.2 or newer with Lua"
            ) from error


def _takes_flags(info: dict[str, Any]) -> bool:
    """Whether a server of this ``INFO`` knows script flags."""
    return int(str(info["redis_version"]).split(".")[0]) >= 7


def _evaluated(code: Script, control: str, request: Run) -> Command:
    return ("EVALSHA", code.digest, 1, control, *request.arguments)


def _split(replies: list[Any]) -> tuple[list[Any], Any]:
    """Replies of the commands before a script, and that of the script, whose failure is raised."""
    *first, reply = replies
    if isinstance(reply, Exception):
        raise reply
    return first, reply


class Connection:
    """Blocking connections to the control instance and the payload instances (pools; safe to share between threads)."""

    def __init__(self, url: str, payload_urls: Sequence[str], control: str, timeout_seconds: float) -> None:
        self._control = control
        self._addresses = [Address(each) for each in (url, *payload_urls)]
        self.address = self._addresses[0]
        self._flags: bool | None = None
        self._clients = [
            redis.Redis.from_url(
                each,
                socket_timeout=timeout_seconds,
                socket_connect_timeout=timeout_seconds,
                retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.5), _RETRIES),
            )
            for each in (url, *payload_urls)
        ]

    def perform(self, request: Run | Send) -> Any:
        """Do what an operation asks for."""
        if isinstance(request, Run):
            with self._addresses[0].named():
                return self._run(request)
        position = 0 if request.instance is None else 1 + request.instance
        with self._addresses[position].named():
            return self._send(self._clients[position], request.commands, raise_on_error=not request.may_fail)

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()

    def _run(self, request: Run) -> tuple[list[Any], Any]:
        client = self._clients[0]
        if self._flags is None:
            self._flags = _takes_flags(client.info("server"))
        code = script(request.name, self._flags)
        commands = (*request.first, _evaluated(code, self._control, request))
        try:
            return _split(self._send(client, commands, raise_on_error=False))
        except NoScriptError:
            client.script_load(code.source)
            return _split(self._send(client, commands, raise_on_error=False))

    def _send(self, client: redis.Redis, commands: Sequence[Command], *, raise_on_error: bool) -> list[Any]:
        if len(commands) == 1:
            try:
                return [client.execute_command(*commands[0])]
            except ResponseError as error:
                if raise_on_error:
                    raise
                return [error]
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return pipeline.execute(raise_on_error=raise_on_error)


class AsyncConnection:
    """Connections for asyncio (pools; for one event loop)."""

    def __init__(self, url: str, payload_urls: Sequence[str], control: str, timeout_seconds: float) -> None:
        self._control = control
        self._addresses = [Address(each) for each in (url, *payload_urls)]
        self.address = self._addresses[0]
        self._flags: bool | None = None
        # Many episodes may commit at once; more connections than this would not make one server faster.
        self._clients = [
            redis.asyncio.Redis.from_pool(
                redis.asyncio.BlockingConnectionPool.from_url(
                    each,
                    max_connections=_ASYNC_CONNECTIONS,
                    timeout=timeout_seconds,
                    socket_timeout=timeout_seconds,
                    socket_connect_timeout=timeout_seconds,
                    retry=AsyncRetry(ExponentialWithJitterBackoff(base=0.02, cap=0.5), _RETRIES),
                )
            )
            for each in (url, *payload_urls)
        ]

    async def perform(self, request: Run | Send) -> Any:
        """Do what an operation asks for."""
        if isinstance(request, Run):
            with self._addresses[0].named():
                return await self._run(request)
        position = 0 if request.instance is None else 1 + request.instance
        with self._addresses[position].named():
            return await self._send(self._clients[position], request.commands, raise_on_error=not request.may_fail)

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            await client.aclose()

    async def _run(self, request: Run) -> tuple[list[Any], Any]:
        client = self._clients[0]
        if self._flags is None:
            self._flags = _takes_flags(await client.info("server"))
        code = script(request.name, self._flags)
        commands = (*request.first, _evaluated(code, self._control, request))
        try:
            return _split(await self._send(client, commands, raise_on_error=False))
        except NoScriptError:
            await client.script_load(code.source)
            return _split(await self._send(client, commands, raise_on_error=False))

    async def _send(
        self, client: redis.asyncio.Redis, commands: Sequence[Command], *, raise_on_error: bool
    ) -> list[Any]:
        if len(commands) == 1:
            try:
                return [await client.execute_command(*commands[0])]
            except ResponseError as error:
                if raise_on_error:
                    raise
                return [error]
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return await pipeline.execute(raise_on_error=raise_on_error)
