"""Top-k, top-p and min-p on the device: which tokens a row may sample, each row by its own settings.

The order is that of Hugging Face's logits processors: temperature, top-k, top-p of what top-k left, min-p. A token
that is exactly as likely as the last one kept is kept, too, so that nothing depends on the order of the vocabulary.

Axes: R = rows, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from actors.samplers.contract import SamplingParams

EVERY_TOKEN = 2**31 - 1
"""The top-k that keeps the whole vocabulary."""


def bounds(params: SamplingParams) -> tuple[int, float, float]:
    """Top-k, top-p and min-p of one request, as a row of ``filtered`` has them."""
    if not params.filters:
        return EVERY_TOKEN, 1.0, 0.0
    return min(params.top_k or EVERY_TOKEN, EVERY_TOKEN), params.top_p, params.min_p


def filtering(vocabulary: int, top_k_R: jax.Array, top_p_R: jax.Array, min_p_R: jax.Array) -> jax.Array:
    """Which rows filter, bool[R]."""
    return (top_k_R < vocabulary) | (top_p_R < 1.0) | (min_p_R > 0.0)


def filtered(logits_RV: jax.Array, top_k_R: jax.Array, top_p_R: jax.Array, min_p_R: jax.Array) -> jax.Array:
    """The logits with -inf in place of what a row must not sample; rows that do not filter are as they were.

    Args:
        logits_RV: float32, already divided by the temperature.
        top_k_R: int32, keep so many of the likeliest tokens; ``EVERY_TOKEN`` keeps all.
        top_p_R: float32, of these keep the fewest that hold this share of their probability; 1 keeps all. Source:
            Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration".
        min_p_R: float32, of these keep what is at least this times as likely as the likeliest; 0 keeps all. Source:
            Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling".

    Returns:
        float32[R, V].
    """
    kept_RV = _kept(logits_RV, top_k_R, top_p_R, min_p_R)
    others_R = ~filtering(logits_RV.shape[-1], top_k_R, top_p_R, min_p_R)
    return jnp.where(kept_RV | others_R[:, None], logits_RV, -jnp.inf)


def _kept(logits_RV: jax.Array, top_k_R: jax.Array, top_p_R: jax.Array, min_p_R: jax.Array) -> jax.Array:
    rank_RV = _ordered(logits_RV)

    def at_least(rank_R: jax.Array) -> jax.Array:
        return rank_RV >= rank_R[:, None]

    few_RV = at_least(_highest(lambda rank_R: at_least(rank_R).sum(axis=-1) >= top_k_R, len(logits_RV)))
    share_RV = jax.nn.softmax(jnp.where(few_RV, logits_RV, -jnp.inf), axis=-1)

    def holds_share(rank_R: jax.Array) -> jax.Array:
        return jnp.where(at_least(rank_R), share_RV, 0.0).sum(axis=-1) >= top_p_R

    # The sum may round to 1 before the last token: 1 is no bound.
    nucleus_RV = at_least(_highest(holds_share, len(logits_RV))) | (top_p_R >= 1.0)[:, None]
    likely_RV = logits_RV >= (logits_RV.max(axis=-1) + jnp.log(min_p_R))[:, None]
    return few_RV & nucleus_RV & likely_RV


def _ordered(values: jax.Array) -> jax.Array:
    """int32 that compare as the float32 ``values`` do: their bits, those below the sign flipped if negative."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)


def _highest(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """For each row the highest int32 for which ``holds``; the lowest of all if it holds for none.

    ``holds`` is true up to some number and false above it. Found bit by bit in 32 passes over the row, which takes a
    twentieth of the time of a sort on a CPU.
    """
    lowest_R = jnp.full(rows, -(2**31), jnp.int32)
    start_R = jnp.where(holds(jnp.zeros(rows, jnp.int32)), 0, lowest_R)

    def next_bit(position: jax.Array, found_R: jax.Array) -> jax.Array:
        higher_R = found_R | (jnp.int32(1) << (30 - position))
        return jnp.where(holds(higher_R), higher_R, found_R)

    return jax.lax.fori_loop(0, 31, next_bit, start_R)
