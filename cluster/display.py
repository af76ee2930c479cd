"""What a person watches: phases, then the training, on a terminal or as lines of a log.

A display is told what happens and never asks. The three kinds say the same things; which one
serves is decided once, by :func:`open_display`.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Protocol, Self, TextIO

from cluster.telemetry import Snapshot

SUCCESS_WINDOW = 10
"""Steps in the moving success."""


class Display(Protocol):
    """A listener to the progress of a run."""

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase begins, and the one before has ended well; ``total`` units of work if that is known."""
        ...

    def progress(self, done: int, detail: str = "") -> None:
        """``done`` units of the phase are done."""
        ...

    def update(self, snapshot: Snapshot) -> None:
        """The state of the training, which is the phase under way."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line of its own."""
        ...

    def outcome(self, title: str, rows: Mapping[str, str]) -> None:
        """The end: the phase under way is over, and this is what came out."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_display(
    kind: Literal["auto", "rich", "plain", "none"], *, plain_every_seconds: float, stream: TextIO | None = None
) -> Display:
    """The display of that kind on ``stream`` (standard output); ``auto`` asks whether it is a terminal."""
    stream = stream or sys.stdout
    if kind == "auto":
        kind = "rich" if stream.isatty() else "plain"
    match kind:
        case "rich":
            from cluster.live_display import LiveDisplay

            return LiveDisplay(stream)
        case "plain":
            return PlainDisplay(stream, every_seconds=plain_every_seconds)
        case "none":
            return SilentDisplay()


class Pace:
    """How fast a phase goes, and how long it will take.

    Args:
        total: units of work, or None if unknown.
    """

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.started = time.monotonic()
        self.done = 0
        self._marks: deque[tuple[float, int]] = deque(maxlen=30)

    @property
    def elapsed(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - self.started

    def mark(self, done: int) -> None:
        """``done`` units are done now."""
        if not self._marks or done != self.done:
            self._marks.append((time.monotonic(), done))
        self.done = done

    @property
    def remaining(self) -> float | None:
        """Seconds to the end at the recent pace; None as long as that is a guess."""
        if self.total is None or len(self._marks) < 2:
            return None
        (first_time, first), (last_time, last) = self._marks[0], self._marks[-1]
        if last <= first:
            return None
        return max(
            0.0, (self.total - last) * (last_time - first_time) / (last - first) - (time.monotonic() - last_time)
        )


class MovingSuccess:
    """Success over the newest ``SUCCESS_WINDOW`` steps, and its history for a sparkline."""

    def __init__(self) -> None:
        self.history: list[float] = []
        self._window: deque[float] = deque(maxlen=SUCCESS_WINDOW)
        self._step = -1

    def add(self, snapshot: Snapshot) -> None:
        """Take the snapshot's success into account, once per step."""
        step = snapshot.get("step", -1)
        if "success_mean" in snapshot and step != self._step:
            self._step = step
            self._window.append(snapshot["success_mean"])
            self.history.append(sum(self._window) / len(self._window))

    @property
    def value(self) -> float | None:
        """The moving mean; None before the first step."""
        return self.history[-1] if self.history else None


class PlainDisplay:
    """One line per event, and one per interval while something goes on: for logs and pipes.

    Args:
        stream: where the lines go.
        every_seconds: interval between lines of one phase.
    """

    def __init__(self, stream: TextIO, *, every_seconds: float) -> None:
        self._stream = stream
        self._every = every_seconds
        self._started = time.monotonic()
        self._name = ""
        self._pace = Pace(None)
        self._success = MovingSuccess()
        self._printed = 0.0
        self._pending = ""

    def phase(self, name: str, total: int | None = None) -> None:
        """Print that the phase begins."""
        self._flush()
        self._name, self._pace = name, Pace(total)
        self._print(name + (f", {total} in all" if total is not None else ""))

    def progress(self, done: int, detail: str = "") -> None:
        """Print how far the phase is, if the interval has passed or it is complete."""
        self._pace.mark(done)
        of = f"/{self._pace.total}" if self._pace.total is not None else ""
        self._offer(f"{self._name} {done}{of}" + (f"  {detail}" if detail else ""))

    def update(self, snapshot: Snapshot) -> None:
        """Print the state of the training, if the interval has passed or it is complete."""
        self._success.add(snapshot)
        step = snapshot.get("step", 0)
        self._pace.mark(step)
        of = f"/{self._pace.total}" if self._pace.total is not None else ""
        values = [f"{label} {value}" for label, value in describe(snapshot, self._success.value).items()]
        self._offer("  ".join([f"step {step}{of}", *values, f"ETA {clock(self._pace.remaining)}"]))

    def note(self, text: str) -> None:
        """Print the text."""
        self._flush()
        self._print(text)

    def outcome(self, title: str, rows: Mapping[str, str]) -> None:
        """Print the title and one line per row."""
        self._flush()
        self._print(title)
        width = max((len(name) for name in rows), default=0)
        for name, value in rows.items():
            self._stream.write(f"    {name:<{width}}  {value}\n")
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flush()

    def _offer(self, line: str) -> None:
        """Print the line now or keep it, so that the last one of a phase is never lost."""
        self._pending = line
        if self._pace.done == self._pace.total or time.monotonic() - self._printed >= self._every:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._print(self._pending)

    def _print(self, text: str) -> None:
        self._pending, self._printed = "", time.monotonic()
        self._stream.write(f"[{clock(time.monotonic() - self._started)}] {text}\n")
        self._stream.flush()


class SilentDisplay:
    """Shows nothing."""

    def phase(self, name: str, total: int | None = None) -> None:
        """Nothing."""

    def progress(self, done: int, detail: str = "") -> None:
        """Nothing."""

    def update(self, snapshot: Snapshot) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def outcome(self, title: str, rows: Mapping[str, str]) -> None:
        """Nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def describe(snapshot: Snapshot, success: float | None) -> dict[str, str]:
    """The snapshot in words: label → value, in the order shown, without what is not known."""
    shown: dict[str, str] = {}
    if "version" in snapshot:
        shown["version"] = str(snapshot["version"])
    if success is not None:
        shown["success"] = f"{success:.0%}"
    if "reward_mean" in snapshot:
        shown["reward"] = f"{snapshot['reward_mean']:.2f}"
    if "staleness_mean" in snapshot and "staleness_max" in snapshot:
        shown["staleness"] = f"{snapshot['staleness_mean']:.1f} (max {snapshot['staleness_max']})"
    if "learner_idle_fraction" in snapshot:
        shown["idle"] = f"{snapshot['learner_idle_fraction']:.0%}"
    if "sampler_tokens_per_second" in snapshot:
        shown["tokens/s"] = f"{snapshot['sampler_tokens_per_second']:,.0f}"
    if "samplers_serving" in snapshot and "samplers_wanted" in snapshot:
        shown["samplers"] = f"{snapshot['samplers_serving']}/{snapshot['samplers_wanted']}"
    if "episodes_per_second" in snapshot:
        shown["episodes/s"] = f"{snapshot['episodes_per_second']:.1f}"
    return shown


def clock(seconds: float | None) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``; ``–`` for None."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
