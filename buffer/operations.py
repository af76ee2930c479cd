"""The protocol's operations, without input or output: what is asked of Redis, in which order, and what it means.

Each operation is a generator that yields requests and receives their replies, so the blocking and the asyncio client
drive the same code. Every call of a script is idempotent, because a client that lost its connection cannot know whether
the server executed the call.

A server that is killed may come back without its last writes; ``buffer.memory`` is what is remembered against that.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from buffer.codec import MAX_PAYLOAD_BYTES, decode, encode
from buffer.errors import BufferFull, BufferUnavailable, FormatError, WaitTimeout
from buffer.keys import Keys, instance_of
from buffer.lease import Lease
from buffer.limits import LEAST_WEIGHT, MOST_WEIGHT, Limits
from buffer.memory import Memory
from buffer.protocol import (
    CONTROL_FORMAT,
    Claim,
    Commit,
    Failure,
    GroupInfo,
    Member,
    Slot,
    State,
    Stats,
    check_reason,
    not_open,
    parse,
    parse_claim,
    parse_groups,
    parse_slot,
    parse_stats,
    slices,
    text,
)
from buffer.trajectory import NOT_SAMPLED, Trajectory

STAGED_SECONDS: Final = 120
"""A payload that was sent but never admitted is gone after this long."""

QUARANTINE_SECONDS: Final = 24 * 3600
"""A payload that could not be decoded is kept this long for inspection."""

FETCH_BYTES = 2 << 20
"""Payload bytes in one reply: the server spends more on each byte of a larger one, and on a slow link it might not
arrive within the timeout of a call."""

LONGEST_BLOCK_SECONDS = 1.0
"""A waiter looks for itself this often, since slots expire without waking anybody."""

_GARBAGE_AT_ONCE = 256

logger = logging.getLogger(__name__)

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


class Operations:
    """The operations of one client on one run. See ``Buffer`` for what they do."""

    def __init__(self, keys: Keys, where: str, *, payload_instances: int, block_seconds: float) -> None:
        """Make the operations.

        Args:
            keys: of the run.
            where: the control instance, for error messages.
            payload_instances: how many there are besides the control instance; 0 keeps payloads on that.
            block_seconds: longest wait inside Redis.
        """
        self._keys, self._where = keys, where
        self._instances = payload_instances
        self._block_seconds = block_seconds
        self._memory = Memory()
        self._unanswered: list[str] = []  # groups whose reservation may have been admitted although no reply came

    # -- everyone --

    def open(self, limits: Limits) -> Steps[None]:
        """Create the control state, or take it up, and put ``limits`` into force."""
        yield from self._run("open", CONTROL_FORMAT, self._instances, *limits.fields())

    def field(self, name: str) -> Steps[int]:
        """Read one number of the control state."""
        [value] = yield Send((("HGET", self._keys.control, name),))
        if value is None:
            raise not_open(self._keys, self._where)
        return int(value)

    def stats(self) -> Steps[Stats]:
        """Count what there is."""
        _, rest = yield from self._run("stats")
        return parse_stats(rest)

    def groups(self, state: State, most: int) -> Steps[list[GroupInfo]]:
        """Describe groups of one state."""
        if most < 1:
            raise ValueError(f"most is {most}; expected at least 1")
        _, rest = yield from self._run("inspect", str(state), most)
        return parse_groups(state, rest)

    def peek(self, info: GroupInfo, index: int | None) -> Steps[Trajectory]:
        """Read a committed trajectory without leasing its group."""
        member = next((member for member in info.members if index in (None, member.index)), None)
        if member is None:
            there = ", ".join(str(member.index) for member in info.members) or "none"
            raise ValueError(f"index is {index}; group {info.group} has the members {there}: choose one of them")
        [payload] = yield from self._read([self._keys.payload(info.group, member.index, member.nonce)])
        if payload is None:
            raise FormatError(
                f"the payload of member {member.index} of group {info.group} is gone: the group was leased and "
                "trained meanwhile, or is lost; peek at another"
            )
        return _decode_member(payload, info.group, member)

    # -- rollout workers --

    def new_group(self) -> str:
        """Name a group to reserve: one whose reservation got no reply, if there is one, since it may be admitted."""
        return self._unanswered.pop() if self._unanswered else uuid.uuid4().hex

    def reserve(self, group: str, worker: str, deadline: float) -> Steps[Slot | None]:
        """Wait for admission until ``deadline`` by the monotonic clock; None when it passes first."""
        while True:
            try:
                answer, rest = yield from self._run("reserve", group, worker)
            except BufferUnavailable:
                self._unanswered.append(group)
                raise
            if answer == "ok":
                return parse_slot(group, rest)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            yield self._wait("slots", remaining)

    def no_slot(self, worker: str, timeout: float) -> Steps[WaitTimeout]:
        """Make the error of a reservation that was not admitted in time."""
        stats = yield from self.stats()
        return WaitTimeout(
            f"no slot for worker {worker} after {timeout:g} s; it waits for the learner to consume groups, "
            f"and for other workers to complete theirs: {stats}"
        )

    def renew(self, group: str, oldest_version: int | None) -> Steps[bool]:
        """Extend the deadline of a slot."""
        answer, _ = yield from self._run("renew", group, "" if oldest_version is None else int(oldest_version))
        return answer == "ok"

    def commit(self, trajectories: Sequence[Trajectory], weights: Sequence[float]) -> Steps[list[Commit]]:
        """Add trajectories to their groups."""
        if len(weights) != len(trajectories):
            raise ValueError(f"there are {len(weights)} weights of {len(trajectories)} trajectories: pass one of each")
        staged: list[tuple[str, bytes]] = []
        arguments: list[str | int | float] = []
        for trajectory, weight in zip(trajectories, weights, strict=True):
            payload, nonce = _checked_payload(trajectory, weight), secrets.token_hex(8)
            staged.append((self._keys.payload(trajectory.group, int(trajectory.index), nonce), payload))
            arguments += [trajectory.group, int(trajectory.index), nonce, len(payload)]
            arguments += [trajectory.oldest_version, len(trajectory.tokens), float(weight)]
        # NX: repeated after its reply was lost, it must not put a time to live on what was admitted.
        sets = tuple(("SET", name, payload, "EX", STAGED_SECONDS, "NX") for name, payload in staged)
        stored: list[Any] = []
        if self._instances:
            for instance, positions in self._by_instance([name for name, _ in staged]).items():
                yield Send(tuple(sets[position] for position in positions), instance)
            _, reply = yield Run("commit", (self._instances, *arguments))
        else:
            stored, reply = yield Run("commit", (0, *arguments), sets)
        replies = [text(answer).partition(":") for answer in parse(reply, self._keys, self._where)[1]]
        answers = [answer for answer, _, _ in replies]
        if self._instances:
            keep = [
                self._keys.payload(trajectory.group, int(trajectory.index), nonce) if nonce else name
                for trajectory, (name, _), (answer, _, nonce) in zip(trajectories, staged, replies, strict=True)
                if nonce or answer == Commit.ACCEPTED
            ]
            for instance, positions in self._by_instance(keep).items():
                yield Send(tuple(("PERSIST", keep[position]) for position in positions), instance)
        for position, answer in enumerate(answers):
            if answer == "index":
                raise ValueError(
                    f"index is {trajectories[position].index}; expected one below the group size: "
                    "give each member of a group its own"
                )
            if answer == "unstaged":
                raise stored[position] if isinstance(stored[position], Exception) else _evicted()
        return [Commit(answer) for answer in answers]

    def fail(self, group: str, index: int, failures: int, reason: str) -> Steps[Failure]:
        """Report that a member's episode failed."""
        if index < 0:
            raise ValueError(f"index is {index}; expected one from 0 and below the group size")
        answer, _ = yield from self._run("fail", group, int(index), int(failures), check_reason(reason))
        if answer == "index":
            raise ValueError(f"index is {index}; expected one from 0 and below the group size")
        return Failure(answer)

    def abandon(self, group: str, reason: str) -> Steps[bool]:
        """Give up a slot."""
        answer, _ = yield from self._run("abandon", group, check_reason(reason))
        return answer == "ok"

    def reclaim(self) -> Steps[int]:
        """End every open slot."""
        return (yield from self._repeat("reclaim"))

    def drain(self) -> Steps[int]:
        """Empty the buffer of open slots and ready groups."""
        stats = yield from self.stats()
        total, most = 0, stats.reserved + stats.ready  # workers that are up reserve anew meanwhile
        while total < most:
            _, [count] = yield from self._run("drain", most - total)
            if not int(count):
                break
            total += int(count)
        yield from self._collect_garbage()
        return total

    def delete(self) -> Steps[int]:
        """Delete every key of the run."""
        total = 0
        yield Send((("HGET", self._keys.control, "format"),))  # leads to the node of a cluster that has the run
        for instance in (None, *range(self._instances)):
            cursor = b"0"
            while True:
                [[cursor, names]] = yield Send(
                    (("SCAN", cursor, "MATCH", f"{self._keys.prefix}*", "COUNT", 1000),), instance
                )
                if names:
                    yield Send((("UNLINK", *names),), instance)
                total += len(names)
                if int(cursor) == 0:
                    break
        return total

    # -- the learner --

    def begin_epoch(self) -> Steps[int]:
        """Fence off older learners and redeliver what they held."""
        nonce = uuid.uuid4().hex
        _, [epoch, acks] = yield from self._run("begin_epoch", _holder(), nonce, 0)
        self._memory.begin(int(epoch), nonce, int(acks))
        return int(epoch)

    def announce(self, epoch: int, version: int) -> Steps[None]:
        """Say that weights are about to be handed out as ``version``."""
        yield from self._run("announce", epoch, int(version))
        self._memory.announced = int(version)

    def advance(self, epoch: int, version: int) -> Steps[None]:
        """Raise the policy version without a batch."""
        yield from self._run("advance", epoch, int(version))

    def lease(self, epoch: int, version: int, timeout: float, shard: int, shards: int) -> Steps[Lease]:
        """Lease a batch and fetch one shard of it."""
        if not 0 <= shard < shards <= 4096:
            raise ValueError(f"shard is {shard} of {shards}; expected 0 ≤ shard < shards ≤ 4096: correct them")
        deadline = time.monotonic() + timeout
        decoded: dict[str, list[Trajectory]] = {}
        while True:
            claim = yield from self._claim(epoch, version, shards, deadline, timeout)
            own = [group for group in claim.members if claim.shards[group] == shard]
            bad = yield from self._fetch(
                {group: claim.members[group] for group in own if group not in decoded}, decoded
            )
            if bad:
                for group, outcome in bad.items():
                    yield from self._condemn(epoch, version, group, claim.members[group], outcome)
                continue
            lease = Lease(
                epoch=epoch,
                version=version,
                id=claim.id,
                shard=shard,
                shards=shards,
                batch=claim.shards,
                groups=[decoded[group] for group in own],
                corrections=np.array([claim.corrections[group] for group in own], np.float64),
            )
            if shard == 0:  # whoever has it acks; the others of a gang do not learn when a lease is over
                self._memory.hold(lease)
            yield from self._collect_garbage()
            return lease

    def ack(self, lease: Lease, version: int) -> Steps[None]:
        """Consume a lease and raise the version."""
        if version <= lease.version:
            raise ValueError(
                f"version is {version}, but the lease was trained with {lease.version}: "
                "pass the version of the weights that were published after the step"
            )
        ours = self._memory.note_ack(lease, int(version))
        _, reply = yield Run("ack", (lease.epoch, lease.version, lease.id, int(version)))
        if ours and text(reply[0]) in ("over", "forgotten"):
            yield from self._remind(lease.epoch)
        else:
            _, [acks] = parse(reply, self._keys, self._where)
            if not self._memory.confirm(int(acks)):
                yield from self._remind(lease.epoch)
        yield from self._collect_garbage()

    def release(self, lease: Lease) -> Steps[None]:
        """Give a lease back untrained."""
        self._memory.let_go(lease)
        yield from self._run("release", lease.epoch, lease.version, lease.id)

    def checkpointed(self, epoch: int, version: int) -> Steps[None]:
        """Forget what the durable checkpoint of ``version`` has learned from."""
        yield from self._repeat("checkpointed", epoch, int(version))
        yield from self._collect_garbage()

    def rollback(self, epoch: int, version: int) -> Steps[int]:
        """Put back what was trained after the checkpoint of ``version``."""
        count = yield from self._repeat("rollback", epoch, int(version))
        self._memory.rollback = int(version)
        yield from self._collect_garbage()
        return count

    # -- what they are made of --

    def _run(self, name: str, *arguments: str | int | float) -> Steps[tuple[str, list[Any]]]:
        """Run a script; return its answer and the rest of its reply."""
        _, reply = yield Run(name, arguments)
        if text(reply[0]) == "forgotten" and arguments[0] == self._memory.epoch:
            yield from self._remind(self._memory.epoch)
            _, reply = yield Run(name, arguments)
        return parse(reply, self._keys, self._where)

    def _repeat(self, name: str, *arguments: str | int) -> Steps[int]:
        """Run a script that works in chunks until it finds nothing more; return how much that was."""
        total = 0
        while True:
            _, [count] = yield from self._run(name, *arguments)
            if not int(count):
                return total
            total += int(count)

    def _wait(self, whom: str, seconds: float) -> Send:
        """Block until ``whom`` is woken, for at most ``seconds`` and never for long."""
        return Send((("BLPOP", self._keys.wake(whom), max(0.01, min(seconds, self._block_seconds))),))

    def _claim(self, epoch: int, version: int, shards: int, deadline: float, timeout: float) -> Steps[Claim]:
        """Wait until the server leases a whole batch, and knows all that it was told."""
        lease_id = uuid.uuid4().hex
        while True:
            confirmed = self._memory.confirmed
            answer, rest = yield from self._run("lease", epoch, int(version), shards, lease_id)
            if answer == "again":
                continue
            if answer == "ok":
                claim = parse_claim(rest)
                if not (
                    self._memory.knows_more(claim.acks, claim.rollback, confirmed) or self._memory.holds_any(claim)
                ):
                    return claim
                yield from self._run("release", epoch, int(version), claim.id)
                yield from self._remind(epoch)
                continue
            acks, rollback, worker = rest
            if self._memory.knows_more(int(acks), text(rollback), confirmed):
                yield from self._remind(epoch)
                continue
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                stats = yield from self.stats()
                behind = f", the oldest running group is that of worker {text(worker)}" if worker else ""
                raise WaitTimeout(
                    f"no batch of {stats.limits.groups_per_batch} complete groups for version {version} after "
                    f"{timeout:g} s; the learner waits for the rollout workers{behind}: {stats}"
                )
            yield self._wait("ready", remaining)

    def _fetch(
        self, members: dict[str, tuple[Member, ...]], decoded: dict[str, list[Trajectory]]
    ) -> Steps[dict[str, str]]:
        """Fetch and decode groups into ``decoded``; return what is wrong with those that could not be."""
        flat = [(group, member) for group, of_group in members.items() for member in of_group]
        names = [self._keys.payload(group, member.index, member.nonce) for group, member in flat]
        bad: dict[str, str] = {}
        for part in slices([member.bytes for _, member in flat], FETCH_BYTES):
            payloads = yield from self._read(names[part.start : part.stop])
            for position, payload in zip(part, payloads, strict=True):
                group, member = flat[position]
                try:
                    if payload is None:
                        bad.setdefault(group, "lost")
                        logger.warning("group %s: the payload of member %d is gone; it is lost", group, member.index)
                    else:
                        decoded.setdefault(group, []).append(_decode_member(payload, group, member))
                except FormatError as error:
                    bad[group] = "quarantined"
                    logger.warning("group %s is quarantined: %s", group, error)
        for group in bad:
            decoded.pop(group, None)
        return bad

    def _read(self, names: list[str]) -> Steps[list[bytes | None]]:
        if not self._instances:
            [payloads] = yield Send((("MGET", *names),))
            return payloads
        read: list[bytes | None] = [None] * len(names)
        for instance, positions in self._by_instance(names).items():
            [payloads] = yield Send((("MGET", *(names[position] for position in positions)),), instance)
            for position, payload in zip(positions, payloads, strict=True):
                read[position] = payload
        return read

    def _condemn(self, epoch: int, version: int, group: str, members: tuple[Member, ...], outcome: str) -> Steps[None]:
        """Take a bad group out of its lease; keep damaged payloads where people can look at them."""
        kept = []
        if outcome == "quarantined":
            for member in members:
                name = self._keys.payload(group, member.index, member.nonce)
                kept.append(self._keys.quarantined(group, member.index, member.nonce))
                keep = (("RENAME", name, kept[-1]), ("EXPIRE", kept[-1], QUARANTINE_SECONDS))
                instance = instance_of(name, self._instances) if self._instances else None
                yield Send(keep, instance, may_fail=True)  # it may be missing, or renamed by a call before this one
        yield from self._run("condemn", epoch, int(version), group, outcome, *kept)

    def _remind(self, epoch: int) -> Steps[None]:
        """Tell a server that lost its last writes what it does not know any more: all of it, in the old order."""
        memory = self._memory
        acks, held = memory.acks(), memory.held()
        logger.warning(
            "Redis at %s lost its last writes; telling it again %d acks and %d leases",
            self._where,
            len(acks),
            len(held),
        )
        if memory.epoch == epoch:  # else another process of the gang began it, and tells
            yield from self._run("begin_epoch", _holder(), memory.nonce, epoch)
        [[known, marker]] = yield Send((("HMGET", self._keys.control, "acks", "rollback"),))
        if memory.rollback is not None and (marker is None or text(marker) != f"{epoch}:{memory.rollback}"):
            yield from self._repeat("rollback", epoch, memory.rollback)
        if memory.announced is not None:
            yield from self._run("announce", epoch, memory.announced)
        for lease, version in acks:
            _, [known] = yield from self._run("ack", epoch, lease.version, lease.id, version, *lease.batch)
        memory.settle(int(known))
        for lease in held:
            groups = [part for pair in lease.batch.items() for part in pair]
            yield from self._run("hold", epoch, lease.version, lease.id, lease.shards, *groups)

    def _collect_garbage(self) -> Steps[None]:
        """Delete payloads on payload instances that the scripts have let go of; what fails is left to the next time."""
        with suppress(BufferUnavailable):
            yield from self._delete_garbage()

    def _delete_garbage(self) -> Steps[None]:
        while self._instances:
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
            positions.setdefault(instance_of(name, self._instances), []).append(position)
        return positions


def _checked_payload(trajectory: Trajectory, weight: float) -> bytes:
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


def _holder() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def _evicted() -> BufferFull:
    return BufferFull(
        f"Redis dropped a payload within one call, though it must keep it for {STAGED_SECONDS} s: "
        "run it with maxmemory-policy noeviction"
    )


def _decode_member(payload: bytes, group: str, member: Member) -> Trajectory:
    trajectory = decode(payload)
    if (trajectory.group, trajectory.index) != (group, member.index):
        raise FormatError(
            f"a payload says member {trajectory.index} of group {trajectory.group}, expected member {member.index} of "
            f"group {group}: something else wrote it; discard it"
        )
    return trajectory
