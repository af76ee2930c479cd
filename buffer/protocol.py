"""What the scripts' replies mean: the records that callers get, and the errors.

Neither input nor output happens here; see ``buffer.operations`` for who asks what when.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from buffer.errors import BufferError, Fenced, Forgotten, FormatError, NotOpen
from buffer.keys import Keys
from buffer.limits import Limits

CONTROL_FORMAT: Final = 4
"""Number of the layout of the control state in Redis."""

OUTCOMES: Final = ("acked", "stale", "expired", "abandoned", "quarantined", "lost")
"""The counters of which every group that was reserved ends in exactly one."""

EVENTS: Final = ("stale:age", "redelivered", "rolled_back", "uses", "short_groups", "tasks_given_up")
"""Counters of what else happened to groups and tasks."""

_REASON = re.compile(r"[a-z0-9_]{1,64}")


@dataclass(frozen=True, slots=True)
class Slot:
    """The right to run one group.

    Attributes:
        group: identifier of the group; goes into each of its trajectories.
        task: position of the task in its task set.
        group_size: trajectories that the group needs, with index 0 to ``group_size - 1``.
        version: policy version when the slot was admitted; samplers hold it or a newer one.
        seconds: the slot expires this long after its last renewal.
    """

    group: str
    task: int
    group_size: int
    version: int
    seconds: float


class Commit(StrEnum):
    """What became of a committed trajectory."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """This member had already been accepted: a retry, all is well."""
    EXPIRED = "expired"
    """The slot is gone; stop the group's other episodes."""
    STALE = "stale"
    """The trajectory, and so its group, can no longer be fresh; stop the group's other episodes."""


class Failure(StrEnum):
    """What to do about a member whose episode failed."""

    RETRY = "retry"
    """Play the episode again."""
    DROPPED = "dropped"
    """The group does without it; go on with the others."""
    GONE = "gone"
    """The slot is gone, with this failure or before it; stop the group's other episodes."""


