"""Packing sequences of any length into micro-batches of few, known shapes.

Several sequences share a row; segment ids keep them apart. Row lengths come from a short
ladder, so every shape is compiled before the first step. Position ``t`` of a row predicts
the token at ``t + 1`` of the same segment: what is said about that token (trained or not,
behaviour log-probability, ...) is stored at ``t``, and the last position of a segment
predicts nothing. Which tokens are trained is given, never inferred from lengths or ids.

Axes: R = rows of a micro-batch, T = tokens of a row, S = tokens of one sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

type Array = Any
"""np.ndarray on the host, jax.Array on the devices."""


class PackingError(ValueError):
    """A sequence cannot be packed; the message names it and the remedy."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One sequence to train on.

    Attributes:
        tokens: int32[S].
        mask: bool[S], true where the token is trained; may have holes.
        logprobs: float32[S], behaviour log-probability; read where ``mask`` is true.
        versions: int32[S], policy version that sampled the token.
        advantages: float32[S], how much better than expected the choice of each token was; read where ``mask`` is true.
        rewards: float32[S], reward of the turn of each sampled token; None where no values are learned.
        is_cut: whether the sequence was cut off before its end.
        sampler: number of the sampler that sampled it; -1 if that is not known.
    """

    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    advantages: np.ndarray
    rewards: np.ndarray | None = None
    is_cut: bool = False
    sampler: int = -1


class Rows(NamedTuple):
    """One micro-batch; all arrays are [R, T].

    Attributes:
        tokens: int32, 0 where padded.
        positions: int32, position within the own sequence.
        segments: int32, 1.. within a row; 0 where padded.
        targets: int32, the next token of the same segment.
        mask: bool, whether that target is trained.
        logprobs: float32, behaviour log-probability of the target.
        versions: int32, policy version that sampled the target.
        samplers: int32, number of the sampler that sampled the target; -1 if that is not known.
        advantages: float32, advantage of the target; with a value head its weight, until the learner fills it in.
        proximal: float32, log-probability of the target at the start of the step; 0 until the learner fills it in.
        reference: float32, log-probability of the target under the reference policy; 0 until the learner fills it in.
        rewards: float32, reward of the target's turn.
        cut: bool, whether this is the last token of a sequence that was cut off.
        values: float32, value of this position at the start of the step; 0 until the learner fills it in.
        returns: float32, what that value should be; 0 until the learner fills it in.
    """

    tokens: Array
    positions: Array
    segments: Array
    targets: Array
    mask: Array
    logprobs: Array
    versions: Array
    samplers: Array
    advantages: Array
    proximal: Array
    reference: Array
    rewards: Array
    cut: Array
    values: Array
    returns: Array


_DTYPES = {
    "tokens": np.int32,
    "positions": np.int32,
    "segments": np.int32,
    "targets": np.int32,
    "mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "samplers": np.int32,
    "advantages": np.float32,
    "proximal": np.float32,
    "reference": np.float32,
    "rewards": np.float32,
    "cut": np.bool_,
    "values": np.float32,
    "returns": np.float32,
}


@dataclass(frozen=True, slots=True)
class Ladder:
    """The shapes a micro-batch may have: ``(rows, length)``, by increasing length."""

    shapes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, row_lengths: Sequence[int], rows_of_longest: int, row_multiple: int = 1) -> Ladder:
        """A ladder whose micro-batches hold about equally many tokens, whatever their row length.

        Args:
            row_lengths: lengths of rows, in tokens.
            rows_of_longest: rows of a micro-batch of the longest rows; shorter rows come in larger numbers.
            row_multiple: the number of rows is a multiple of this (devices that share the rows).

        Raises:
            PackingError: ``rows_of_longest`` is no multiple of ``row_multiple``.
        """
        if rows_of_longest % row_multiple:
            raise PackingError(
                f"{rows_of_longest} rows per micro-batch cannot be shared by {row_multiple} devices; "
                f"use a multiple of {row_multiple}"
            )
        lengths = sorted(set(row_lengths))
        tokens = rows_of_longest * lengths[-1]
        return cls(tuple((tokens // length // row_multiple * row_multiple, length) for length in lengths))

    def part(self, count: int) -> Ladder:
        """What each of ``count`` processes places of a micro-batch.

        Raises:
            PackingError: the rows cannot be shared equally.
        """
        for rows, length in self.shapes:
            if rows % count:
                raise PackingError(
                    f"{rows} rows of {length} tokens cannot be shared by {count} processes; use a multiple of {count}"
                )
        return Ladder(tuple((rows // count, length) for rows, length in self.shapes))

    def count(self, micro_batches: Iterable[Rows]) -> list[int]:
        """How many there are of each shape."""
        having = Counter(rows.tokens.shape for rows in micro_batches)
        return [having[shape] for shape in self.shapes]

    def fill_up(self, micro_batches: Sequence[Rows], counts: Iterable[int]) -> list[Rows]:
        """The micro-batches by shape, with empty ones added until there are ``counts`` of each."""
        filled: list[Rows] = []
        for shape, count in zip(self.shapes, counts, strict=True):
            own = [rows for rows in micro_batches if rows.tokens.shape == shape]
            filled += own + [empty_rows(shape)] * (int(count) - len(own))
        return filled

    @property
    def longest(self) -> int:
        """The longest sequence that fits, in tokens."""
        return self.shapes[-1][1]


@dataclass(slots=True)
class _Row:
    length: int
    used: int
    members: list[int]


def pack(examples: Sequence[Example], ladder: Ladder) -> list[Rows]:
    """Pack sequences into micro-batches by first-fit-decreasing (Johnson 1973).

    A sequence goes into the first row with room; where there is none, a row of the
    shortest length that holds it is opened. The result depends on the inputs alone.

    Raises:
        PackingError: a sequence is longer than the longest row, or its first token is to be trained.
    """
    for index, example in enumerate(examples):
        if len(example.tokens) > ladder.longest:
            raise PackingError(
                f"sequence {index} has {len(example.tokens)} tokens; the longest row holds {ladder.longest}: "
                "add a longer row length or shorten the context"
            )
        if len(example.mask) and example.mask[0]:
            raise PackingError(f"sequence {index} trains its first token, which nothing predicts; mask it out")
    rows_by_length = _promote(_fill_rows([len(example.tokens) for example in examples], ladder), ladder)
    return [
        _micro_batch(examples, rows[start : start + count], (count, length))
        for (count, length), rows in zip(ladder.shapes, rows_by_length, strict=True)
        for start in range(0, len(rows), count)
    ]


def empty_rows(shape: tuple[int, int]) -> Rows:
    """A micro-batch of padding."""
    return Rows(**{name: np.zeros(shape, dtype) for name, dtype in _DTYPES.items()})


def padding_fraction(micro_batches: Sequence[Rows]) -> float:
    """Share of the positions that hold no token."""
    total = sum(rows.tokens.size for rows in micro_batches)
    return 1.0 - sum(int(np.count_nonzero(rows.segments)) for rows in micro_batches) / total if total else 0.0


def _fill_rows(lengths: Sequence[int], ladder: Ladder) -> list[list[_Row]]:
    """First-fit-decreasing; the rows of each ladder length."""
    opened: list[_Row] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = lengths[index]
        row = next((row for row in opened if row.used + size <= row.length), None)
        if row is None:
            row = _Row(next(length for _, length in ladder.shapes if size <= length), 0, [])
            opened.append(row)
        row.used += size
        row.members.append(index)
    return [[row for row in opened if row.length == length] for _, length in ladder.shapes]


def _promote(rows_by_length: list[list[_Row]], ladder: Ladder) -> list[list[_Row]]:
    """Move the rows of an incomplete micro-batch into free rows of the next length, where they all fit."""
    counts = [count for count, _ in ladder.shapes]
    for i in range(len(counts) - 1):
        left_over = len(rows_by_length[i]) % counts[i]
        if 0 < left_over <= -len(rows_by_length[i + 1]) % counts[i + 1]:
            rows_by_length[i + 1] += rows_by_length[i][-left_over:]
            del rows_by_length[i][-left_over:]
    return rows_by_length


def _micro_batch(examples: Sequence[Example], rows: Sequence[_Row], shape: tuple[int, int]) -> Rows:
    batch = empty_rows(shape)
    for r, row in enumerate(rows):
        start = 0
        for segment, index in enumerate(row.members, start=1):
            example = examples[index]
            size = len(example.tokens)
            own, predicting = slice(start, start + size), slice(start, start + size - 1)
            batch.tokens[r, own] = example.tokens
            batch.positions[r, own] = np.arange(size)
            batch.segments[r, own] = segment
            batch.targets[r, predicting] = example.tokens[1:]
            batch.mask[r, predicting] = example.mask[1:]
            batch.logprobs[r, predicting] = example.logprobs[1:]
            batch.versions[r, predicting] = example.versions[1:]
            batch.samplers[r, predicting] = example.sampler
            batch.advantages[r, predicting] = example.advantages[1:]
            if example.rewards is not None:
                batch.rewards[r, predicting] = example.rewards[1:]
            batch.cut[r, start + size - 1] = example.is_cut
            start += size
    return batch
