"""What an operation asks of Redis, one request at a time; see ``buffer.connection`` for who carries it out."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

type Command = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Run a script on the control instance, after some commands in the same pipeline.

    The reply is ``(replies of the commands, reply of the script)``; that of a failed command is its exception.
    """

    name: str
    arguments: tuple[str | int | float, ...] = ()
    first: tuple[Command, ...] = ()


@dataclass(frozen=True, slots=True)
class Send:
    """Send commands in one pipeline; the reply is the list of their replies, the first failure is raised."""

    commands: tuple[Command, ...]
    instance: int | None = None
    """Payload instance; None is the control instance."""
    may_fail: bool = False
    """Failures are returned rather than raised."""


type Steps[T] = Generator[Run | Send, Any, T]
"""An operation under way: yields requests, receives replies or the errors of the buffer, returns a T."""