class State(StrEnum):
    """Where a group is."""

    RESERVED = "reserved"
    READY = "ready"
    LEASED = "leased"
    KEPT = "kept"
    """Trained, with payloads that a rollback would put back."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What is in the buffer, from one moment.

    Attributes:
        version: current policy version.
        epoch: current epoch of the learner gang.
        holder: ``host:process`` that began it, who holds what is leased; empty before the first.
        limits: the limits in force.
        reserved: groups whose episodes are running.
        ready: complete groups that wait for the learner.
        leased: groups that the learner holds.
        unsaved: uses of groups that were acked and that no checkpoint is known to hold.
        kept: trained groups whose payloads are still here, for a rollback.
        bytes: payload bytes stored.
        counters: what became of groups: ``reserved`` (all ever admitted), each of ``OUTCOMES`` and of ``EVENTS``:
            ``stale:age`` (those of the stale that only ``max_age_seconds`` made so), ``redelivered``, ``rolled_back``
            (uses undone by a rollback), ``uses`` (acks of a group, undone ones included), ``short_groups`` (complete
            with fewer members) and ``tasks_given_up``; besides ``abandoned:<reason>`` and ``failed:<reason>``.
        next_expiry_worker: worker whose slot expires first; empty without open slots.
        next_expiry_seconds: time until then.
        oldest_ready_seconds: age of the oldest ready group since its reservation; 0 without one.
        oldest_ready_version: oldest version that a token of a ready group was sampled with; None without one.
    """

    version: int
    epoch: int
    holder: str
    limits: Limits
    reserved: int
    ready: int
    leased: int
    unsaved: int
    kept: int
    bytes: int
    counters: dict[str, int] = field(default_factory=dict)
    next_expiry_worker: str = ""
    next_expiry_seconds: float = 0.0
    oldest_ready_seconds: float = 0.0
    oldest_ready_version: int | None = None

    @property
    def outstanding(self) -> int:
        """Groups in the buffer: reserved, ready or leased."""
        return self.reserved + self.ready + self.leased

    @property
    def unaccounted(self) -> int:
        """Groups that were admitted and are neither outstanding nor counted; 0, always."""
        return self.counters["reserved"] - sum(self.counters[name] for name in OUTCOMES) - self.outstanding

    def __str__(self) -> str:
        parts = [
            f"version {self.version}",
            f"{self.outstanding} of at most {self.limits.max_groups} groups outstanding "
            f"({self.reserved} reserved, {self.ready} ready, {self.leased} leased)",
            f"{self.bytes} of at most {self.limits.max_bytes} bytes",
        ]
        if self.reserved:
            parts.append(f"next slot to expire: worker {self.next_expiry_worker} in {self.next_expiry_seconds:.1f} s")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Member:
    """Where the bytes of a committed trajectory are."""

    index: int
    bytes: int
    nonce: str


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One group, for people who look what is inside.

    Attributes:
        group: its identifier.
        state: where it is.
        task: position of its task.
        worker: who reserved it.
        version: policy version at its reservation.
        oldest_version: oldest version among its sampled tokens; None as long as nothing was committed.
        age_seconds: time since its reservation.
        size: members that it was to have.
        members: those that are committed.
        bytes: of their payloads that are still stored.
        tokens: given and sampled, of all members.
        uses: times that it was trained on.
        lease_version: version that its lease is to train; None unless it is leased.
        expires_seconds: time until its slot expires; None unless it is reserved.
    """

    group: str
    state: State
    task: int
    worker: str
    version: int
    oldest_version: int | None
    age_seconds: float
    size: int
    members: tuple[Member, ...]
    bytes: int
    tokens: int
    uses: int
    lease_version: int | None
    expires_seconds: float | None


@dataclass(frozen=True, slots=True)
class ClaimedGroup:
    """A leased group.

    Attributes:
        shard: that it belongs to.
        correction: see ``Lease.corrections``.
        oldest_version: oldest version among its sampled tokens.
        tokens: given and sampled, of all members.
        weight: in the order ``priority``, as it is stored; empty for 1.
        members: that it has.
    """

    shard: int
    correction: float
    oldest_version: int
    tokens: int
    weight: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """A lease before its payloads are fetched.

    Attributes:
        entry: of the journal, that made it what it is.
        id: of the lease.
        groups: of the batch, in its order.
    """

    entry: str
    id: str
    groups: dict[str, ClaimedGroup]

    def listed(self) -> list[str | int]:
        """Its groups, as the script ``hold`` wants them."""
        listed: list[str | int] = []
        for name, group in self.groups.items():
            listed += [name, group.shard, repr(group.correction)]
            listed += [group.oldest_version, group.tokens, group.weight, len(group.members)]
            for member in group.members:
                listed += [member.index, f"{member.bytes}:{member.nonce}"]
        return listed


def check_reason(reason: str) -> str:
    """Return ``reason`` if it may name a counter: there must be few of them."""
    if not _REASON.fullmatch(reason):
        raise ValueError(
            f"reason is {reason!r}; expected a short word of a-z, 0-9 and '_', such as 'env_error': log details"
        )
    return reason


def not_open(keys: Keys, where: str) -> NotOpen:
    """Return the error for a run without control state."""
    return NotOpen(
        f"run {keys.run!r} has no buffer in Redis at {where}: "
        "call Buffer.open(limits) first; if it was open before, the server lost its data"
    )


def parse(reply: list[Any], keys: Keys, where: str) -> tuple[str, list[Any]]:
    """Split a script's reply into its answer and the rest, raising what is an error for every caller."""
    answer = text(reply[0])
    match answer:
        case "not_open":
            raise not_open(keys, where)
        case "forgotten":
            raise Forgotten(
                f"Redis at {where} lost its last writes, some of this learner's (it is at epoch {reply[1]}): "
                "wait until the process that began the epoch tells it again, at its next call"
            )
        case "fenced":
            raise Fenced(
                f"a newer learner has taken over run {keys.run!r} (epoch {reply[1]}): "
                "stop this one, or call begin_epoch() to take over again"
            )
        case "format":
            raise FormatError(
                f"the buffer of run {keys.run!r} has control format {text(reply[1])}, this version of headrace "
                f"uses {CONTROL_FORMAT}: use the version that created it, or another run name"
            )
        case "instances":
            raise BufferError(
                f"the payloads of run {keys.run!r} are on {text(reply[1])} payload instances, and another number was "
                "given: use the URLs that the run was started with, or another run name"
            )
        case "old":
            raise BufferError(
                f"a lease was asked for at a version older than the current version {reply[1]}: "
                "pass the version that the batch is going to be trained with"
            )
        case "shards":
            raise BufferError(
                f"this lease has {reply[1]} shards, and another number was asked for: "
                "let all processes of a gang pass the same number"
            )
        case "incomplete":
            raise BufferError(
                "groups of this lease were condemned, and it has not been asked for again since: "
                "ack when every process of the gang has its shard"
            )
        case "leased":
            raise BufferError(
                f"{reply[1]} groups are leased; expected none: roll back right after begin_epoch, before any lease"
            )
        case "over":
            raise Fenced("the lease is over: its groups were released or redelivered; lease the version again")
    return answer, reply[1:]


