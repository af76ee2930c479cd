"""The objective of supervised fine-tuning.

Axes: R = rows, T = tokens of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from learner.models.logprobs import TokenScores
from learner.objectives.terms import Terms, masked_sum
from learner.packing import Rows


def cross_entropy(scores: TokenScores, rows: Rows, version: jax.Array) -> Terms:
    """``−log π(token)``, mean over trained tokens. Advantages, behaviour log-probabilities and versions are not read.

    Args:
        scores: of the targets; arrays are [R, T].
        rows: the micro-batch.
        version: not read.
    """
    tokens = jnp.sum(rows.mask, dtype=jnp.float32)
    return Terms(
        loss=masked_sum(-scores.logprob, rows.mask),
        divisor=tokens,
        tokens=tokens,
        means={"accuracy": masked_sum(scores.greedy, rows.mask), "entropy": masked_sum(scores.entropy, rows.mask)},
        counts={},
        maxima={},
        parts={},
        weights={},
    )
