"""The TPUs a plan can be made for: what their vendor says of them, and how their slices are wired.

A topology is named as the compiler names it: ``v5p:4x4x4`` is a slice of 4 × 4 × 4 chips.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

GIB = 2**30


class PlanError(ValueError):
    """No plan can be made of this; one line says why, and what can be changed."""


@dataclass(frozen=True, slots=True)
class Chip:
    """One kind of TPU chip. Rates are decimal, sizes binary, as the vendor gives them.

    Sources: cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}, tables "key specifications", November 2026; except
    ``usable_gib``, which is what the compiler of libtpu says when a program does not fit.

    Attributes:
        peak_flops: bfloat16 FLOP/s of a chip.
        hbm_gib: memory of a chip.
        usable_gib: what a program may use of it, per device.
        hbm_bandwidth: bytes/s of a chip.
        ici_bandwidth: bytes/s that a chip sends over all its links to other chips together, and receives at the same
            time: half of the vendor's "bidirectional" figure.
        axes: dimensions of its torus; a chip has two links in each.
        devices: devices that JAX sees in a chip.
        accelerator: what the runtime calls it.
        cores: TensorCores of a chip, by which the runtime counts some kinds.
    """

    peak_flops: float
    hbm_gib: float
    usable_gib: float
    hbm_bandwidth: float
    ici_bandwidth: float
    axes: int
    devices: int
    accelerator: str
    cores: int

    @property
    def link_bandwidth(self) -> float:
        """Bytes/s of one link in one direction."""
        return self.ici_bandwidth / (2 * self.axes)


CHIPS = {
    "v5e": Chip(197e12, 16, 15.75, 819e9, 200e9, 2, 1, "v5litepod", 1),
    "v5p": Chip(459e12, 95, 95.74, 2765e9, 600e9, 3, 1, "v5p", 2),
    "v6e": Chip(918e12, 32, 31.25, 1638e9, 400e9, 2, 1, "v6e", 1),
    "tpu7x": Chip(2307e12, 192, 94.75, 7380e9, 600e9, 3, 2, "tpu7x", 2),
}
"""By the name that a topology begins with."""

_CUBE = 4
_FULL_POD = 16


@dataclass(frozen=True, slots=True)
class Topology:
    """A slice: a kind of chip, and how many of them stand along each axis.

    Attributes:
        kind: key of ``CHIPS``.
        shape: chips along each axis.
    """

    kind: str
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, name: str) -> Topology:
        """Read a name such as ``v5p:4x4x4``.

        Raises:
            PlanError: it names no chip of the table, or a shape its chips cannot have.
        """
        kind, colon, sizes = name.partition(":")
        known = ", ".join(CHIPS)
        if kind not in CHIPS or not colon:
            raise PlanError(
                f"plan.topology={name}: expected CHIP:SHAPE such as v5p:4x4x4 or v6e:16x16, with one of the chips "
                f"{known}"
            )
        axes = CHIPS[kind].axes
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or sizes.count("x") != axes - 1:
            example = "x".join(["4"] * axes)
            raise PlanError(f"plan.topology={name}: {kind} is wired in {axes} axes; write it as {kind}:{example}")
        return cls(kind, tuple(int(size) for size in sizes.split("x")))

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def chip(self) -> Chip:
        """What it is made of."""
        return CHIPS[self.kind]

    @property
    def chips(self) -> int:
        """How many chips it has."""
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """How many devices JAX sees in it."""
        return self.chips * self.chip.devices

    @property
    def accelerator_type(self) -> str:
        """Its name for the runtime, such as ``v5p-128``."""
        return f"{self.chip.accelerator}-{self.chips * self.chip.cores}"

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each axis is closed to a ring.

        Slices of whole 4 × 4 × 4 cubes are, because optical switches join the faces of cubes; of the flat kinds only
        the whole pod of 16 × 16 is.
        """
        if len(self.shape) == 3:
            return (all(size % _CUBE == 0 for size in self.shape),) * 3
        return (self.shape == (_FULL_POD, _FULL_POD),) * 2
