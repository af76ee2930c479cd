"""What a learner told the server, in order, and what of it the server has answered.

A server that is killed may come back without its last writes: in an earlier state, never in a torn one. So each change
that a learner makes is an entry with a number, which the server counts and answers, and each call says which entry its
caller knows of. A server that is not as far has forgotten entries: it does nothing but say so, and is told them again.
What a learner reads (``checkpointed`` forgets what it may, ``condemn`` what is bad) is done again anyway and no entry.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

_ENTRIES_KEPT: Final = 256
"""Of some 3 a step; a server forgets about a second."""

type Arguments = tuple[str | int | float, ...]


@dataclass(eq=False)
class Entry:
    """A call of a script that changed something.

    Attributes:
        name: of the script.
        arguments: those after the epoch and the numbers.
        number: that the server gave it; None if no answer came yet, so nobody knows whether it was executed.
    """

    name: str
    arguments: Arguments
    number: int | None


class Journal:
    """The entries of the epoch that this client began, or, in another process of its gang, what it heard of them.

    Safe to share between the threads that lease and ack.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch: int | None = None
        self._beginning: Entry | None = None  # None if another client began the epoch
        self._entries: deque[Entry] = deque()
        self._newest_dropped = -1
        self._known = 0
        self._is_telling = False

    def begin(self, epoch: int, call: Entry) -> None:
        """This client has begun an epoch, with that call."""
        with self._lock:
            self._epoch, self._beginning, self._known = epoch, call, call.number or 0
            self._entries.clear()
            self._newest_dropped = -1

    def keeps(self, epoch: int) -> bool:
        """Whether this client began that epoch, and so keeps its journal."""
        return self._beginning is not None and self._epoch == epoch

    def known(self, epoch: int) -> int:
        """Number of the last entry of ``epoch`` that this client has heard of; 0 if none."""
        return self._known if self._epoch == epoch else 0

    def hear(self, epoch: int, number: int) -> None:
        """The server is at that entry."""
        with self._lock:
            if self._epoch == epoch:
                self._known = max(self._known, number)
            elif self._beginning is None:  # of a gang that has been replaced, there is no journal here to keep
                self._epoch, self._known = epoch, number

    def note(self, epoch: int, name: str, arguments: Arguments, number: int | None = None) -> Entry:
        """Write an entry, or find the one that says the same, if it has got no answer or is of a lease.

        An entry that takes something out of the learner's hands (``ack``, ``release``) is written before it is sent:
        so it stands before the lease that can take the same groups again. Any other is written when it is answered.
        """
        with self._lock:
            for entry in reversed(self._entries):
                if (entry.name, entry.arguments) == (name, arguments) and (entry.number is None or name == "hold"):
                    return entry
            entry = Entry(name, arguments, number)
            if self.keeps(epoch):
                self._entries.append(entry)
                if len(self._entries) > _ENTRIES_KEPT:
                    self._newest_dropped = max(self._newest_dropped, self._entries.popleft().number or 0)
            return entry

    def strike(self, entry: Entry) -> None:
        """The server refused the entry for good."""
        with self._lock:
            if entry in self._entries:
                self._entries.remove(entry)

    def start_telling(self) -> bool:
        """Whether the caller may tell the server again what it forgot: one at a time, or the order is lost."""
        with self._lock:
            is_free, self._is_telling = not self._is_telling, True
            return is_free

    def end_telling(self) -> None:
        """The caller is done, or failed."""
        self._is_telling = False

    def forgotten(self, told: int) -> list[tuple[Entry, int, int]] | None:
        """Entries to tell a server again that is at entry ``told``, in order; None if they are not kept any more.

        Returns:
            Each entry, with the entry that the server must be at before, so that it notices when it forgets again,
            and the one that it is at afterwards: all entries up to that have been told.
        """
        with self._lock:
            assert self._beginning is not None
            if told < self._newest_dropped:
                return None
            known, entries = self._known, [self._beginning, *self._entries]
        entries = [entry for entry in entries if entry.number is None or entry.number > told]
        entries.append(Entry("announce", (-1,), known))  # changes nothing: it says that this was all
        after: list[int] = []
        numbers: list[int] = []
        for entry in reversed(entries):
            after.append(min(numbers, default=known + 1) - 1)
            numbers.append(known if entry.number is None else entry.number)
        after.reverse()
        return list(zip(entries, [told, *after], after, strict=False))
