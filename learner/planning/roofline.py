"""How fast a program can be at best: the slowest of its arithmetic, its memory traffic and its collectives.

Roofline (Williams et al. 2009): each resource runs at its peak rate, beside the others. So nothing here is measured,
and a real step takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from learner.planning.chips import Topology
from learner.planning.collectives import Collective


class Roofline(NamedTuple):
    """Seconds that one program needs of each resource.

    Attributes:
        compute: at peak bfloat16 FLOP/s.
        memory: at peak bandwidth of the chip's memory.
        overlapped: of collectives that the compiler made asynchronous.
        exposed: of collectives during which, as compiled, nothing else runs.
    """

    compute: float
    memory: float
    overlapped: float
    exposed: float

    @property
    def seconds(self) -> float:
        """The program as compiled: what may overlap does, what is exposed comes on top."""
        return max(self.compute, self.memory, self.overlapped) + self.exposed

    @property
    def best_seconds(self) -> float:
        """The bound that no schedule beats: all collectives overlap, too."""
        return max(self.compute, self.memory, self.overlapped + self.exposed)

    @property
    def bound(self) -> str:
        """What it waits for, as compiled."""
        work = max(self.compute, self.memory, self.overlapped)
        if self.exposed > work:
            return "exposed collectives"
        return {self.compute: "compute", self.memory: "memory", self.overlapped: "collectives"}[work]


def roofline(
    topology: Topology,
    coordinates_D3: np.ndarray,
    *,
    flops: float,
    traffic: float,
    collectives: Sequence[Collective],
) -> Roofline:
    """Seconds of a program.

    Args:
        topology: what it runs on.
        coordinates_D3: int[D, 3], the chip of each of the D devices, in the order of the mesh.
        flops: of all devices together.
        traffic: bytes that one device moves to and from its memory.
        collectives: of the program.
    """
    chip, seconds = topology.chip, {True: 0.0, False: 0.0}
    for collective in collectives:
        bandwidth = group_bandwidth(topology, coordinates_D3[list(collective.group)])
        seconds[collective.is_async] += collective.sent / bandwidth
    return Roofline(
        compute=flops / (chip.peak_flops * topology.chips),
        memory=traffic / (chip.hbm_bandwidth / chip.devices),
        overlapped=seconds[True],
        exposed=seconds[False],
    )


def group_bandwidth(topology: Topology, coordinates_G3: np.ndarray) -> float:
    """Bytes/s at which each of the G devices of a group sends to the others, links of all torus axes together.

    Along an axis that the group spans and that is closed to a ring, both links of a chip carry data; along a line, a
    chip at its end has one. Links that other groups use at the same time are not taken off. The two devices of one
    chip are as fast as all its links.
    """
    links = 0
    for axis, (size, is_ring) in enumerate(zip(topology.shape, topology.wraps, strict=True)):
        spanned = len(np.unique(coordinates_G3[:, axis]))
        if spanned > 1:
            links += 2 if is_ring and spanned == size else 1
    return links * topology.chip.link_bandwidth if links else topology.chip.ici_bandwidth
