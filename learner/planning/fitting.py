"""The largest micro-batch that fits, found with few compilations: each takes minutes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

MOST_COMPILATIONS = 2
"""Tried beyond the one of the configuration."""


class Largest(NamedTuple):
    """What the search found.

    Attributes:
        rows: of the largest micro-batch that was compiled and fits, per group of devices that share rows; 0: none did.
        bytes: that it takes on a device; 0 if none fits.
        next_rows: of the next larger power of two.
        next_bytes: what that takes: as compiled, or on the line through what was compiled.
        is_next_compiled: which of the two.
    """

    rows: int
    bytes: float
    next_rows: int
    next_bytes: float
    is_next_compiled: bool


def find_largest(
    measure: Callable[[int], float], *, first_rows: int, first_bytes: float, fixed_bytes: float, limit_bytes: float
) -> Largest:
    """Search the powers of two times ``first_rows`` for the largest that fits.

    Memory grows with the rows along a line whose start is at least ``fixed_bytes``; so the line through that and one
    point lies below the truth on the left of the point and above it on the right, and a jump along it does not fail.

    Args:
        measure: bytes on a device for a number of rows; compiles.
        first_rows: of the configuration.
        first_bytes: what it takes.
        fixed_bytes: what is there without any rows.
        limit_bytes: what a device has.
    """
    measured = {first_rows: first_bytes}
    for _ in range(MOST_COMPILATIONS):
        candidate = _candidate(measured, fixed_bytes, limit_bytes)
        if candidate is None:
            break
        measured[candidate] = measure(candidate)
    fitting = [rows for rows, size in measured.items() if size <= limit_bytes]
    rows = max(fitting, default=0)
    next_rows = 2 * rows if rows else min(measured)
    is_compiled = next_rows in measured
    next_bytes = measured[next_rows] if is_compiled else _predict(measured, fixed_bytes, next_rows)
    return Largest(rows, measured.get(rows, 0.0), next_rows, next_bytes, is_compiled)


def _candidate(measured: dict[int, float], fixed_bytes: float, limit_bytes: float) -> int | None:
    """What to compile next; None where it would tell nothing new."""
    fitting = [rows for rows, size in measured.items() if size <= limit_bytes]
    if not fitting:
        smallest = min(measured)
        return smallest // 2 if smallest % 2 == 0 and fixed_bytes < limit_bytes else None
    rows = max(fitting)
    while 2 * rows not in measured and _predict(measured, fixed_bytes, 2 * rows) <= limit_bytes:
        rows *= 2
    if rows not in measured:
        return rows
    # One point says too much about more rows: it is worth a try. Two say enough.
    return 2 * rows if len(measured) == 1 else None


def _predict(measured: dict[int, float], fixed_bytes: float, rows: int) -> float:
    """Bytes for ``rows`` on the line through the two largest points, or through one and what is fixed."""
    points = sorted({0: fixed_bytes, **measured}.items())[-2:]
    (first, first_bytes), (last, last_bytes) = points
    return last_bytes + (last_bytes - first_bytes) / (last - first) * (rows - last)
