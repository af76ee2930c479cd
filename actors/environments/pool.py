"""A pool of environments of one kind, stepped in threads, each call with a time limit.

An environment is ordinary blocking code of somebody else: it may be slow, hang or raise. Here
it runs off the event loop, in threads that all environments share; a call that hangs costs its
thread and its environment, and nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

import gymnasium

from actors.environments import make
from actors.environments.threads import Call, CallThreads, CallTimeout


class EnvironmentFailure(RuntimeError):
    """The environment raised, or answered with something that is no observation and reward."""


class EnvironmentTimeout(EnvironmentFailure):
    """A call took longer than its limit."""


class EnvironmentPool:
    """Makes environments when needed and keeps them for the next episode."""

    def __init__(
        self, environment_id: str, kwargs: Mapping[str, Any], *, threads: int, step_timeout_seconds: float
    ) -> None:
        """Make one environment, so that a wrong id or wrong arguments fail here and not in every episode.

        Args:
            environment_id: registry id, as ``actors.environments.make`` takes it.
            kwargs: arguments of the environment.
            threads: calls that run at the same time.
            step_timeout_seconds: limit of one call to make, ``reset`` or ``step``; waiting for a thread not counted.

        Raises:
            EnvironmentSetupError: as ``actors.environments.make``.
        """
        self._make = lambda: make(environment_id, kwargs)
        self._idle: list[gymnasium.Env[str, str]] = [self._make()]
        self._timeout_seconds = step_timeout_seconds
        self._threads = CallThreads(threads, timeout_seconds=step_timeout_seconds)

    def session(self) -> Session:
        """An environment for the length of one ``async with`` block."""
        return Session(self)

    def close(self) -> None:
        """Close the idle environments; calls still running are left alone."""
        self._threads.close()
        while self._idle:
            self._idle.pop().close()

    async def _lend(self) -> gymnasium.Env[str, str]:
        return self._idle.pop() if self._idle else await self._call(self._make, _close_result)

    async def _call[T](self, function: Callable[[], T], dispose: Callable[[Call], None]) -> T:
        try:
            call = await self._threads.call(function, dispose)
        except CallTimeout as error:
            raise EnvironmentTimeout(
                f"an environment call took longer than {self._timeout_seconds} s; "
                "raise environment.step_timeout_seconds if it may take that long"
            ) from error
        if isinstance(call.error, EnvironmentFailure):
            raise call.error
        if call.error is not None:
            raise EnvironmentFailure(f"the environment raised {call.error!r}") from call.error
        result: T = call.result
        return result


class Step(NamedTuple):
    """What ``gymnasium.Env.step`` returns."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Session:
    """One environment lent to one episode. An environment whose call failed is closed and not lent again.

    Attributes:
        seconds: time spent waiting for the environment.
    """

    def __init__(self, pool: EnvironmentPool) -> None:
        self._pool = pool
        self._environment: gymnasium.Env[str, str] | None = None
        self.seconds = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._environment is not None:
            self._pool._idle.append(self._environment)

    async def reset(self, seed: int) -> str:
        """Start an episode; returns the first observation.

        Raises:
            EnvironmentTimeout: the call took too long.
            EnvironmentFailure: the environment raised, or its observation is no text.
        """

        def call(environment: gymnasium.Env[str, str]) -> str:
            observation, _ = environment.reset(seed=seed)
            return _text(observation)

        return await self._timed(call)

    async def step(self, action: str) -> Step:
        """Play ``action``.

        Raises:
            EnvironmentTimeout: the call took too long.
            EnvironmentFailure: the environment raised, its observation is no text or its reward no finite number.
        """

        def call(environment: gymnasium.Env[str, str]) -> Step:
            observation, reward, terminated, truncated, info = environment.step(action)
            if not math.isfinite(reward):
                raise EnvironmentFailure(f"the environment gave reward {reward}; expected a finite number")
            return Step(_text(observation), float(reward), bool(terminated), bool(truncated), info)

        return await self._timed(call)

    async def _timed[T](self, function: Callable[[gymnasium.Env[str, str]], T]) -> T:
        started = time.monotonic()
        try:
            environment = self._environment or await self._pool._lend()
            self._environment = None  # lent to the thread: comes back only if the call succeeds
            result = await self._pool._call(lambda: function(environment), lambda _: environment.close())
            self._environment = environment
        finally:
            self.seconds += time.monotonic() - started
        return result


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise EnvironmentFailure(
            f"the environment gave an observation of type {type(observation).__name__}; expected str"
        )
    return observation


def _close_result(call: Call) -> None:
    if call.error is None and call.result is not None:
        call.result.close()
