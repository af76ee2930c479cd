"""``Buffer``: the blocking client, for the learner, the supervisor and the command line.

The learner's part of the protocol, in the order that keeps staleness right::

    epoch = buffer.begin_epoch()
    lease = buffer.lease(epoch, version, timeout=...)   # version = the one the batch is going to be trained with
    ...train, publish the weights as version + 1, wait until the samplers hold them...
    buffer.ack(lease, version + 1)                      # consumes the groups and frees their slots

A slot freed by that ack is sampled with the new weights, whatever else is in flight.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from buffer.codec import decode
from buffer.connection import Connection
from buffer.errors import FormatError, WaitTimeout
from buffer.lease import Lease
from buffer.protocol import (
    QUARANTINE_SECONDS,
    Keys,
    Limits,
    Stats,
    not_open,
    open_arguments,
    parse,
    parse_batch,
    parse_stats,
    slices,
)
from buffer.trajectory import Trajectory

_FETCH_BYTES = 16 << 20
"""Payload bytes in one reply: on a slow link a larger one might not arrive within the timeout of a call."""

logger = logging.getLogger(__name__)


class Buffer:
    """A run's buffer, seen by those who may block. Safe to share between threads.

    Every method may raise ``BufferUnavailable`` (no answer from Redis, after three retries of ``timeout_seconds``
    each) and, ``open`` excepted, ``NotOpen``. Every method may be called again after an error.
    """

    def __init__(self, url: str, run: str, *, timeout_seconds: float) -> None:
        """Make a client; nothing is connected yet.

        Args:
            url: ``redis://``, ``rediss://`` or ``unix://`` URL, with the password if there is one.
            run: name of the run.
            timeout_seconds: how long one call to Redis may take.
        """
        self._keys = Keys(run)
        self._connection = Connection(url, self._keys, timeout_seconds)

    def open(self, limits: Limits) -> None:
        """Create the run's control state, or take it up again, and put ``limits`` into force.

        Raises:
            FormatError: the state was written by a version of headrace with another layout.
        """
        self._run("open", *open_arguments(limits))

    def version(self) -> int:
        """Return the current policy version."""
        return self._field("version")

    def announced(self) -> int:
        """Return the newest version under which weights may have been handed out; -1 before the first."""
        return self._field("announced")

    def stats(self) -> Stats:
        """Return what is in the buffer; its numbers are from one moment, so they add up."""
        return parse_stats(self._run("stats")[1])

    def begin_epoch(self) -> int:
        """Start a new epoch of the learner gang: fence off the old one, and redeliver what it still held."""
        return int(self._run("begin_epoch")[1][0])

    def lease(self, epoch: int, version: int, timeout: float) -> Lease:
        """Return the oldest ``groups_per_batch`` complete groups, none of them too old for ``version``.

        The same (epoch, version) again returns the same batch. What is too stale is evicted, and what is
        damaged or missing is taken out, counted and made up for.

        Args:
            epoch: from ``begin_epoch``.
            version: policy version that the batch is going to be trained with.
            timeout: seconds to wait for a whole batch; 0 looks once.

        Raises:
            WaitTimeout: there was no whole batch in time.
            Fenced: a newer epoch has begun.
        """
        start = time.monotonic()
        decoded: dict[str, list[Trajectory]] = {}
        while True:
            sizes = self._claim(epoch, version, start, timeout)
            condemned = self._fetch({group: sizes[group] for group in sizes if group not in decoded}, decoded)
            if not condemned:
                return Lease(epoch=epoch, version=version, groups=[decoded[group] for group in sizes])
            for group, outcome in condemned.items():
                self._run("condemn", epoch, int(version), group, outcome, QUARANTINE_SECONDS)

    def announce(self, epoch: int, version: int) -> None:
        """Say that weights are about to be handed out as ``version``, so that no later epoch reuses the number.

        Raises:
            Fenced: a newer epoch has begun.
        """
        self._run("announce", epoch, int(version))

    def ack(self, lease: Lease, version: int) -> None:
        """Consume ``lease``: its batch was trained on, and the samplers hold the resulting weights as ``version``.

        Raises:
            Fenced: a newer epoch has begun, or the lease was released.
        """
        if version <= lease.version:
            raise ValueError(
                f"version is {version}, but the lease was trained with {lease.version}: "
                "pass the version of the weights that were published after the step"
            )
        self._run("ack", lease.epoch, lease.version, int(version), *lease.group_ids)

    def release(self, lease: Lease) -> None:
        """Give ``lease`` back untrained; its groups are ready again, in their old places.

        Raises:
            Fenced: a newer epoch has begun.
        """
        self._run("release", lease.epoch, lease.version)

    def advance(self, epoch: int, version: int) -> None:
        """Raise the policy version without a batch: for a publication after a restart. It never goes back.

        Raises:
            Fenced: a newer epoch has begun.
        """
        self._run("advance", epoch, int(version))

    def reclaim(self) -> int:
        """Expire every open slot now and return how many there were: for who knows that their workers are gone."""
        total = 0
        while count := int(self._run("reclaim")[1][0]):
            total += count
        return total

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()

    def _field(self, name: str) -> int:
        value = self._connection.field(name)
        if value is None:
            raise not_open(self._keys, self._connection.where)
        return int(value)

    def _run(self, name: str, *arguments: str | int) -> tuple[str, list[Any]]:
        return parse(self._connection.run(name, *arguments), self._keys, self._connection.where)

    def _claim(self, epoch: int, version: int, start: float, timeout: float) -> dict[str, list[int]]:
        """Wait until the server leases a whole batch; return the bytes of its members by group."""
        while True:
            answer, rest = self._run("lease", epoch, int(version))
            if answer == "ok":
                return parse_batch(rest)
            if answer == "again":
                continue
            remaining = start + timeout - time.monotonic()
            if remaining <= 0:
                stats = self.stats()
                raise WaitTimeout(
                    f"no batch of {stats.limits.groups_per_batch} complete groups for version {version} after "
                    f"{timeout:g} s; the learner waits for the rollout workers: {stats}"
                )
            self._connection.wait("ready", remaining)

    def _fetch(self, sizes: dict[str, list[int]], decoded: dict[str, list[Trajectory]]) -> dict[str, str]:
        """Fetch and decode groups into ``decoded``; return what is wrong with those that could not be."""
        members = [(group, index) for group, of_group in sizes.items() for index in range(len(of_group))]
        condemned: dict[str, str] = {}
        for part in slices([size for of_group in sizes.values() for size in of_group], _FETCH_BYTES):
            payloads = self._connection.fetch([self._keys.payload(*members[position]) for position in part])
            for position, payload in zip(part, payloads, strict=True):
                group, index = members[position]
                try:
                    if payload is None:
                        condemned.setdefault(group, "lost")
                        logger.warning("group %s: the payload of member %d is gone; the group is lost", group, index)
                    else:
                        decoded.setdefault(group, []).append(_decode_member(payload, group, index))
                except FormatError as error:
                    condemned[group] = "quarantined"
                    logger.warning("group %s is quarantined: %s", group, error)
        for group in condemned:
            decoded.pop(group, None)
        return condemned


def _decode_member(payload: bytes, group: str, index: int) -> Trajectory:
    trajectory = decode(payload)
    if (trajectory.group, trajectory.index) != (group, index):
        raise FormatError(
            f"a payload says member {trajectory.index} of group {trajectory.group}, expected member {index} of "
            f"group {group}: something else wrote it; discard it"
        )
    return trajectory
