"""Payload bytes: how they get into Redis and out of it, past the scripts, on whichever instance holds them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from buffer.codec import MAX_PAYLOAD_BYTES, decode, encode
from buffer.errors import BufferUnavailable, FormatError
from buffer.keys import Keys, instance_of
from buffer.limits import LEAST_WEIGHT, MOST_WEIGHT
from buffer.protocol import Member, slices, text
from buffer.requests import Command, Send, Steps
from buffer.trajectory import NOT_SAMPLED, Trajectory

STAGED_SECONDS: Final = 120
"""A payload that was sent but never admitted is gone after this long."""

QUARANTINE_SECONDS: Final = 24 * 3600
"""A payload that could not be decoded is kept this long for inspection."""

FETCH_BYTES = 2 << 20
"""Payload bytes in one reply: the server spends more on each byte of a larger one, and on a slow link it might not
arrive within the timeout of a call."""

_GARBAGE_AT_ONCE: Final = 256

logger = logging.getLogger(__name__)


class Payloads:
    """The payloads of one run."""

    def __init__(self, keys: Keys, instances: int) -> None:
        """Make it.

        Args:
            keys: of the run.
            instances: payload instances besides the control instance; 0 keeps payloads on that.
        """
        self._keys = keys
        self.instances = instances

    def set_commands(self, payloads: Sequence[tuple[str, bytes]]) -> tuple[Command, ...]:
        """Return what stores (name, bytes), until the payload is admitted, for a while only."""
        # NX: repeated after its reply was lost, it must not put a time to live on what was admitted.
        return tuple(("SET", name, payload, "EX", STAGED_SECONDS, "NX") for name, payload in payloads)

    def stage(self, payloads: Sequence[tuple[str, bytes]]) -> Steps[None]:
        """Send (name, bytes) to the payload instances."""
        commands = self.set_commands(payloads)
        for instance, positions in self._by_instance([name for name, _ in payloads]).items():
            yield Send(tuple(commands[position] for position in positions), instance)

    def keep(self, names: Sequence[str]) -> Steps[None]:
        """Keep what was staged on payload instances and is admitted."""
        for instance, positions in self._by_instance(names).items():
            yield Send(tuple(("PERSIST", names[position]) for position in positions), instance)

    def read(self, names: Sequence[str]) -> Steps[list[bytes | None]]:
        """Return the bytes of each; None for one that is gone."""
        if not self.instances:
            [payloads] = yield Send((("MGET", *names),))
            return payloads
        read: list[bytes | None] = [None] * len(names)
        for instance, positions in self._by_instance(names).items():
            [payloads] = yield Send((("MGET", *(names[position] for position in positions)),), instance)
            for position, payload in zip(positions, payloads, strict=True):
                read[position] = payload
        return read

    def fetch(
        self, members: dict[str, tuple[Member, ...]], decoded: dict[str, list[Trajectory]]
    ) -> Steps[dict[str, str]]:
        """Fetch and decode groups into ``decoded``; return what is wrong with those that could not be."""
        flat = [(group, member) for group, of_group in members.items() for member in of_group]
        names = [self._keys.payload(group, member.index, member.nonce) for group, member in flat]
        bad: dict[str, str] = {}
        for part in slices([member.bytes for _, member in flat], FETCH_BYTES):
            payloads = yield from self.read(names[part.start : part.stop])
            for position, payload in zip(part, payloads, strict=True):
                group, member = flat[position]
                try:
                    if payload is None:
                        bad.setdefault(group, "lost")
                        logger.warning("group %s: the payload of member %d is gone; it is lost", group, member.index)
                    else:
                        decoded.setdefault(group, []).append(decode_member(payload, group, member))
                except FormatError as error:
                    bad[group] = "quarantined"
                    logger.warning("group %s is quarantined: %s", group, error)
        for group in bad:
            decoded.pop(group, None)
        return bad

    def quarantine(self, group: str, members: Sequence[Member]) -> Steps[list[str]]:
        """Move the payloads of a damaged group to where people can look at them; return their names there."""
        kept = []
        for member in members:
            name = self._keys.payload(group, member.index, member.nonce)
            kept.append(self._keys.quarantined(group, member.index, member.nonce))
            commands = (("RENAME", name, kept[-1]), ("EXPIRE", kept[-1], QUARANTINE_SECONDS))
            instance = instance_of(name, self.instances) if self.instances else None
            yield Send(commands, instance, may_fail=True)  # it may be missing, or renamed by a call before this one
        return kept

    def collect_garbage(self) -> Steps[None]:
        """Delete payloads on payload instances that the scripts have let go of; what fails is left to the next time."""
        with suppress(BufferUnavailable):
            yield from self._delete_garbage()

    def _delete_garbage(self) -> Steps[None]:
        while self.instances:
            [names] = yield Send((("LRANGE", self._keys.garbage, 0, _GARBAGE_AT_ONCE - 1),))
            found = [text(name) for name in names]
            for instance, positions in self._by_instance(found).items():
                yield Send((("UNLINK", *(found[position] for position in positions)),), instance)
            if found:
                yield Send(tuple(("LREM", self._keys.garbage, 1, name) for name in found))
            if len(found) < _GARBAGE_AT_ONCE:
                return

    def _by_instance(self, names: Sequence[str]) -> dict[int, list[int]]:
        """Positions of ``names`` by the payload instance that holds them."""
        positions: dict[int, list[int]] = {}
        for position, name in enumerate(names):
            positions.setdefault(instance_of(name, self.instances), []).append(position)
        return positions


def encode_member(trajectory: Trajectory, weight: float) -> bytes:
    """Return the payload of a trajectory that may be committed with ``weight``.

    Raises:
        ValueError: it may not; the message says why.
    """
    if trajectory.oldest_version == NOT_SAMPLED or trajectory.index < 0:
        raise ValueError(
            f"trajectory {trajectory.index} of group {trajectory.group} has {int(trajectory.loss_mask.sum())} "
            "sampled tokens; expected an index from 0 and at least one sampled token: abandon the group instead"
        )
    if not (math.isfinite(weight) and LEAST_WEIGHT <= weight <= MOST_WEIGHT):
        raise ValueError(f"weight is {weight}; expected a number from {LEAST_WEIGHT} to {MOST_WEIGHT}: scale it")
    payload = encode(trajectory)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"trajectory {trajectory.index} of group {trajectory.group} has {len(payload)} bytes; expected at most "
            f"{MAX_PAYLOAD_BYTES}: make episodes or metadata shorter"
        )
    return payload


def decode_member(payload: bytes, group: str, member: Member) -> Trajectory:
    """Return the trajectory of a payload, which should be that member.

    Raises:
        FormatError: it is damaged, or something else.
    """
    trajectory = decode(payload)
    if (trajectory.group, trajectory.index) != (group, member.index):
        raise FormatError(
            f"a payload says member {trajectory.index} of group {trajectory.group}, expected member {member.index} of "
            f"group {group}: something else wrote it; discard it"
        )
    return trajectory
