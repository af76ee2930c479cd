"""What a learner told the server, in order: against a server that is killed and comes back without its last writes.

Such a server is in an earlier state, never in a torn one. So each change that a learner makes is an entry with a name
of its own, and the server keeps the names of those that it executed. Each call shows entries that its caller has had an
answer to; a server that lacks one of them has forgotten it, does nothing but say so, and is told again what it lacks,
in the order of the journal. An entry is executed once, so two threads may tell at the same time.

``checkpointed`` is no entry, since the next one says it all again; nor is ``condemn``, which the next lease completes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

_ENTRIES_KEPT: Final = 256
"""Of some 3 a step; a server forgets about a second."""

SHOWN: Final = 8
"""Entries that a call shows: more than a client has calls under way at a time, so that none is ever passed over."""

type Arguments = tuple[str | int | float, ...]


@dataclass(frozen=True)
class Entry:
    """A call that changes something.

    Attributes:
        name: of the entry.
        script: that is run.
        arguments: those after the epoch, the known entries and the name.
    """

    name: str
    script: str
    arguments: Arguments


class Journal:
    """The entries of the epoch that this client began, or, in another process of its gang, the last it heard of.

    Safe to share between the threads that lease and ack.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch: int | None = None
        self._is_keeper = False
        self._entries: list[Entry] = []  # the first is the beginning of the epoch
        self._is_cut = False
        self._answered: deque[str] = deque(maxlen=SHOWN)

    def begin(self, epoch: int, beginning: Entry) -> None:
        """This client has begun an epoch."""
        with self._lock:
            self._epoch, self._is_keeper, self._is_cut = epoch, True, False
            self._entries = [beginning]
            self._answered.clear()
            self._answered.append(beginning.name)

    def keeps(self, epoch: int) -> bool:
        """Whether this client began that epoch, and so keeps its journal."""
        return self._is_keeper and self._epoch == epoch

    def known(self, epoch: int) -> str:
        """Names of the last entries of ``epoch`` that were answered, as a call shows them."""
        with self._lock:
            return " ".join(self._answered) if self._epoch == epoch else ""

    def hear(self, epoch: int, name: str) -> None:
        """The server has answered that this entry is executed."""
        with self._lock:
            if self._epoch is None or epoch > self._epoch:  # of a gang in which another process began it
                self._epoch, self._is_keeper, self._entries = epoch, False, []
                self._answered.clear()
            if epoch == self._epoch and name not in self._answered:
                self._answered.append(name)

    def write(self, epoch: int, entry: Entry) -> None:
        """Write an entry down, unless it is there.

        One that takes something out of the learner's hands (``ack``, ``release``) is written before it is sent, so it
        stands before the lease that can take the same groups again. Any other is written when it is answered.
        """
        with self._lock:
            if not self.keeps(epoch) or any(entry.name == other.name for other in self._entries):
                return
            self._entries.append(entry)
            if len(self._entries) > _ENTRIES_KEPT:
                del self._entries[1]
                self._is_cut = True

    def strike(self, name: str) -> None:
        """The entry is not going to be executed."""
        with self._lock:
            if name not in self._answered:
                self._entries = [entry for entry in self._entries if entry.name != name]

    def lacking(self, executed: Set[str]) -> list[Entry] | None:
        """Entries that a server lacks which has executed those; None if there were more than are kept."""
        with self._lock:
            if self._is_cut and self._entries[1].name not in executed:
                return None
            return [entry for entry in self._entries if entry.name not in executed]
