"""Packing sequences into rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.packing import Example, Ladder, PackingError, Rows, pack, padding_fraction

LADDER = Ladder(((4, 16), (2, 32)))


def example(size: int, seed: int = 0) -> Example:
    rng = np.random.default_rng((seed, size))
    mask = rng.random(size) < 0.5
    mask[:1] = False
    return Example(
        tokens=rng.integers(1, 1000, size, dtype=np.int32),
        mask=mask,
        logprobs=rng.normal(size=size).astype(np.float32),
        versions=rng.integers(0, 9, size).astype(np.int32),
        advantages=rng.normal(size=size).astype(np.float32),
        rewards=rng.normal(size=size).astype(np.float32) if seed % 2 else None,
        is_cut=seed % 3 == 0,
    )


def unpack(batch: list[Rows]) -> list[dict[str, np.ndarray]]:
    """Each segment's arrays, found by segment id alone."""
    return [
        {name: array[r][rows.segments[r] == segment] for name, array in rows._asdict().items()}
        for rows in batch
        for r in range(len(rows.tokens))
        for segment in range(1, rows.segments[r].max() + 1)
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 32), max_size=30))
def test_every_sequence_comes_out_as_it_went_in(sizes: list[int]) -> None:
    examples = [example(size, seed) for seed, size in enumerate(sizes)]
    batch = pack(examples, LADDER)
    assert all(rows.tokens.shape in LADDER.shapes for rows in batch)
    segments = {part["tokens"].tobytes(): part for part in unpack(batch)}
    assert sum(len(unpack([rows])) for rows in batch) == len(examples)
    for e in examples:
        part = segments[e.tokens.tobytes()]
        np.testing.assert_array_equal(part["positions"], np.arange(len(e.tokens)))
        np.testing.assert_array_equal(part["targets"][:-1], e.tokens[1:])
        np.testing.assert_array_equal(part["mask"], [*e.mask[1:], False])
        np.testing.assert_array_equal(part["logprobs"][:-1], e.logprobs[1:])
        np.testing.assert_array_equal(part["versions"][:-1], e.versions[1:])
        np.testing.assert_array_equal(part["advantages"][:-1], e.advantages[1:])
        np.testing.assert_array_equal(part["rewards"][:-1], 0.0 if e.rewards is None else e.rewards[1:])
        assert part["cut"].tolist() == [False] * (len(e.tokens) - 1) + [e.is_cut]
        assert not any(part[name].any() for name in ("proximal", "reference", "values", "returns"))


def test_padding_is_never_trained() -> None:
    for rows in pack([example(size) for size in (3, 20, 9)], LADDER):
        assert not rows.mask[rows.segments == 0].any()
        assert not rows.tokens[rows.segments == 0].any()


def test_short_sequences_share_a_row() -> None:
    (rows,) = pack([example(8, seed) for seed in range(8)], LADDER)
    assert rows.tokens.shape == (4, 16)
    assert padding_fraction([rows]) == 0.0


def test_left_over_rows_go_where_there_is_room() -> None:
    # One row of 32 leaves a row free in its micro-batch; the lone row of 16 takes it.
    (rows,) = pack([example(30), example(15)], LADDER)
    assert rows.tokens.shape == (2, 32)
    assert rows.segments.max(axis=1).tolist() == [1, 1]


def test_packing_depends_on_its_input_alone() -> None:
    examples = [example(size, seed) for seed, size in enumerate([5, 9, 9, 31, 17, 2])]
    for first, second in zip(pack(examples, LADDER), pack(examples, LADDER), strict=True):
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b)


def test_nothing_packs_into_nothing() -> None:
    assert pack([], LADDER) == []
    assert padding_fraction([]) == 0.0


def test_a_sequence_longer_than_every_row_is_refused() -> None:
    with pytest.raises(PackingError, match=r"sequence 1 has 33 tokens; the longest row holds 32"):
        pack([example(4), example(33)], LADDER)


def test_a_first_token_cannot_be_trained() -> None:
    bad = example(4)
    bad.mask[0] = True
    with pytest.raises(PackingError, match="sequence 0 trains its first token"):
        pack([bad], LADDER)


def test_a_ladder_keeps_tokens_per_micro_batch_about_equal() -> None:
    assert Ladder.of([384, 128, 256], rows_of_longest=8, row_multiple=4).shapes == ((24, 128), (12, 256), (8, 384))


def test_rows_that_devices_cannot_share_are_refused() -> None:
    with pytest.raises(PackingError, match="6 rows per micro-batch cannot be shared by 4 devices"):
        Ladder.of([16], rows_of_longest=6, row_multiple=4)


def test_micro_batches_are_filled_up_to_what_others_have() -> None:
    ladder = Ladder(((4, 8), (2, 16)))
    packed = pack([example(12), example(5)], ladder)
    assert ladder.count(packed) == [0, 1]
    filled = ladder.fill_up(packed, [1, 2])
    assert [rows.tokens.shape for rows in filled] == [(4, 8), (2, 16), (2, 16)]
    assert [int(rows.mask.sum()) > 0 for rows in filled] == [False, True, False]
