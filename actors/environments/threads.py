"""Threads for the blocking calls of environments, with a time limit on each call.

Different from an executor in two ways. A call that outlives its limit is given up together
with its thread, and another thread takes that one's place: hung environments never use up the
threads. And calls and answers cross between event loop and threads in bulk: an environment that
needs microseconds would otherwise cost more in wake-ups than in steps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)


class CallTimeout(Exception):
    """A call outlived its limit."""


@dataclass(slots=True, eq=False)
class Call:
    """A function for a thread, and what became of it.

    Attributes:
        function: what to run.
        dispose: runs in a thread, with this call, if the function failed or nobody wants its result any more.
        result: what the function returned.
        error: what it raised.
    """

    function: Callable[[], Any]
    dispose: Callable[[Call], None]
    answer: asyncio.Future[None]
    result: Any = None
    error: BaseException | None = None
    ended: bool = False
    given_up: bool = False


@dataclass(slots=True, eq=False)
class _Worker:
    call: Call | None = None
    started: float = 0.0
    lost: bool = False


class CallThreads:
    """Threads that run calls in the order in which they come. All calls come from one event loop."""

    def __init__(self, count: int, *, timeout_seconds: float) -> None:
        """Start threads as calls need them, at most ``count``; hung ones do not count.

        Args:
            count: calls that run at the same time.
            timeout_seconds: limit of one call, from when it starts to run.
        """
        self._count = count
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        # All below belong to whoever holds `_changed`; only `_watch` is the event loop's alone.
        self._waiting: deque[Call] = deque()
        self._ended: list[Call] = []
        self._workers: set[_Worker] = set()
        self._idle = 0  # threads that wait and were not told to wake up
        self._delivering = False
        self._closed = False
        self._watch: asyncio.TimerHandle | None = None

    async def call(self, function: Callable[[], Any], dispose: Callable[[Call], None]) -> Call:
        """Run ``function`` in a thread; returns the call with its result or error.

        Raises:
            CallTimeout: it ran too long; ``dispose`` runs if it ever ends.
        """
        loop = asyncio.get_running_loop()
        call = Call(function, dispose, loop.create_future())
        with self._changed:
            self._submit(call)
        if self._watch is None:
            self._watch = loop.call_later(self._timeout_seconds, self._look_for_hung_calls)
        try:
            await call.answer
        except asyncio.CancelledError:
            with self._changed:
                call.given_up = True
                if call.ended:
                    self._submit(call)  # only to dispose of its result
            raise
        return call

    def close(self) -> None:
        """Let the threads end after what they run or have waiting; does not wait for them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._watch is not None:
            self._watch.cancel()

    def _submit(self, call: Call) -> None:
        self._waiting.append(call)
        if self._idle:
            self._idle -= 1
            self._changed.notify()
        elif len(self._workers) < self._count:
            self._start_thread()

    def _start_thread(self) -> None:
        worker = _Worker()
        self._workers.add(worker)
        # Daemon threads, because an environment that hangs must not keep the process from ending.
        threading.Thread(target=self._run, args=(worker,), name="environment", daemon=True).start()

    def _run(self, worker: _Worker) -> None:
        while (call := self._next(worker)) is not None:
            if not call.given_up:
                try:
                    call.result = call.function()
                except BaseException as error:  # whatever it is, it is the caller's to judge
                    call.error = error
            with self._changed:
                worker.call = None
                call.ended = True
                if not call.given_up:
                    self._deliver_soon(call)
            if call.given_up or call.error is not None:
                try:
                    call.dispose(call)
                except Exception:
                    _log.warning("an environment could not be closed", exc_info=True)

    def _next(self, worker: _Worker) -> Call | None:
        """Wait for the next call; None when the thread is to end."""
        with self._changed:
            while not self._waiting or worker.lost:
                if self._closed or worker.lost:
                    return None
                self._idle += 1
                self._changed.wait()
            worker.call = self._waiting.popleft()
            worker.started = time.monotonic()
            return worker.call

    def _deliver_soon(self, call: Call) -> None:
        self._ended.append(call)
        if not self._delivering:
            self._delivering = True
            call.answer.get_loop().call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._changed:
            ended, self._ended = self._ended, []
            self._delivering = False
        for call in ended:
            if not call.answer.done():
                call.answer.set_result(None)

    def _look_for_hung_calls(self) -> None:
        self._watch = None
        now = time.monotonic()
        next_look = self._timeout_seconds
        hung: list[Call] = []
        with self._changed:
            for worker in list(self._workers):
                if worker.call is None:
                    continue
                remaining = worker.started + self._timeout_seconds - now
                if remaining > 0:
                    next_look = min(next_look, remaining)
                    continue
                worker.call.given_up = worker.lost = True
                hung.append(worker.call)
                self._workers.discard(worker)
                if self._waiting:
                    self._start_thread()
            busy = bool(self._waiting) or any(worker.call for worker in self._workers)
        for call in hung:
            if not call.answer.done():
                call.answer.set_exception(CallTimeout())
        if busy and not self._closed:
            self._watch = asyncio.get_running_loop().call_later(next_look, self._look_for_hung_calls)