def parse_slot(group: str, rest: Sequence[Any]) -> Slot:
    """Read the reply of ``reserve``."""
    task, size, version, slot_ms = (int(value) for value in rest)
    return Slot(group=group, task=task, group_size=size, version=version, seconds=slot_ms / 1000)


def parse_claim(rest: Sequence[Any]) -> Claim:
    """Read the reply of ``lease``."""
    claim = Claim(entry=text(rest[0]), id=text(rest[1]), groups={})
    for name, shard, correction, oldest, tokens, weight, *members in rest[2:]:
        claim.groups[text(name)] = ClaimedGroup(
            int(shard), float(correction), int(oldest), int(tokens), text(weight), _parse_members(members)
        )
    return claim


def parse_stats(rest: Sequence[Any]) -> Stats:
    """Read the reply of ``stats``."""
    control, counters = (_pairs(flat) for flat in rest[:2])
    reserved, ready, leased, unsaved, kept = (int(value) for value in rest[2:7])
    return Stats(
        version=int(control["version"]),
        epoch=int(control["epoch"]),
        holder=control.get("holder", ""),
        limits=Limits.of_fields(control),
        reserved=reserved,
        ready=ready,
        leased=leased,
        unsaved=unsaved,
        kept=kept,
        bytes=int(control["bytes"]),
        counters=dict.fromkeys(("reserved", *OUTCOMES, *EVENTS), 0)
        | {name: int(value) for name, value in counters.items()},
        next_expiry_worker=text(rest[7]),
        next_expiry_seconds=max(0.0, int(rest[8]) / 1000),
        oldest_ready_seconds=int(rest[9]) / 1000,
        oldest_ready_version=int(rest[10]) if rest[10] != b"" else None,
    )


def parse_groups(state: State, rest: Sequence[Any]) -> list[GroupInfo]:
    """Read the reply of ``inspect``."""
    now_ms = int(rest[0])
    groups = []
    for name, row, members in rest[1:]:
        task, worker, version, oldest, born, size, stored, tokens, uses, score = (text(value) for value in row)
        groups.append(
            GroupInfo(
                group=text(name),
                state=state,
                task=int(task),
                worker=worker,
                version=int(version),
                oldest_version=int(oldest) if oldest else None,
                age_seconds=(now_ms - int(born)) / 1000,
                size=int(size),
                members=_parse_members(members),
                bytes=int(stored),
                tokens=int(tokens),
                uses=int(uses),
                lease_version=int(float(score)) if state is State.LEASED else None,
                expires_seconds=(float(score) - now_ms) / 1000 if state is State.RESERVED else None,
            )
        )
    return groups


def slices(sizes: Sequence[int], most: int) -> list[range]:
    """Cut ``sizes`` into runs of at most ``most`` bytes (one entry at least), so that no reply is huge."""
    cuts: list[range] = []
    start = total = 0
    for position, size in enumerate(sizes):
        if position > start and total + size > most:
            cuts.append(range(start, position))
            start, total = position, 0
        total += size
    if start < len(sizes):
        cuts.append(range(start, len(sizes)))
    return cuts


def text(value: bytes | str) -> str:
    """Return a reply as text; redis-py gives bytes, because payloads are."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _parse_members(members: Sequence[bytes | None]) -> tuple[Member, ...]:
    parsed = []
    for index, member in enumerate(members):
        if member is not None:
            size, _, nonce = text(member).partition(":")
            parsed.append(Member(index, int(size), nonce))
    return tuple(parsed)


def _pairs(flat: Sequence[bytes]) -> dict[str, str]:
    return {text(name): text(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}
