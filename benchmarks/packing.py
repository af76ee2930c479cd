"""``python -m benchmarks.packing``: padding of packed rows against padding every sequence to the longest.

Lengths are log-normal (median 1000 tokens, σ = 1), from 50 to 16,384 tokens: what agents produce. No device is used.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from learner.packing import Example, Ladder, pack, padding_fraction

_LADDER = Ladder.of((4096, 16384), rows_of_longest=1)
_SHORTEST, _LONGEST, _MEDIAN, _SIGMA = 50, 16384, 1000, 1.0
_BATCHES = (256, 512, 1024)
_SEEDS = 10


def lengths(count: int, rng: np.random.Generator) -> np.ndarray:
    """int64[count], in tokens."""
    drawn = np.exp(rng.normal(np.log(_MEDIAN), _SIGMA, 4 * count))
    return drawn[(drawn >= _SHORTEST) & (drawn <= _LONGEST)][:count].astype(np.int64)


def measure(count: int, seed: int) -> dict[str, float]:
    """Padding of one batch, packed and not, as fractions of all positions; milliseconds to pack."""
    sizes = lengths(count, np.random.default_rng(seed))
    examples = [_example(size) for size in sizes]
    start = time.perf_counter()
    packed = pack(examples, _LADDER)
    seconds = time.perf_counter() - start
    assert sum(int(np.count_nonzero(rows.segments)) for rows in packed) == sizes.sum(), "tokens were lost"
    return {
        "packed": padding_fraction(packed),
        "pad_to_max": 1.0 - sizes.sum() / (count * sizes.max()),
        "pack_ms": 1000 * seconds,
    }


def main() -> None:
    """Print a table, and one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(prog="benchmarks.packing", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    result = {}
    print(f"rows of {' or '.join(str(length) for _, length in _LADDER.shapes)} tokens, {_SEEDS} batches of each size")
    for count in _BATCHES:
        each = [measure(count, seed) for seed in range(_SEEDS)]
        result[str(count)] = {name: round(float(np.mean([one[name] for one in each])), 4) for name in each[0]}
        result[str(count)]["packed_worst"] = round(max(one["packed"] for one in each), 4)
        print(f"{count:5} sequences: {result[str(count)]}")
    if arguments.json:
        print(json.dumps(result))


def _example(size: int) -> Example:
    zeros = np.zeros(size, np.float32)
    return Example(np.ones(size, np.int32), np.zeros(size, bool), zeros, zeros.astype(np.int32), zeros)


if __name__ == "__main__":
    main()
