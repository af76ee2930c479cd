"""What a rollout worker counts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from buffer.trajectory import Status, Trajectory

RATE_SECONDS = 20.0
"""Window of the rates."""


class Tally:
    """Counters since the start, and rates over the last seconds.

    Attributes:
        commits: answers of the buffer to commits.
        abandoned: groups abandoned, by reason.
        waiting_for: what the buffer says the last reservation waits for; None when it did not wait.
    """

    def __init__(self) -> None:
        self.commits: Counter[str] = Counter()
        self.abandoned: Counter[str] = Counter()
        self.waiting_for: str | None = None
        self._episodes: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._last_error: str | None = None
        self._running = 0
        self._tokens_sampled = 0
        self._started = time.monotonic()
        self._recent: deque[tuple[float, int]] = deque()  # (when, tokens sampled) of episodes in the window

    @contextmanager
    def running_episode(self) -> Iterator[None]:
        """Count an episode as running inside, and as cancelled if that ends it."""
        self._running += 1
        try:
            yield
        except asyncio.CancelledError:
            self._episodes[Status.CANCELLED] += 1
            raise
        finally:
            self._running -= 1

    def add(self, trajectory: Trajectory) -> None:
        """Count a finished episode."""
        tokens = int(trajectory.loss_mask.sum())
        self._episodes[trajectory.status] += 1
        self._tokens_sampled += tokens
        self._recent.append((time.monotonic(), tokens))
        self._forget()
        if "error" in trajectory.metadata:
            self.fail(trajectory.status, trajectory.metadata["error"])

    def fail(self, kind: str, error: str) -> None:
        """Count an error and keep the last one's text."""
        self._errors[kind] += 1
        self._last_error = error

    def snapshot(self) -> dict[str, Any]:
        """All counters as plain data."""
        self._forget()
        seconds = max(min(time.monotonic() - self._started, RATE_SECONDS), 1e-3)
        return {
            "running": self._running,
            "episodes": _plain(self._episodes),
            "episodes_per_second": len(self._recent) / seconds,
            "tokens_sampled": self._tokens_sampled,
            "tokens_per_second": sum(tokens for _, tokens in self._recent) / seconds,
            "commits": _plain(self.commits),
            "abandoned": _plain(self.abandoned),
            "errors": _plain(self._errors),
            "last_error": self._last_error,
            "waiting_for": self.waiting_for,
        }

    def _forget(self) -> None:
        oldest = time.monotonic() - RATE_SECONDS
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()


def _plain(counts: Counter[str]) -> dict[str, int]:
    return {str(name): count for name, count in counts.items()}
