"""What a micro-batch contributes to the loss and to the diagnostics of its batch.

Sums and what divides them are carried apart, and divided once, after micro-batches and devices have been added up: how
a batch is cut never changes its gradient.

Axes: R = rows, T = tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from learner.models.logprobs import TokenScores
from learner.packing import Rows


class Part(NamedTuple):
    """A sum over some of the trained tokens, and how many those are; reported as their mean, 0 if there are none."""

    total: jax.Array
    tokens: jax.Array


class Weights(NamedTuple):
    """Sum and sum of squares of importance weights; reported as the share of the tokens that they are worth.

    Kish's effective sample size ``(Σw)² / Σw²`` over the number of weights: 1 if all are equal, 1/n if one is all.
    """

    total: jax.Array
    squares: jax.Array


class Terms(NamedTuple):
    """What a micro-batch contributes; adds up over micro-batches and devices.

    Attributes:
        loss: float32, weighted sum over the trained tokens.
        divisor: float32, what divides ``loss`` and its gradient: a number of tokens or of sequences.
        tokens: float32, number of trained tokens.
        means: sums that are reported per trained token.
        counts: sums that are reported as they are.
        maxima: reported as the largest.
        parts: reported as the mean over those of the tokens that each counts.
        weights: reported as effective sample size per trained token.
    """

    loss: jax.Array
    divisor: jax.Array
    tokens: jax.Array
    means: dict[str, jax.Array]
    counts: dict[str, jax.Array]
    maxima: dict[str, jax.Array]
    parts: dict[str, Part]
    weights: dict[str, Weights]

    def __add__(self, other: Terms) -> Terms:  # type: ignore[override]
        """The contribution of both."""
        total: Terms = jax.tree.map(jnp.add, self, other)
        return total._replace(maxima=jax.tree.map(jnp.maximum, self.maxima, other.maxima))

    def over_devices(self, axes: Sequence[str]) -> Terms:
        """The contribution of all devices along the mesh axes ``axes``, on each of them; for use in ``shard_map``."""
        total: Terms = jax.lax.psum(self, tuple(axes))
        return total._replace(maxima=jax.lax.pmax(self.maxima, tuple(axes)))

    def summary(self, skipped: jax.Array | float = 0.0) -> dict[str, jax.Array]:
        """Loss and diagnostics of the whole batch, as scalars.

        Args:
            skipped: what sequences that were left out because they add nothing to the loss would have added to
                ``divisor``; they count in the loss, and in no other number.
        """
        tokens = jnp.maximum(self.tokens, 1.0)
        return {
            "loss": self.loss / jnp.maximum(self.divisor + skipped, 1.0),
            **{name: total / tokens for name, total in self.means.items()},
            **self.counts,
            **self.maxima,
            **{name: part.total / jnp.maximum(part.tokens, 1.0) for name, part in self.parts.items()},
            **{
                name: jnp.square(weights.total) / jnp.maximum(weights.squares * tokens, jnp.finfo(jnp.float32).tiny)
                for name, weights in self.weights.items()
            },
        }


type Objective = Callable[[TokenScores, Rows, jax.Array], Terms]
"""(scores[R, T] of the targets, the rows, the version being trained) → terms."""


def masked_sum(x_RT: jax.Array, mask_RT: jax.Array) -> jax.Array:
    """The sum of ``x_RT`` where ``mask_RT`` is true, as float32; what is elsewhere may be anything."""
    return jnp.sum(jnp.where(mask_RT, x_RT, 0.0), dtype=jnp.float32)
