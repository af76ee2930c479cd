"""Corrections for staleness and mismatch: weights and masks of tokens that any policy loss may be multiplied by.

Each takes log ρ = log π − log μ of the trained tokens, [R, T] and 0 elsewhere, and returns float32[R, T] without a
gradient; read where ``Rows.mask`` is true. A token that is rejected weighs 0 and still counts in the divisor of the
loss, so that rejecting more does not enlarge the rest.

``truncated_token`` and ``truncated_sequence`` are importance weights: a loss that holds ρ already (all but
``reinforce``) would be weighted twice by them. ``icepop`` and ``geometric_rejection`` only reject and go with every
loss.

Axes: R = rows, T = tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from learner.objectives.sequences import at_tokens, sequence_means, sequence_sums
from learner.packing import Rows

type Correction = Callable[[jax.Array, Rows], jax.Array]
"""(log ρ[R, T], the rows) → the weight of each token, float32[R, T]."""

MAX_LOG_RATIO = 20.0
"""Bound of every log importance ratio that is exponentiated: one absurd token must not overflow the batch."""


def bounded_exp(log_RT: jax.Array) -> jax.Array:
    """``exp`` of a log ratio within ±``MAX_LOG_RATIO``; beyond, the value is that of the bound and has no gradient."""
    return jnp.exp(jnp.clip(log_RT, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def importance(log_ratio_RT: jax.Array, rows: Rows) -> jax.Array:
    """``ρ``, whole: unbiased for the token, and of unbounded variance."""
    return stop_gradient(bounded_exp(log_ratio_RT))


def truncated_token(log_ratio_RT: jax.Array, rows: Rows, *, cap: float) -> jax.Array:
    """``min(ρ, C)`` for each token (truncated importance sampling: Ionides 2008).

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training", use it against samplers
    that compute differently; it serves against staleness alike.

    Args:
        log_ratio_RT: log ρ.
        rows: the micro-batch.
        cap: C, at least 1.
    """
    return jnp.minimum(importance(log_ratio_RT, rows), cap)


def truncated_sequence(log_ratio_RT: jax.Array, rows: Rows, *, cap: float) -> jax.Array:
    """``min(Π_t ρ_t, C)``, the same for all tokens of a sequence (Liu et al. 2025, "When speed kills stability").

    Unbiased up to the truncation, where a token's own ratio ignores how likely the tokens before it were. Its variance
    grows with the length of the sequence.

    Args:
        log_ratio_RT: log ρ.
        rows: the micro-batch.
        cap: C, at least 1.
    """
    log_ratio_RS = sequence_sums(log_ratio_RT, rows.segments)
    return stop_gradient(at_tokens(jnp.minimum(bounded_exp(log_ratio_RS), cap), rows.segments))


def icepop(log_ratio_RT: jax.Array, rows: Rows, *, low: float, high: float) -> jax.Array:
    """1 where α ≤ ρ ≤ β, else 0: tokens that sampler and learner disagree about are dropped (IcePop: arXiv:2510.18855).

    The paper's weight is ρ within the band; the ratio in the loss, or a truncated weight beside this mask, is that ρ.

    Args:
        log_ratio_RT: log ρ.
        rows: the micro-batch.
        low: α, in (0, 1).
        high: β, above 1.
    """
    ratio_RT = importance(log_ratio_RT, rows)
    return jnp.where((ratio_RT >= low) & (ratio_RT <= high), 1.0, 0.0)


def geometric_rejection(log_ratio_RT: jax.Array, rows: Rows, *, low: float, high: float) -> jax.Array:
    """1 for sequences whose geometric mean of ρ lies within [low, high], else 0.

    ``(Π_t ρ_t)^(1/|o|)`` does not drift with the length, unlike the product (Liu et al. 2025, "Trust region
    optimization via sequence masking").

    Args:
        log_ratio_RT: log ρ.
        rows: the micro-batch.
        low: in (0, 1).
        high: above 1.
    """
    mean_RT = stop_gradient(bounded_exp(sequence_means(log_ratio_RT, rows)))
    return jnp.where((mean_RT >= low) & (mean_RT <= high), 1.0, 0.0)


CORRECTIONS: dict[str, Callable[..., jax.Array]] = {
    "truncated_token": truncated_token,
    "truncated_sequence": truncated_sequence,
    "icepop": icepop,
    "geometric_rejection": geometric_rejection,
}
