"""Aggregation: how the losses of tokens become the loss of a batch.

Every choice is a weight per token and a divisor that adds up, so that neither depends on how the batch is cut: the loss
is ``Σ w·ℓ / Σ divisor`` over all tokens of all micro-batches and devices.

Axes: R = rows, T = tokens of a row, S = tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from learner.objectives.sequences import at_tokens, trained_lengths
from learner.packing import Rows


@dataclass(frozen=True, slots=True)
class Aggregation:
    """One way to aggregate.

    Attributes:
        weigh: rows → float32[R, T], the weight of each token's loss; read where ``Rows.mask`` is true, and
            where values are trained.
        unit: what is counted to divide: trained tokens, or sequences with a trained token.
    """

    weigh: Callable[[Rows], jax.Array]
    unit: Literal["token", "sequence"]

    def divisor(self, rows: Rows) -> jax.Array:
        """What rows add to the divisor of the loss: a float32 scalar."""
        if self.unit == "token":
            return jnp.sum(rows.mask, dtype=jnp.float32)
        return jnp.sum(trained_lengths(rows) > 0, dtype=jnp.float32)

    def divisor_of(self, mask_S: np.ndarray) -> float:
        """What one sequence adds to the divisor, from the mask of its trained tokens."""
        return float(np.count_nonzero(mask_S)) if self.unit == "token" else float(np.any(mask_S))


def token_mean() -> Aggregation:
    """``Σ_i Σ_t ℓ_it / Σ_i |o_i|``: every token of the batch weighs the same (DAPO: arXiv:2503.14476, eq. 8)."""
    return Aggregation(lambda rows: jnp.ones(rows.mask.shape, jnp.float32), "token")


def sequence_mean_token_mean() -> Aggregation:
    """``1/N Σ_i 1/|o_i| Σ_t ℓ_it``: every sequence weighs the same (GRPO: arXiv:2402.03300, eq. 3).

    The tokens of a long sequence weigh less than those of a short one.
    """
    return Aggregation(
        lambda rows: at_tokens(1.0 / jnp.maximum(trained_lengths(rows), 1.0), rows.segments), unit="sequence"
    )


def sequence_sum(tokens: float) -> Aggregation:
    """``1/N Σ_i 1/L Σ_t ℓ_it`` with a constant L: no bias for or against length (Dr. GRPO: arXiv:2503.20783, §3.2).

    Args:
        tokens: L, such as the longest reply in tokens; it scales the learning rate and nothing else.
    """
    return Aggregation(lambda rows: jnp.full(rows.mask.shape, 1.0 / tokens, jnp.float32), "sequence")
