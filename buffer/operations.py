"""The protocol's operations, without input or output: what is asked of Redis, in which order, and what it means.

Each operation is a generator that yields requests and receives their replies, so the blocking and the asyncio client
drive the same code. Every call of a script is idempotent, because a client that lost its connection cannot know whether
the server executed the call.

A server that is killed may come back without its last writes; ``buffer.journal`` is what is remembered against that.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

import numpy as np

from buffer.errors import BufferError, BufferFull, BufferUnavailable, Fenced, Forgotten, FormatError, WaitTimeout
from buffer.journal import SHOWN, Entry, Journal
from buffer.keys import Keys
from buffer.lease import Lease
from buffer.limits import Limits
from buffer.payloads import STAGED_SECONDS, Payloads, decode_member, encode_member
from buffer.protocol import (
    CONTROL_FORMAT,
    Claim,
    Commit,
    Failure,
    GroupInfo,
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
    text,
)
from buffer.requests import Run, Send, Steps
from buffer.trajectory import Trajectory

LONGEST_BLOCK_SECONDS = 1.0
"""A waiter looks for itself this often, since slots expire without waking anybody."""

_TELLINGS = 20
"""How often a server may forget, or two threads find out that it did, before a call gives up."""

logger = logging.getLogger(__name__)


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
        self._payloads = Payloads(keys, payload_instances)
        self._block_seconds = block_seconds
        self._journal = Journal()
        self._unanswered: list[str] = []  # groups whose reservation may have been admitted although no reply came

    # -- everyone --

    def open(self, limits: Limits) -> Steps[None]:
        """Create the control state, or take it up, and put ``limits`` into force."""
        yield from self._run("open", CONTROL_FORMAT, self._payloads.instances, *limits.fields())

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
        [payload] = yield from self._payloads.read([self._keys.payload(info.group, member.index, member.nonce)])
        if payload is None:
            raise FormatError(
                f"the payload of member {member.index} of group {info.group} is gone: the group was leased and "
                "trained meanwhile, or is lost; peek at another"
            )
        return decode_member(payload, info.group, member)

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
            payload, nonce = encode_member(trajectory, weight), secrets.token_hex(8)
            staged.append((self._keys.payload(trajectory.group, int(trajectory.index), nonce), payload))
            arguments += [trajectory.group, int(trajectory.index), nonce, len(payload)]
            arguments += [trajectory.oldest_version, len(trajectory.tokens), float(weight)]
        stored: list[Any] = []
        if self._payloads.instances:
            yield from self._payloads.stage(staged)
            _, reply = yield Run("commit", (self._payloads.instances, *arguments))
        else:
            stored, reply = yield Run("commit", (0, *arguments), self._payloads.set_commands(staged))
        replies = [text(answer).partition(":") for answer in parse(reply, self._keys, self._where)[1]]
        answers = [answer for answer, _, _ in replies]
        if self._payloads.instances:
            yield from self._payloads.keep(
                [
                    self._keys.payload(trajectory.group, int(trajectory.index), nonce) if nonce else name
                    for trajectory, (name, _), (answer, _, nonce) in zip(trajectories, staged, replies, strict=True)
                    if nonce or answer == Commit.ACCEPTED
                ]
            )
        for position, answer in enumerate(answers):
            if answer == "index":
                raise ValueError(
                    f"index is {trajectories[position].index}; expected one below the group size: "
                    "give each member of a group its own"
                )
            if answer == "unstaged":
                raise (
                    stored[position]
                    if isinstance(stored[position], Exception)
                    else BufferFull(
                        f"Redis dropped a payload within one call, though it must keep it for {STAGED_SECONDS} s: "
                        "run it with maxmemory-policy noeviction"
                    )
                )
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
        total, answer = 0, "more"
        while answer == "more":
            answer, [count] = yield from self._run("reclaim")
            total += int(count)
        return total

    def drain(self) -> Steps[int]:
        """Empty the buffer of open slots and ready groups."""
        stats = yield from self.stats()
        total, most = 0, stats.reserved + stats.ready  # workers that are up reserve anew meanwhile
        while total < most:
            _, [count] = yield from self._run("drain", most - total)
            if not int(count):
                break
            total += int(count)
        yield from self._payloads.collect_garbage()
        return total

    def delete(self) -> Steps[int]:
        """Delete every key of the run."""
        total = 0
        yield Send((("HGET", self._keys.control, "format"),))  # leads to the node of a cluster that has the run
        for instance in (None, *range(self._payloads.instances)):
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
        entry = Entry(uuid.uuid4().hex, "begin_epoch", (f"{socket.gethostname()}:{os.getpid()}",))
        _, [epoch] = yield from self._run(entry.script, 0, "", entry.name, *entry.arguments)
        self._journal.begin(int(epoch), entry)
        return int(epoch)

    def announce(self, epoch: int, version: int) -> Steps[None]:
        """Say that weights are about to be handed out as ``version``."""
        yield from self._enter(epoch, Entry(f"announce:{version}", "announce", (int(version),)))

    def advance(self, epoch: int, version: int) -> Steps[None]:
        """Raise the policy version without a batch."""
        yield from self._enter(epoch, Entry(f"advance:{version}", "advance", (int(version),)))

    def lease(self, epoch: int, version: int, timeout: float, shard: int, shards: int) -> Steps[Lease]:
        """Lease a batch and fetch one shard of it."""
        if not 0 <= shard < shards <= 4096:
            raise ValueError(f"shard is {shard} of {shards}; expected 0 ≤ shard < shards ≤ 4096: correct them")
        deadline = time.monotonic() + timeout
        decoded: dict[str, list[Trajectory]] = {}
        while True:
            claim = yield from self._claim(epoch, int(version), shard, shards, deadline, timeout)
            own = {name: group for name, group in claim.groups.items() if group.shard == shard}
            bad = yield from self._payloads.fetch(
                {name: group.members for name, group in own.items() if name not in decoded}, decoded
            )
            for group, outcome in bad.items():
                kept = []
                if outcome == "quarantined":
                    kept = yield from self._payloads.quarantine(group, own[group].members)
                with suppress(Forgotten):  # then it is condemned when the lease is known again
                    yield from self._ask("condemn", epoch, "", int(version), group, outcome, *kept)
            if bad:
                continue
            yield from self._payloads.collect_garbage()
            return Lease(
                epoch=epoch,
                version=version,
                id=claim.id,
                shard=shard,
                shards=shards,
                batch={name: group.shard for name, group in claim.groups.items()},
                groups=[decoded[name] for name in own],
                corrections=np.array([group.correction for group in own.values()], np.float64),
                mean_correction=fmean(group.correction for group in claim.groups.values()) if claim.groups else 1.0,
            )

    def ack(self, lease: Lease, version: int) -> Steps[None]:
        """Consume a lease and raise the version."""
        if version <= lease.version:
            raise ValueError(
                f"version is {version}, but the lease was trained with {lease.version}: "
                "pass the version of the weights that were published after the step"
            )
        yield from self._let_go(lease.epoch, Entry(f"ack:{lease.id}", "ack", (lease.version, lease.id, int(version))))
        self._journal.strike(_release(lease.id))  # one that got no answer: it was not executed before the ack
        yield from self._payloads.collect_garbage()

    def release(self, lease: Lease) -> Steps[None]:
        """Give a lease back untrained."""
        yield from self._let_go(lease.epoch, Entry(_release(lease.id), "release", (lease.version, lease.id)))

    def checkpointed(self, epoch: int, version: int) -> Steps[None]:
        """Forget what the durable checkpoint of ``version`` has learned from."""
        answer = "more"
        while answer == "more":
            answer, _ = yield from self._ask("checkpointed", epoch, "", int(version))
        yield from self._payloads.collect_garbage()

    def rollback(self, epoch: int, version: int) -> Steps[int]:
        """Put back what was trained after the checkpoint of ``version``."""
        count = yield from self._enter(epoch, Entry(uuid.uuid4().hex, "rollback", (int(version),)))
        yield from self._payloads.collect_garbage()
        return count

    # -- what they are made of --

    def _run(self, name: str, *arguments: str | int | float) -> Steps[tuple[str, list[Any]]]:
        """Run a script; return its answer and the rest of its reply."""
        _, reply = yield Run(name, arguments)
        return parse(reply, self._keys, self._where)

    def _wait(self, whom: str, seconds: float) -> Send:
        """Block until ``whom`` is woken, for at most ``seconds`` and never for long."""
        return Send((("BLPOP", self._keys.wake(whom), max(0.01, min(seconds, self._block_seconds))),))

    def _ask(self, script: str, epoch: int, entry: str, *arguments: str | int | float) -> Steps[tuple[str, list[Any]]]:
        """Run a script of the learner's on a server that knows all that it was told."""
        for _ in range(_TELLINGS):
            try:
                return (yield from self._run(script, epoch, self._journal.known(epoch), entry, *arguments))
            except Forgotten:
                if not self._journal.keeps(epoch):
                    raise
                yield from self._tell_again(epoch)
        raise self._lost_too_much()

    def _execute(self, epoch: int, entry: Entry) -> Steps[int]:
        """Have an entry executed to its end; return how many the server says there were."""
        total, answer = 0, "more"
        while answer == "more":
            answer, counts = yield from self._ask(entry.script, epoch, entry.name, *entry.arguments)
            total += sum(map(int, counts))
        return total

    def _enter(self, epoch: int, entry: Entry) -> Steps[int]:
        """Have an entry executed that gives the learner something; return how many there were."""
        total = yield from self._execute(epoch, entry)
        self._journal.write(epoch, entry)
        self._journal.hear(epoch, entry.name)
        return total

    def _let_go(self, epoch: int, entry: Entry) -> Steps[None]:
        """Have an entry executed that takes a lease out of the learner's hands."""
        self._journal.write(epoch, entry)
        try:
            yield from self._execute(epoch, entry)
            self._journal.hear(epoch, entry.name)
        except BufferUnavailable:
            raise  # it may have been executed
        except BufferError:
            self._journal.strike(entry.name)
            raise

    def _tell_again(self, epoch: int) -> Steps[None]:
        """Tell a server that lost its last writes what it does not know any more."""
        [names] = yield Send((("ZRANGE", self._keys.journal, 0, -1),))
        lacking = self._journal.lacking({text(name) for name in names})
        if lacking is None:
            raise self._lost_too_much()
        logger.warning("Redis at %s lost its last writes; telling it %d entries again", self._where, len(lacking))
        told: list[str] = []
        for entry in lacking:
            answer = "more"
            while answer == "more":
                known = " ".join(told[-SHOWN:])
                _, reply = yield Run(entry.script, (epoch, known, entry.name, *entry.arguments))
                answer = text(reply[0])
            if answer == "forgotten":
                return  # and again: whoever asks finds that out
            if answer == "over":  # an ack that got no answer, of a lease that was over
                self._journal.strike(entry.name)
            else:
                parse(reply, self._keys, self._where)
                told.append(entry.name)
        for name in told:
            self._journal.hear(epoch, name)

    def _lost_too_much(self) -> Fenced:
        return Fenced(
            f"Redis at {self._where} lost more of its last writes than this learner remembers, or keeps losing them: "
            "restart the learner, which goes on from its last checkpoint"
        )

    def _claim(
        self, epoch: int, version: int, shard: int, shards: int, deadline: float, timeout: float
    ) -> Steps[Claim]:
        """Wait until the server leases a whole batch."""
        entry = uuid.uuid4().hex if shard == 0 else ""  # whoever has shard 0 acks, and keeps the journal
        worker, forgot = b"", None
        while True:
            try:
                answer, rest = yield from self._ask("lease", epoch, entry, version, shards)
            except Forgotten as error:
                answer, forgot = "wait", error  # another process of the gang will tell it
            else:
                forgot = None
                if answer == "ok":
                    claim = parse_claim(rest)
                    if shard == 0:
                        self._journal.strike(_release(claim.id))  # which was not executed
                        hold = (version, claim.id, shards, *claim.listed())
                        self._journal.write(epoch, Entry(claim.entry, "hold", hold))
                    self._journal.hear(epoch, claim.entry)
                    return claim
                if answer == "again":
                    continue
                [worker] = rest
            remaining = deadline - time.monotonic()
            if remaining > 0:
                yield self._wait("ready" if shard == 0 else "lease", remaining)
                continue
            if forgot:
                raise forgot
            raise (yield from self._no_batch(version, shard, timeout, text(worker)))

    def _no_batch(self, version: int, shard: int, timeout: float, worker: str) -> Steps[WaitTimeout]:
        """Make the error of a lease that did not come in time."""
        stats = yield from self.stats()
        behind = f", the oldest running group is that of worker {worker}" if worker else ""
        waits = f"the learner waits for the rollout workers{behind}"
        if shard > 0:
            waits = "this process of the gang waits for that of shard 0 to make the lease, or to ask for it again"
        return WaitTimeout(
            f"no batch of {stats.limits.groups_per_batch} complete groups for version {version} after "
            f"{timeout:g} s; {waits}: {stats}"
        )


def _release(lease: str) -> str:
    """Name of the entry that releases a lease."""
    return f"release:{lease}"
