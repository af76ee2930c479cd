"""Per-token estimates of KL(π‖reference), from the log-probabilities of the sampled token alone.

With r = reference(token) / π(token), under samples of π (Schulman 2020, "Approximating KL divergence"). As a loss an
estimate is only as good as its gradient, which is not the gradient of what it estimates (arXiv:2506.09477): k1 as it
stands has one of mean zero, and k3 that of KL(reference‖π), the other way round.

Tokens were sampled by μ, not π: the staler they are, the more each is biased towards where μ was.

Axes: R = rows, T = tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from learner.objectives.corrections import MAX_LOG_RATIO

type Divergence = Callable[[jax.Array, jax.Array], jax.Array]
"""(log π, log reference), float32[R, T] → the estimate of each token, float32[R, T]."""


def k1(logprob_RT: jax.Array, reference_RT: jax.Array) -> jax.Array:
    """``−log r``: unbiased, of high variance, negative for half of the tokens.

    Its value; its gradient is that of :func:`k2`, because its own would be ``∇log π``, of mean zero.
    """
    square_RT = k2(logprob_RT, reference_RT)
    return stop_gradient(logprob_RT - reference_RT) + square_RT - stop_gradient(square_RT)


def k2(logprob_RT: jax.Array, reference_RT: jax.Array) -> jax.Array:
    """``½·(log r)²``: biased and of low variance; its gradient is that of KL(π‖reference), without bias."""
    return 0.5 * jnp.square(logprob_RT - reference_RT)


def k3(logprob_RT: jax.Array, reference_RT: jax.Array) -> jax.Array:
    """``r − 1 − log r``: unbiased, of low variance, never negative (the penalty of GRPO: arXiv:2402.03300, eq. 4)."""
    log_RT = jnp.clip(reference_RT - logprob_RT, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(log_RT) - log_RT


DIVERGENCES: dict[str, Divergence] = {"k1": k1, "k2": k2, "k3": k3}
