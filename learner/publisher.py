"""Publication of weights, beside the step.

Versions go out in order, one at a time: device → host → every sampler → the buffer. The
buffer learns of a version only after every sampler has acknowledged it, so a slot admitted
at version v is always sampled with v or newer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Protocol

import numpy as np

logger = logging.getLogger(__name__)

_MOST_OUTSTANDING = 2
"""One publication in flight and one that waits for it."""


class BroadcastError(RuntimeError):
    """A sampler did not take a version in time; the message names the sampler."""


class PublicationError(RuntimeError):
    """A version could not be published; the message names the sampler and the attempts made."""


class Broadcast(Protocol):
    """Hands weights to every sampler and waits for their acknowledgements."""

    def __call__(self, version: int, weights: Mapping[str, np.ndarray]) -> None:
        """Return when every sampler serves ``version``; safe to repeat.

        Raises:
            BroadcastError: a sampler did not acknowledge within the deadline; it may be tried again.
        """
        ...


class Publisher:
    """Publishes versions in order in a thread of its own."""

    def __init__(
        self,
        broadcast: Broadcast,
        *,
        attempts: int,
        backoff_seconds: float,
        timeout_seconds: float,
    ) -> None:
        """Make a publisher.

        Args:
            broadcast: reaches the samplers; has a deadline of its own.
            attempts: how often a version is tried before the run fails.
            backoff_seconds: pause after the first failed attempt; doubles with each.
            timeout_seconds: longest wait for one publication, all attempts together.
        """
        self._broadcast = broadcast
        self._attempts, self._backoff, self._timeout = attempts, backoff_seconds, timeout_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._outstanding: deque[tuple[int, Future[None]]] = deque()
        self._closing = threading.Event()
        self._failed: Exception | None = None
        self.seconds = 0.0
        """How long the last finished publication took."""

    def publish(
        self,
        version: int,
        weights: Callable[[], Mapping[str, np.ndarray]],
        *,
        announce: Callable[[], None],
        acknowledge: Callable[[], None],
    ) -> None:
        """Queue a version; waits while two are outstanding.

        Args:
            version: its number.
            weights: brings them to the host, under their Hugging Face names; called beside the step.
            announce: called before any sampler gets the weights: tells the buffer that the number is taken.
            acknowledge: called after every sampler acknowledged: tells the buffer.

        Raises:
            PublicationError: an earlier version failed, or takes too long.
        """
        while self._outstanding and (self._outstanding[0][1].done() or len(self._outstanding) >= _MOST_OUTSTANDING):
            self._finish_oldest()
        self._outstanding.append((version, self._thread.submit(self._run, version, weights, announce, acknowledge)))

    def flush(self) -> None:
        """Wait until everything queued is published.

        Raises:
            PublicationError: a version failed, now or earlier, or takes too long.
        """
        if self._failed is not None:
            raise PublicationError(f"an earlier version was not published: {self._failed}") from self._failed
        while self._outstanding:
            self._finish_oldest()

    def close(self) -> None:
        """Give up what is still queued; the publication in flight ends with its current attempt."""
        self._closing.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _finish_oldest(self) -> None:
        version, future = self._outstanding.popleft()
        try:
            future.result(self._timeout)
        except FutureTimeoutError as error:
            self._failed = error
            if future.done():
                raise
            raise PublicationError(
                f"version {version} is not published after {self._timeout:g} s; the learner waits for the samplers: "
                "are they alive?"
            ) from error
        except Exception as error:
            self._failed = error
            raise

    def _run(
        self,
        version: int,
        bring: Callable[[], Mapping[str, np.ndarray]],
        announce: Callable[[], None],
        acknowledge: Callable[[], None],
    ) -> None:
        start = time.monotonic()
        announce()
        weights = bring()
        for attempt in range(1, self._attempts + 1):
            try:
                self._broadcast(version, weights)
                break
            except BroadcastError as error:
                if attempt == self._attempts or self._closing.is_set():
                    raise PublicationError(
                        f"version {version} could not be published in {attempt} attempts: {error}"
                    ) from error
                logger.warning("version %d, attempt %d of %d: %s", version, attempt, self._attempts, error)
                self._closing.wait(self._backoff * 2 ** (attempt - 1))
        acknowledge()
        self.seconds = time.monotonic() - start
