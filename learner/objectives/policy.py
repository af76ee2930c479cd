"""The objective of reinforcement learning: a policy loss, corrected, regularised and aggregated.

Axes: R = rows, T = tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from learner.models.logprobs import TokenScores
from learner.objectives.aggregation import Aggregation
from learner.objectives.corrections import Correction
from learner.objectives.diagnostics import diagnose
from learner.objectives.divergences import Divergence
from learner.objectives.losses import PolicyLoss, log_ratio
from learner.objectives.terms import Part, Terms, masked_sum
from learner.objectives.values import value_loss, valued
from learner.packing import Rows


def policy_objective(
    scores: TokenScores,
    rows: Rows,
    version: jax.Array,
    *,
    loss: PolicyLoss,
    aggregation: Aggregation,
    corrections: Sequence[Correction] = (),
    divergence: Divergence | None = None,
    divergence_weight: float = 0.0,
    entropy_bonus: float = 0.0,
    entropy_cap: float = math.inf,
    value_weight: float = 0.0,
) -> Terms:
    """``Σ_t w_t·(c_t·ℓ_t + κ·KL_t − β·min(H_t, H*) + ν·L_t)`` and what divides it.

    ℓ is the policy loss, c the product of the corrections, w the weight of the aggregation. The corrections are of the
    policy loss alone: a token that says nothing about rewards any more is still one to keep near the reference.

    Args:
        scores: of the targets under the policy being trained; arrays are [R, T].
        rows: the micro-batch.
        version: int32, the version being trained.
        loss: one of ``POLICY_LOSSES``, its settings bound.
        aggregation: of the losses of tokens.
        corrections: some of ``CORRECTIONS``, their settings bound.
        divergence: one of ``DIVERGENCES``, of the policy from ``Rows.reference``; None for none.
        divergence_weight: κ, at least 0.
        entropy_bonus: β, at least 0; keeps the policy exploring (A3C: Mnih et al. 2016, section 4).
        entropy_cap: H*, in nats, above 0. A token's entropy beyond it earns nothing: once most groups have equal
            rewards nothing else holds the bonus back, and without a cap the policy can end in noise. A fixed weight and
            a cap per token, where SAC (arXiv:1812.05905, section 5) learns the weight that bounds the mean.
        value_weight: ν, at least 0, of the value loss L (PPO: arXiv:1707.06347, eq. 9); needs ``TokenScores.value``. L
            is taken at some more positions than the policy loss, see ``values``, and divided alike.
    """
    surrogate = loss(scores, rows, version)
    found = diagnose(scores, rows, version, surrogate)
    loss_RT, means = surrogate.loss, dict(found.means)
    if corrections:
        log_ratio_RT = stop_gradient(log_ratio(scores, rows))
        correction_RT = math.prod((correct(log_ratio_RT, rows) for correct in corrections), start=jnp.float32(1.0))
        loss_RT = correction_RT * loss_RT
        means |= {
            "correction_mean": masked_sum(correction_RT, rows.mask),
            "rejected_fraction": masked_sum(correction_RT == 0, rows.mask),
        }
    if divergence is not None:
        reference_RT = jnp.where(rows.mask, rows.reference, scores.logprob)
        divergence_RT = divergence(scores.logprob, reference_RT)
        loss_RT += divergence_weight * divergence_RT
        means["kl_reference"] = stop_gradient(masked_sum(divergence_RT, rows.mask))
    if entropy_bonus:
        loss_RT -= entropy_bonus * jnp.minimum(scores.entropy, entropy_cap)
    weight_RT, parts = aggregation.weigh(rows), dict(found.parts)
    total = masked_sum(weight_RT * loss_RT, rows.mask)
    if value_weight:
        assert scores.value is not None, "the model has no value head"
        value_loss_RT, is_valued_RT = value_loss(scores.value, rows), valued(rows)
        total += value_weight * masked_sum(weight_RT * value_loss_RT, is_valued_RT)
        parts["value_loss"] = Part(
            stop_gradient(masked_sum(value_loss_RT, is_valued_RT)), jnp.sum(is_valued_RT, dtype=jnp.float32)
        )
    return Terms(
        loss=total,
        divisor=aggregation.divisor(rows),
        tokens=jnp.sum(rows.mask, dtype=jnp.float32),
        **found._replace(means=means, parts=parts)._asdict(),
    )
