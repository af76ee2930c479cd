"""A crew: the processes of one measurement, and what they saw.

All of them are up before the first one begins. They begin together and work until the window closes, which is given
in ``time.monotonic()``, a clock that the processes of a machine share; what they do before it opens is the warm-up.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple, Protocol, Self

PATIENCE_SECONDS = 0.2
"""Who can only wait looks at the clock this often."""

START_SECONDS = 120.0
"""Every process must be up after this long."""

REPORT_SECONDS = 60.0
"""Every process must have reported this long after the window closed."""


PROCESSES = multiprocessing.get_context("forkserver")
"""How processes are made: by fork from one that has imported what they need and done nothing yet."""

PROCESSES.set_forkserver_preload(["benchmarks.contenders"])


class BenchmarkError(RuntimeError):
    """A measurement that went wrong."""


class Window(NamedTuple):
    """When to measure, in ``time.monotonic()``."""

    opens: float
    closes: float


class Call(NamedTuple):
    """One call that moved something."""

    seconds: float
    trajectories: int


@dataclass(slots=True)
class Tally:
    """The calls of one process: when each ended, how long it took, how many trajectories it moved."""

    ends: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    trajectories: list[int] = field(default_factory=list)


class Contender(Protocol):
    """One way to bring trajectories from several writers to a reader.

    Each method runs in a process of its own and never ends by itself. It yields every call that moved something, and
    None whenever it waited in vain for about ``PATIENCE_SECONDS``.
    """

    def writes(self, writer: int) -> Iterator[Call | None]:
        """Write as writer number ``writer``, a group at a time, within the bound on what is not yet consumed."""
        ...

    def reads(self) -> Iterator[Call | None]:
        """Read until the trajectories are in memory, and consume them."""
        ...


class Crew(Protocol):
    """Writers and one reader. Entering it waits until all are up, leaving it ends them."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def begin(self, window: Window) -> None:
        """Let all of them begin."""
        ...

    def tallies(self) -> list[Tally]:
        """Wait for the end of the window; return the tallies of the writers, then that of the reader."""
        ...


def work(contender: Contender, writer: int | None, window: Window) -> Tally:
    """Be writer number ``writer``, or the reader, until the window closes."""
    tally = Tally()
    for call in contender.reads() if writer is None else contender.writes(writer):
        now = time.monotonic()
        if now >= window.closes:
            break
        if call is not None:
            tally.ends.append(now)
            tally.seconds.append(call.seconds)
            tally.trajectories.append(call.trajectories)
    return tally


class ProcessCrew:
    """A crew of processes on this machine, made by ``PROCESSES``."""

    def __init__(self, contender: Contender, writers: int) -> None:
        self._contender = contender
        self._roles: list[int | None] = [*range(writers), None]
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._closes = 0.0

    def __enter__(self) -> Self:
        try:
            for role in self._roles:
                ours, theirs = PROCESSES.Pipe()
                process = PROCESSES.Process(target=_serve, args=(theirs, self._contender, role), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self._hear(START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            process.terminate()
            process.join()

    def begin(self, window: Window) -> None:
        """Let all of them begin."""
        self._closes = window.closes
        for pipe in self._pipes:
            pipe.send(window)

    def tallies(self) -> list[Tally]:
        """Wait for the end of the window; return the tallies of the writers, then that of the reader."""
        return self._hear(self._closes + REPORT_SECONDS - time.monotonic())

    def _hear(self, seconds: float) -> list[Tally]:
        """Return what each process says next; "ready" is an empty tally."""
        heard = []
        deadline = time.monotonic() + seconds
        for role, pipe in zip(self._roles, self._pipes, strict=True):
            name = "the reader" if role is None else f"writer {role}"
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise BenchmarkError(f"{name} said nothing for {seconds:.0f} s: the machine may be overloaded")
                answer = pipe.recv()
            except EOFError:
                raise BenchmarkError(f"{name} ended without a word: see what it printed above") from None
            if isinstance(answer, str):
                raise BenchmarkError(f"{name} failed:\n{answer}")
            heard.append(answer)
        return heard


def _serve(pipe: Connection, contender: Contender, role: int | None) -> None:
    """Be one process of a ``ProcessCrew``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the benchmark, which ends its processes
    try:
        pipe.send(Tally())
        window = pipe.recv()
    except (EOFError, OSError):
        return  # the benchmark was stopped
    try:
        pipe.send(work(contender, role, window))
    except Exception:
        pipe.send(traceback.format_exc())
