"""Stopping on request: the first Ctrl-C or SIGTERM asks, the second insists."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether a person or a supervisor has asked this process to stop.

    Attributes:
        requested: set by the first signal.
        exit_status: what the process should return when it stopped because of the signal: 130 or 143; else 0.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.exit_status = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: a second signal interrupts whatever the main thread is doing."""
        again = self.requested.is_set()
        self.exit_status = 128 + number
        self.requested.set()
        if again:
            raise KeyboardInterrupt


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a :class:`StopRequest` for the length of the block.

    Enter it after ``ray.init()``, which installs a SIGTERM handler of its own.
    """
    request = StopRequest()
    before = {number: signal.signal(number, request.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
