"""Random rows with several sequences, holes, padding and an empty row; and loops that share no code with ours."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from learner.models.logprobs import TokenScores
from learner.packing import Example, Rows

VERSION = 5
LENGTHS = ((5, 7, 3), (17,), (), (6, 4))
"""Of the sequences of each row of 17 tokens; the last trains nothing."""
SHAPE = (len(LENGTHS), 17)


def random_case(seed: int = 0) -> tuple[TokenScores, Rows]:
    rng = np.random.default_rng(seed)
    segments = np.zeros(SHAPE, np.int32)
    mask = rng.random(SHAPE) < 0.6
    for r, lengths in enumerate(LENGTHS):
        end = 0
        for number, length in enumerate(lengths, start=1):
            segments[r, end : end + length] = number
            end += length
            mask[r, end - 1] = False  # predicts nothing
        mask[r, end:] = False
    mask[3, 6:] = False
    logprob = rng.normal(-1.5, 0.5, SHAPE).astype(np.float32)

    def near(spread: float) -> np.ndarray:
        return (logprob + rng.normal(0, spread, SHAPE)).astype(np.float32)

    rows = Rows(
        tokens=np.zeros(SHAPE, np.int32),
        positions=np.zeros(SHAPE, np.int32),
        segments=segments,
        targets=np.zeros(SHAPE, np.int32),
        mask=mask,
        logprobs=near(0.6),
        versions=rng.integers(0, VERSION + 1, SHAPE).astype(np.int32),
        samplers=np.zeros(SHAPE, np.int32),
        advantages=rng.normal(size=SHAPE).astype(np.float32),
        proximal=near(0.3),
        reference=near(0.4),
        rewards=np.zeros(SHAPE, np.float32),
        cut=np.zeros(SHAPE, bool),
        values=rng.normal(size=SHAPE).astype(np.float32),
        returns=rng.normal(size=SHAPE).astype(np.float32),
    )
    entropy = rng.random(SHAPE).astype(np.float32)
    return TokenScores(jnp.asarray(logprob), jnp.asarray(entropy), jnp.asarray(rng.random(SHAPE) < 0.5)), rows


def trained_tokens(rows: Rows) -> Iterator[tuple[int, int]]:
    """Where a token is trained."""
    yield from ((int(r), int(t)) for r, t in zip(*np.nonzero(rows.mask), strict=True))


def sequences(rows: Rows) -> Iterator[list[tuple[int, int]]]:
    """The trained tokens of each sequence that has some."""
    for r in range(len(rows.segments)):
        for number in range(1, int(rows.segments[r].max()) + 1):
            members = [
                (r, t) for t in range(rows.segments.shape[1]) if rows.segments[r, t] == number and rows.mask[r, t]
            ]
            if members:
                yield members


def examples_of_unequal_length() -> list[Example]:
    rng = np.random.default_rng(3)
    made = []
    for size in (31, 16, 15, 12, 9, 7, 5, 3, 2):
        mask = rng.random(size) < 0.5
        mask[0] = False
        made.append(
            Example(
                tokens=rng.integers(0, 99, size, dtype=np.int32),
                mask=mask,
                logprobs=rng.normal(-2.0, 0.3, size).astype(np.float32),
                versions=rng.integers(0, VERSION + 1, size).astype(np.int32),
                advantages=rng.normal(size=size).astype(np.float32),
            )
        )
    return made


def toy_policy(logits: jax.Array, rows: Rows) -> TokenScores:
    """Scores of a policy whose next token depends on the last: a parameter matrix [99, 99]."""
    log_RTV = jax.nn.log_softmax(logits[rows.tokens])
    chosen_RT = jnp.take_along_axis(log_RTV, jnp.asarray(rows.targets)[..., None], axis=-1)[..., 0]
    return TokenScores(chosen_RT, -jnp.sum(jnp.exp(log_RTV) * log_RTV, -1), chosen_RT > -1)
