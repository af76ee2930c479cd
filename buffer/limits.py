"""``Limits``: what a run admits into its buffer, and in which order it leases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3
"""Bounds of the weight of a trajectory: beyond them the order of a priority draw would lose precision."""

MAX_GROUP_SIZE = 1024
MAX_GROUPS_PER_BATCH = 4096


class Order(StrEnum):
    """The order in which ready groups are leased."""

    FIFO = "fifo"
    """Oldest first, by the reservation of the slot."""
    UNIFORM = "uniform"
    """A uniform draw without replacement from what is ready."""
    PRIORITY = "priority"
    """A draw without replacement in which a group is as likely as its weight, the mean of those its members were
    committed with; ``Lease.corrections`` undoes the bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run admits into its buffer, and in which order it leases.

    Attributes:
        max_staleness: most versions between the oldest sampled token of a trajectory and the version that
            trains on it; 0 is strictly on-policy.
        max_age_seconds: most seconds between a group's reservation and its lease, by the server's clock; ``math.inf``
            sets no bound. No token of a group is sampled before its reservation, so none is older than this when it is
            leased. It counts on while a run is stopped.
        groups_per_batch: groups in one lease.
        tokens_per_batch: a lease has fewer groups than that if the next one would take it beyond so many tokens, given
            and sampled; a single group may be larger. None sets no bound.
        group_size: trajectories in one group.
        min_group_size: a group whose other members failed for good, or whose worker went away, is complete with so
            many; None means all of them.
        max_bytes: bound on the payload bytes stored; must hold (max_staleness + 1) batches to run unhindered
            and one batch to run at all.
        slot_seconds: a slot that is not renewed for this long is expired.
        max_attempts: slots that one task may fail in before it is given up; 1 means that no task is issued again.
        max_member_attempts: times that one member of a group may fail before the group has to do without it.
        order: in which ready groups are leased.
        look_ahead: under ``fifo``, groups that may be leased before an older one that still runs; then the learner
            waits for it. None lets as many overtake it as its staleness allows.
        max_uses: times that a group may be leased and trained on while it is fresh.
    """

    max_staleness: int
    max_age_seconds: float
    groups_per_batch: int
    group_size: int
    max_bytes: int
    slot_seconds: float
    max_attempts: int
    tokens_per_batch: int | None = None
    min_group_size: int | None = None
    max_member_attempts: int = 3
    order: Order = Order.FIFO
    look_ahead: int | None = None
    max_uses: int = 1

    def __post_init__(self) -> None:
        bounds = {
            "max_staleness": (0, 1_000_000),
            "max_age_seconds": (0.001, math.inf),
            "groups_per_batch": (1, MAX_GROUPS_PER_BATCH),
            "tokens_per_batch": (1, 1 << 50),
            "group_size": (1, MAX_GROUP_SIZE),
            "min_group_size": (1, self.group_size),
            "max_bytes": (1, 1 << 50),
            "slot_seconds": (0.001, 1e9),
            "max_attempts": (1, 1_000_000),
            "max_member_attempts": (1, 1_000_000),
            "look_ahead": (0, 1_000_000),
            "max_uses": (1, 1_000_000),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if value is None and name in ("tokens_per_batch", "min_group_size", "look_ahead"):
                continue
            whole = name in ("max_age_seconds", "slot_seconds") or type(value) is int
            if not whole or not least <= value <= most:
                raise ValueError(f"Limits.{name} is {value}; expected a number from {least} to {most}: change it")
        if self.order not in list(Order):
            raise ValueError(f"Limits.order is {self.order!r}; expected one of {', '.join(Order)}: change it")
        if self.look_ahead is not None and self.order != Order.FIFO:
            raise ValueError(
                f"Limits.look_ahead is {self.look_ahead}; under the order {self.order} nothing is overtaken: "
                "use None, or the order fifo"
            )

    @property
    def max_groups(self) -> int:
        """Most groups outstanding: those that can still be fresh when they are trained."""
        return (self.max_staleness + 1) * self.groups_per_batch

    @property
    def least_members(self) -> int:
        """Fewest trajectories in a complete group."""
        return self.group_size if self.min_group_size is None else self.min_group_size

    def fields(self) -> list[str | int]:
        """Name and value of each limit as the control state holds them."""
        values: dict[str, str | int | None] = {
            "max_staleness": self.max_staleness,
            "max_age_ms": None if self.max_age_seconds == math.inf else max(1, round(1000 * self.max_age_seconds)),
            "groups_per_batch": self.groups_per_batch,
            "tokens_per_batch": self.tokens_per_batch,
            "group_size": self.group_size,
            "min_group_size": self.least_members,
            "max_bytes": self.max_bytes,
            "slot_ms": max(1, round(1000 * self.slot_seconds)),
            "max_attempts": self.max_attempts,
            "max_member_attempts": self.max_member_attempts,
            "order": str(self.order),
            "look_ahead": self.look_ahead,
            "max_uses": self.max_uses,
        }
        return [part for name, value in values.items() for part in (name, "" if value is None else value)]

    @classmethod
    def of_fields(cls, control: dict[str, str]) -> Limits:
        """Read the limits back from the control state."""

        def optional(name: str) -> int | None:
            return int(control[name]) if control[name] else None

        size, least = int(control["group_size"]), int(control["min_group_size"])
        return cls(
            max_staleness=int(control["max_staleness"]),
            max_age_seconds=int(control["max_age_ms"]) / 1000 if control["max_age_ms"] else math.inf,
            groups_per_batch=int(control["groups_per_batch"]),
            tokens_per_batch=optional("tokens_per_batch"),
            group_size=size,
            min_group_size=None if least == size else least,
            max_bytes=int(control["max_bytes"]),
            slot_seconds=int(control["slot_ms"]) / 1000,
            max_attempts=int(control["max_attempts"]),
            max_member_attempts=int(control["max_member_attempts"]),
            order=Order(control["order"]),
            look_ahead=optional("look_ahead"),
            max_uses=int(control["max_uses"]),
        )
