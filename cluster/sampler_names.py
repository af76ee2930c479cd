"""Names of samplers and their numbers: people and records read the name, arrays hold the number.

A name follows from the number alone, so that processes that never spoke of a sampler agree on both.
"""

from __future__ import annotations

_PREFIX = "sampler-"


def sampler_name(number: int) -> str:
    """Name of the sampler of that number, counted from 0; what to call those that have none if it is negative."""
    return f"{_PREFIX}{number}" if number >= 0 else "episodes that several sampled"


def sampler_number(name: str) -> int:
    """Number of the sampler of that name; -1 for the names of several, or if no sampler of the pool has such a name."""
    digits = name.removeprefix(_PREFIX)
    return int(digits) if digits != name and digits.isdecimal() else -1
