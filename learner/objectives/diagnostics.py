"""Diagnostics of a policy step: how far the policy is from what sampled its data, and what the loss does about it.

Always measured, because they are what tells data that is too old from a policy that learns; whether sampler and learner
agree is another question, see ``learner.agreement``. All are sums over tokens, so they do not depend on how a batch is
cut.

Axes: R = rows, T = tokens of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from learner.models.logprobs import TokenScores
from learner.objectives.corrections import bounded_exp
from learner.objectives.losses import Surrogate, log_ratio
from learner.objectives.terms import Part, Weights, masked_sum
from learner.packing import Rows

STALENESS = ("0", "1", "2", "3", "4_or_more")
"""Ages in versions, of tokens, by which divergences are split."""

NEAR_LOW, NEAR_HIGH = 0.9, 1.1
"""Ratios within these bounds are near 1; on-policy, all are."""


class Diagnostics(NamedTuple):
    """The sums of ``Terms`` that are reported; see there."""

    means: dict[str, jax.Array]
    counts: dict[str, jax.Array]
    maxima: dict[str, jax.Array]
    parts: dict[str, Part]
    weights: dict[str, Weights]


def diagnose(scores: TokenScores, rows: Rows, version: jax.Array, surrogate: Surrogate) -> Diagnostics:
    """Measure a micro-batch.

    Args:
        scores: of the targets under the policy being trained; arrays are [R, T].
        rows: the micro-batch.
        version: int32, the version being trained.
        surrogate: what the policy loss says about these tokens.

    Returns:
        Per trained token: ratio_mean, ratio_outside_fraction, clip_low_fraction, clip_high_fraction, kl_k1, kl_k3,
        entropy. By the age of the token in versions: kl_k1_staleness_*, kl_k3_staleness_* and tokens_staleness_*.
        effective_sample_size of the ratios, in (0, 1]; ratio_max.
    """
    mask_RT = rows.mask
    log_RT = stop_gradient(log_ratio(scores, rows))
    ratio_RT = bounded_exp(log_RT)
    # Both estimate KL(μ‖π) from samples of μ without bias; k3 is never negative (Schulman 2020).
    k1_RT, k3_RT = -log_RT, ratio_RT - 1.0 - log_RT
    outside_RT = (ratio_RT < NEAR_LOW) | (ratio_RT > NEAR_HIGH)
    age_RT = jnp.clip(version - rows.versions, 0, len(STALENESS) - 1)
    counts, parts = {}, {}
    for age, name in enumerate(STALENESS):
        own_RT = mask_RT & (age_RT == age)
        tokens = jnp.sum(own_RT, dtype=jnp.float32)
        counts[f"tokens_staleness_{name}"] = tokens
        parts[f"kl_k1_staleness_{name}"] = Part(masked_sum(k1_RT, own_RT), tokens)
        parts[f"kl_k3_staleness_{name}"] = Part(masked_sum(k3_RT, own_RT), tokens)
    return Diagnostics(
        means={
            "ratio_mean": masked_sum(ratio_RT, mask_RT),
            "ratio_outside_fraction": masked_sum(outside_RT, mask_RT),
            "clip_low_fraction": masked_sum(surrogate.clipped_low, mask_RT),
            "clip_high_fraction": masked_sum(surrogate.clipped_high, mask_RT),
            "kl_k1": masked_sum(k1_RT, mask_RT),
            "kl_k3": masked_sum(k3_RT, mask_RT),
            "entropy": stop_gradient(masked_sum(scores.entropy, mask_RT)),
        },
        counts=counts,
        maxima={"ratio_max": jnp.max(jnp.where(mask_RT, ratio_RT, 0.0))},
        parts=parts,
        weights={
            "effective_sample_size": Weights(masked_sum(ratio_RT, mask_RT), masked_sum(jnp.square(ratio_RT), mask_RT))
        },
    )
