"""Connections to Redis: run a script by its digest, wait for a wake-up, fetch payloads.

Two classes with the same methods, one blocking and one for asyncio; what can be shared is above them.

Retries are redis-py's, three of them with jittered backoff, on a broken connection or a call that takes longer
than the timeout. That is safe because every call of the protocol is idempotent; it bridges a failing link,
while a server that stays away is reported as ``BufferUnavailable`` and left to the caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoScriptError, OutOfMemoryError, ResponseError
from redis.retry import Retry

from buffer.errors import BufferError, BufferFull, BufferUnavailable
from buffer.protocol import STAGED_SECONDS, Keys, Script, script

_RETRIES = 3
_ASYNC_CONNECTIONS = 16
_LONGEST_BLOCK_SECONDS = 1.0
"""A waiter looks for itself this often, since slots expire without waking anybody."""

Argument = str | int


class Address:
    """Where Redis is, in words that are safe to print: never the password."""

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


def _admitted(results: list[Any]) -> list[Any]:
    """Reply of the script in a commit's pipeline; a failed SET before it matters only if the script missed it."""
    stored, reply = results
    if isinstance(reply, Exception):
        raise reply
    if reply[0] != b"unstaged":
        return reply
    if isinstance(stored, Exception):
        raise stored
    raise BufferFull(
        f"Redis dropped a payload within one call, though it must keep it for {STAGED_SECONDS} s: "
        "run it with maxmemory-policy noeviction"
    )


class Connection:
    """A blocking connection (a small pool; safe to share between threads)."""

    def __init__(self, url: str, keys: Keys, timeout_seconds: float) -> None:
        self._keys = keys
        self._address = Address(url)
        self.where = self._address.where
        self._block_seconds = min(_LONGEST_BLOCK_SECONDS, timeout_seconds / 2)
        self._flags: bool | None = None
        self._redis = redis.Redis.from_url(
            url,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.5), _RETRIES),
        )

    def run(self, name: str, *arguments: Argument) -> list[Any]:
        """Run the script ``name``; return its reply."""
        with self._address.named():
            code = self._script(name)
            try:
                return self._redis.evalsha(code.digest, 1, self._keys.control, *arguments)
            except NoScriptError:
                self._redis.script_load(code.source)
                return self._redis.evalsha(code.digest, 1, self._keys.control, *arguments)

    def field(self, name: str) -> bytes | None:
        """Read one field of the control state."""
        with self._address.named():
            value: Any = self._redis.hget(self._keys.control, name)
            return value

    def wait(self, whom: str, seconds: float) -> None:
        """Block until ``whom`` is woken, for at most ``seconds`` and never for long."""
        with self._address.named():
            self._redis.blpop([self._keys.wake(whom)], max(0.01, min(seconds, self._block_seconds)))

    def fetch(self, names: list[str]) -> list[bytes | None]:
        """Read payloads; None where there is none."""
        with self._address.named():
            payloads: list[Any] = self._redis.mget(names)
            return payloads

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _script(self, name: str) -> Script:
        if self._flags is None:
            self._flags = _takes_flags(self._redis.info("server"))
        return script(name, self._flags)


class AsyncConnection:
    """A connection for asyncio (a small pool; for one event loop)."""

    def __init__(self, url: str, keys: Keys, timeout_seconds: float) -> None:
        self._keys = keys
        self._address = Address(url)
        self.where = self._address.where
        self._block_seconds = min(_LONGEST_BLOCK_SECONDS, timeout_seconds / 2)
        self._flags: bool | None = None
        # Many episodes may commit at once; more connections than this would not make one server faster.
        self._redis = redis.asyncio.Redis.from_pool(
            redis.asyncio.BlockingConnectionPool.from_url(
                url,
                max_connections=_ASYNC_CONNECTIONS,
                timeout=timeout_seconds,
                socket_timeout=timeout_seconds,
                socket_connect_timeout=timeout_seconds,
                retry=AsyncRetry(ExponentialWithJitterBackoff(base=0.02, cap=0.5), _RETRIES),
            )
        )

    async def run(self, name: str, *arguments: Argument) -> list[Any]:
        """Run the script ``name``; return its reply."""
        with self._address.named():
            code = await self._script(name)
            try:
                return await self._redis.evalsha(code.digest, 1, self._keys.control, *arguments)
            except NoScriptError:
                await self._redis.script_load(code.source)
                return await self._redis.evalsha(code.digest, 1, self._keys.control, *arguments)

    async def commit(self, staged: str, payload: bytes, *arguments: Argument) -> list[Any]:
        """Store ``payload`` under ``staged`` and run the script that admits it, in one round trip."""
        with self._address.named():
            code = await self._script("commit")
            try:
                return _admitted(await self._stage(code, staged, payload, arguments))
            except NoScriptError:
                await self._redis.script_load(code.source)
                return _admitted(await self._stage(code, staged, payload, arguments))

    async def wait(self, whom: str, seconds: float) -> None:
        """Wait until ``whom`` is woken, for at most ``seconds`` and never for long."""
        with self._address.named():
            await self._redis.blpop([self._keys.wake(whom)], max(0.01, min(seconds, self._block_seconds)))

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _stage(self, code: Script, staged: str, payload: bytes, arguments: tuple[Argument, ...]) -> list[Any]:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.set(staged, payload, ex=STAGED_SECONDS)
        pipeline.evalsha(code.digest, 2, self._keys.control, staged, *arguments)
        return await pipeline.execute(raise_on_error=False)

    async def _script(self, name: str) -> Script:
        if self._flags is None:
            self._flags = _takes_flags(await self._redis.info("server"))
        return script(name, self._flags)
