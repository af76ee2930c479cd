"""What a learner's client remembers of what it told the server.

A server that is killed may come back without its last writes: in an earlier state, never in a torn one. What it says
then contradicts what is remembered here, and it is told again.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from buffer.lease import Lease
from buffer.protocol import Claim

_ACKS_REMEMBERED = 64


@dataclass
class Memory:
    """The current epoch of this client. Safe to share between the threads that lease and ack.

    Attributes:
        epoch: its number; None before ``begin_epoch``.
        nonce: the name of the call that began it.
        rollback: version that was rolled back to; None if none was.
        announced: newest version announced; None if none was.
        confirmed: acks that the server has confirmed, those of earlier epochs included.
    """

    epoch: int | None = None
    nonce: str = ""
    rollback: int | None = None
    announced: int | None = None
    confirmed: int = 0
    _expected: int = 0
    _held: dict[str, Lease] = field(default_factory=dict)
    _acks: deque[tuple[Lease, int]] = field(default_factory=lambda: deque(maxlen=_ACKS_REMEMBERED))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, epoch: int, nonce: str, acks: int) -> None:
        """A new epoch has begun, on a server that knows of ``acks``."""
        with self._lock:
            self.epoch, self.nonce, self.rollback, self.announced = epoch, nonce, None, None
            self.confirmed = self._expected = acks
            self._held.clear()
            self._acks.clear()

    def hold(self, lease: Lease) -> None:
        """The lease is held from now on."""
        with self._lock:
            self._held[lease.id] = _without_payloads(lease)

    def let_go(self, lease: Lease) -> None:
        """The lease is about to be released."""
        with self._lock:
            self._held.pop(lease.id, None)

    def note_ack(self, lease: Lease, version: int) -> bool:
        """The lease is about to be acked; return whether this client held it, now or before an earlier try."""
        with self._lock:
            if any(lease.id == acked.id for acked, _ in self._acks):
                return True
            if self._held.pop(lease.id, None) is None:
                return False
            self._acks.append((_without_payloads(lease), version))
            self._expected += 1
            return True

    def confirm(self, acks: int) -> bool:
        """The server says how many acks it knows of; return whether those are all."""
        with self._lock:
            self.confirmed = max(self.confirmed, acks)
            return acks >= self._expected

    def settle(self, acks: int) -> None:
        """The server was told everything again and knows of so many acks."""
        with self._lock:
            self.confirmed = self._expected = acks

    def knows_more(self, acks: int, rollback: str, confirmed: int) -> bool:
        """Whether the server has forgotten an ack or the rollback.

        Args:
            acks: those that it knows of.
            rollback: epoch and version of the last rollback that it knows of.
            confirmed: ``confirmed`` as it was before the server was asked.
        """
        return acks < confirmed or (self.rollback is not None and rollback != f"{self.epoch}:{self.rollback}")

    def holds_any(self, claim: Claim) -> bool:
        """Whether the server leases what is held already."""
        with self._lock:
            elsewhere = {group for lease in self._held.values() if lease.id != claim.id for group in lease.batch}
            return not elsewhere.isdisjoint(claim.members)

    def acks(self) -> list[tuple[Lease, int]]:
        """The last acks, with the version of each, the oldest first."""
        with self._lock:
            return list(self._acks)

    def held(self) -> list[Lease]:
        """The leases that are held."""
        with self._lock:
            return list(self._held.values())


def _without_payloads(lease: Lease) -> Lease:
    return replace(lease, groups=[], corrections=np.empty(0))
