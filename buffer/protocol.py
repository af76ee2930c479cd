"""The buffer's protocol without any input or output: names of keys, the scripts, and what their replies mean.

The blocking and the asyncio client share everything here, so that there is one protocol. Every call is
idempotent, because a client that lost its connection cannot know whether the server executed the call.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, Final

from buffer.errors import BufferError, Fenced, FormatError, NotOpen

CONTROL_FORMAT: Final = 2
"""Number of the layout of the control state in Redis."""

OUTCOMES: Final = ("acked", "stale", "expired", "abandoned", "quarantined", "lost")
"""The counters of which every group that was reserved ends in exactly one."""

STAGED_SECONDS: Final = 120
"""A payload that was sent but never admitted is gone after this long."""

QUARANTINE_SECONDS: Final = 24 * 3600
"""A payload that could not be decoded is kept this long for inspection."""

MAX_GROUP_SIZE: Final = 1024
MAX_GROUPS_PER_BATCH: Final = 4096

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_REASON = re.compile(r"[a-z0-9_]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run admits into its buffer.

    Attributes:
        max_staleness: most versions between the oldest sampled token of a trajectory and the version that
            trains on it; 0 is strictly on-policy.
        max_age_seconds: most seconds between a group's reservation and its lease, by the server's clock; ``math.inf``
            sets no bound. No token of a group is sampled before its reservation, so none is older than this when it is
            leased. It counts on while a run is stopped.
        groups_per_batch: groups in one lease.
        group_size: trajectories in one group.
        max_bytes: bound on the payload bytes stored; must hold (max_staleness + 1) batches to run unhindered
            and one batch to run at all.
        slot_seconds: a slot that is not renewed for this long is expired.
        max_attempts: slots that one task may fail in before it is given up; 1 means that no task is issued again.
    """

    max_staleness: int
    max_age_seconds: float
    groups_per_batch: int
    group_size: int
    max_bytes: int
    slot_seconds: float
    max_attempts: int

    def __post_init__(self) -> None:
        bounds = {
            "max_staleness": (0, 1_000_000),
            "max_age_seconds": (0.001, math.inf),
            "groups_per_batch": (1, MAX_GROUPS_PER_BATCH),
            "group_size": (1, MAX_GROUP_SIZE),
            "max_bytes": (1, 1 << 50),
            "slot_seconds": (0.001, 1e9),
            "max_attempts": (1, 1_000_000),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"Limits.{name} is {value}; expected a value from {least} to {most}: change it")

    @property
    def max_groups(self) -> int:
        """Most groups outstanding: those that can still be fresh when they are trained."""
        return (self.max_staleness + 1) * self.groups_per_batch


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


@dataclass(frozen=True, slots=True)
class Stats:
    """What is in the buffer, from one moment.

    Attributes:
        version: current policy version.
        epoch: current epoch of the learner gang.
        limits: the limits in force.
        reserved: groups whose episodes are running.
        ready: complete groups that wait for the learner.
        leased: groups that the learner holds.
        bytes: payload bytes stored.
        counters: what became of groups: ``reserved`` (all ever admitted), each of ``OUTCOMES``,
            ``stale:age`` (those of the stale that only ``max_age_seconds`` made so), ``abandoned:<reason>``,
            ``redelivered`` and ``tasks_given_up``.
        next_expiry_worker: worker whose slot expires first; empty without open slots.
        next_expiry_seconds: time until then.
    """

    version: int
    epoch: int
    limits: Limits
    reserved: int
    ready: int
    leased: int
    bytes: int
    counters: dict[str, int] = field(default_factory=dict)
    next_expiry_worker: str = ""
    next_expiry_seconds: float = 0.0

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


class Keys:
    """Names of the keys of one run. All carry one hash tag, so a cluster keeps them in one slot."""

    def __init__(self, run: str) -> None:
        if not _NAME.fullmatch(run):
            raise ValueError(f"run is {run!r}; expected 1 to 128 letters, digits, '.', '_' or '-': rename the run")
        self.run = run
        self.prefix = f"{{headrace:{run}}}:"
        self.control = f"{self.prefix}control"

    def payload(self, group: str, index: int) -> str:
        """Key of a committed member."""
        return f"{self.prefix}payload:{group}:{index}"

    def staged(self, group: str, index: int, nonce: str) -> str:
        """Key of a payload that no script has admitted yet."""
        return f"{self.prefix}staged:{group}:{index}:{nonce}"

    def wake(self, whom: str) -> str:
        """List on which ``whom`` (``ready`` or ``slots``) blocks."""
        return f"{self.prefix}wake:{whom}"


