"""What the devices of a mesh send to each other, read from the program that the compiler made.

The optimized HLO text says for each collective its result, its groups of devices and the computation it stands in. A
loop's body is written once, so it counts as often as the loop runs; how often stands in the loop's condition, a
comparison with a constant. The TPU compiler spreads an asynchronous all-gather over several fusions, as the steps of
one chain; the chain counts once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from learner.planning.chips import PlanError


class Collective(NamedTuple):
    """One collective of a program, and how often the program runs it.

    Attributes:
        kind: ``all-gather``, ``all-reduce``, ``reduce-scatter``, ``all-to-all`` or ``collective-permute``.
        size: bytes of the whole array: what an all-gather makes, or a reduction takes, on each device.
        group: the devices that take part, as positions in the mesh; the first group of several alike.
        times: how often it runs.
        is_async: whether other work runs meanwhile.
    """

    kind: str
    size: int
    group: tuple[int, ...]
    times: int
    is_async: bool

    @property
    def sent(self) -> float:
        """Bytes that each device sends, and receives, all times together.

        Rings: 1 − 1/n of the array for n devices, and twice that for an all-reduce, which is a reduce-scatter and an
        all-gather (Thakur et al. 2005).
        """
        n = len(self.group)
        share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(self.kind, (n - 1) / n)
        return self.times * self.size * share


def read_collectives(hlo: str) -> list[Collective]:
    """All collectives of an optimized HLO module that more than one device takes part in.

    Raises:
        PlanError: the text is not understood, so that a number made of it would be wrong.
    """
    computations = _computations(hlo)
    found: dict[tuple[str, ...], Collective] = {}
    for name, times, is_fused in _runs(computations):
        for line in computations[name].lines:
            match = _COLLECTIVE.search(line)
            if match is None:
                continue
            kind, suffix = match["kind"], match["suffix"] or ""
            chain = _CHAIN.search(line) if is_fused else None
            key = ("chain", _search(r"channel_id=(\d+)", line), chain[1]) if chain else (name, match["name"])
            if kind == "all-reduce" and is_fused and "reduce-scatter" in name:
                kind = "reduce-scatter"
            size = _size(match["shape"], is_start=bool(suffix), kind=kind)
            group = _first_group(line)
            if kind == "reduce-scatter" and match["kind"] == "reduce-scatter":
                size *= len(group)  # its result is one part
            found[key] = Collective(kind, size, group, times, bool(chain or suffix))
    return [collective for collective in found.values() if len(collective.group) > 1]


def sent_by_axis(collectives: Sequence[Collective], mesh_shape: Mapping[str, int]) -> dict[str, float]:
    """Bytes each device sends along each axis of the mesh; ``fsdp×tensor`` is what goes along both together."""
    sent: dict[str, float] = {}
    for collective in collectives:
        axis = axis_of(collective.group, mesh_shape)
        sent[axis] = sent.get(axis, 0.0) + collective.sent
    return sent


def axis_of(group: Sequence[int], mesh_shape: Mapping[str, int]) -> str:
    """The axes of the mesh along which the devices of a group differ, joined by ``×``."""
    places = np.stack(np.unravel_index(np.asarray(group), tuple(mesh_shape.values())))
    differ = [name for name, along in zip(mesh_shape, places, strict=True) if len(set(along.tolist())) > 1]
    return "×".join(differ)


@dataclass(slots=True)
class _Computation:
    lines: list[str]
    is_entry: bool


_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(
    rf"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<kind>{_KINDS})(?P<suffix>-start)?\("
)
_CHAIN = re.compile(r'chain_id="(\d+)"')
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(r"(?:calls|to_apply|body|called_computations)=\{?%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}


def _computations(hlo: str) -> dict[str, _Computation]:
    computations: dict[str, _Computation] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        head = _HEAD.match(line)
        if head and not line.startswith(" "):
            lines = []
            computations[head[2]] = _Computation(lines, bool(head[1]))
        else:
            lines.append(line)
    return computations


def _runs(computations: Mapping[str, _Computation]) -> Iterator[tuple[str, int, bool]]:
    """Each computation that runs, how often, and whether inside a fusion; once for each place it is called from."""
    waiting = [(name, 1, False) for name, computation in computations.items() if computation.is_entry]
    while waiting:
        name, times, is_fused = waiting.pop()
        yield name, times, is_fused
        for line in computations[name].lines:
            is_loop = " while(" in line
            for called in _called(line):
                if called in computations and not re.search(rf" (?:{_KINDS}|reduce|sort|scatter)(?:-start)?\(", line):
                    often = _trip_count(line, computations) if is_loop else 1
                    waiting.append((called, times * often, is_fused or " fusion(" in line))


def _called(line: str) -> Iterator[str]:
    for one, several in _CALLED.findall(line):
        yield from [one] if one else re.findall(r"[\w.\-]+", several)


def _trip_count(line: str, computations: Mapping[str, _Computation]) -> int:
    """How often a loop runs: noted beside it, or the constant that its condition compares a counter from 0 with."""
    known = _search(r'known_trip_count":?\{"?n"?:"?(\d+)', line)
    if known:
        return int(known)
    condition = computations[_search(r"condition=%?([\w.\-]+)", line)].lines
    constants = dict(re.findall(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)", "\n".join(condition)))
    root = next((text for text in condition if text.lstrip().startswith("ROOT")), "")
    used = [constants[name] for name in re.findall(r"[\w.\-]+", root.partition("metadata=")[0]) if name in constants]
    if len(used) != 1:
        raise PlanError(f"the compiler's program has a loop whose number of turns is not clear: {root.strip()[:120]}")
    return int(used[0])


def _first_group(line: str) -> tuple[int, ...]:
    """Devices of the first of the groups.

    They are listed, or written as ``[groups,size]<=[dims]T(permutation)``, or as axes of a mesh, whose devices may be
    permuted: ``mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}``.
    """
    listed = _search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line)
    if listed:
        return tuple(int(device) for device in listed.split(","))
    by_number = re.search(rf"replica_groups=\[(\d+),(\d+)\]<={_IOTA}", line)
    if by_number:
        groups = _iota(by_number[3], by_number[4]).reshape(int(by_number[1]), int(by_number[2]))
        return tuple(groups[0].tolist())
    by_axes = re.search(
        rf"replica_groups=mesh\[((?:'\w+'=\d+,?)+)\](?:, device_ids=\({_IOTA}\))? \{{([\w',]+)\}}", line
    )
    if by_axes:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", by_axes[1])}
        own = re.findall(r"\w+", by_axes[4])
        devices = _iota(by_axes[2] or str(math.prod(sizes.values())), by_axes[3]).reshape(tuple(sizes.values()))
        return tuple(devices[tuple(slice(None) if name in own else 0 for name in sizes)].ravel().tolist())
    what = line.strip()[:80], _search("(replica_groups=.{1,100}|source_target_pairs=.{1,100})", line)
    raise PlanError(f"the compiler's program has a collective whose groups are not clear: {what[0]} ... {what[1]}")


_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    """The devices in order of their numbers, as an array of these dimensions, then transposed."""
    sizes = [int(size) for size in dims.split(",")]
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return devices.transpose([int(axis) for axis in permutation.split(",")]) if permutation else devices


def _size(shape: str, *, is_start: bool, kind: str) -> int:
    """Bytes of a result. Where a collective starts, it holds operands and results; the results are the second half."""
    sizes = [
        _BYTES[kind_of] * math.prod(int(size) for size in dims.split(",") if size)
        for kind_of, dims in _SHAPE.findall(shape)
        if kind_of in _BYTES
    ]
    if is_start and kind in ("all-gather", "collective-permute") and len(sizes) > 1:
        return max(sizes) if len(sizes) < 4 else sum(sizes[len(sizes) // 2 :])
    return sum(sizes)


def _search(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""