@dataclass(frozen=True, slots=True)
class Script:
    """One transition: its name, its whole source, and the digest that Redis knows it by."""

    name: str
    source: str
    digest: str


@cache
def script(name: str, flags: bool) -> Script:
    """Return the script ``name``; with ``flags``, as servers from 7.0 on want it.

    Above maxmemory a server refuses scripts that may write. Ours must still run, or a full store could never empty
    itself: 7.0 lets them say so, and 6.2 judges by the first write, which the ledger sees to. What a full store
    refuses is the payload, outside the scripts.
    """
    folder = files("buffer") / "scripts"
    source = (folder / "ledger.lua").read_text("utf-8") + (folder / f"{name}.lua").read_text("utf-8")
    if flags:
        source = "#!lua flags=allow-oom\n" + source
    return Script(name, source, sha1(source.encode(), usedforsecurity=False).hexdigest())


def open_arguments(limits: Limits) -> tuple[int | str, ...]:
    """Arguments of the script ``open``."""
    return (
        CONTROL_FORMAT,
        limits.max_staleness,
        "" if limits.max_age_seconds == math.inf else max(1, round(1000 * limits.max_age_seconds)),
        limits.groups_per_batch,
        limits.group_size,
        limits.max_bytes,
        max(1, round(1000 * limits.slot_seconds)),
        limits.max_attempts,
    )


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
        case "old":
            raise BufferError(
                f"a lease was asked for at a version older than the current version {reply[1]}: "
                "pass the version that the batch is going to be trained with"
            )
        case "over":
            raise Fenced("the lease is over: its groups were released or redelivered; lease the version again")
        case "index":
            raise ValueError(f"index must be below the group size {reply[1]}: give each member of a group its own")
    return answer, reply[1:]


def parse_slot(group: str, rest: list[Any]) -> Slot:
    """Read the reply of ``reserve``."""
    task, size, version, slot_ms = (int(value) for value in rest)
    return Slot(group=group, task=task, group_size=size, version=version, seconds=slot_ms / 1000)


def parse_batch(rest: list[Any]) -> dict[str, list[int]]:
    """Read the reply of ``lease``: bytes of each member of each group, in the order of the batch."""
    return {text(group): [int(size) for size in sizes] for group, *sizes in rest}


def parse_stats(rest: list[Any]) -> Stats:
    """Read the reply of ``stats``."""
    control, counters = (_pairs(flat) for flat in rest[:2])
    reserved, ready, leased = (int(value) for value in rest[2:5])
    return Stats(
        version=int(control["version"]),
        epoch=int(control["epoch"]),
        limits=Limits(
            max_staleness=int(control["max_staleness"]),
            max_age_seconds=int(control["max_age_ms"]) / 1000 if control["max_age_ms"] else math.inf,
            groups_per_batch=int(control["groups_per_batch"]),
            group_size=int(control["group_size"]),
            max_bytes=int(control["max_bytes"]),
            slot_seconds=int(control["slot_ms"]) / 1000,
            max_attempts=int(control["max_attempts"]),
        ),
        reserved=reserved,
        ready=ready,
        leased=leased,
        bytes=int(control["bytes"]),
        counters=dict.fromkeys(("reserved", *OUTCOMES, "stale:age", "redelivered", "tasks_given_up"), 0)
        | {name: int(value) for name, value in counters.items()},
        next_expiry_worker=text(rest[5]),
        next_expiry_seconds=max(0.0, int(rest[6]) / 1000),
    )


def slices(sizes: list[int], most: int) -> list[range]:
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
    return value.decode() if isinstance(value, bytes) else value


def _pairs(flat: list[bytes]) -> dict[str, str]:
    return {text(name): text(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}
