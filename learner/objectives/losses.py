"""Policy losses: what each sampled token contributes, before corrections and aggregation.

π is the policy being trained, μ the behaviour policy that sampled the token, whatever its version: a ratio against μ
corrects for staleness, and for what sampler and learner compute differently, and not only for the step's own drift.
ρ = π(token) / μ(token); A is the token's advantage. Every loss is to be minimised and is 0 where nothing is trained.

Axes: R = rows, T = tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from learner.models.logprobs import TokenScores
from learner.objectives.corrections import Correction, bounded_exp, importance
from learner.objectives.sequences import sequence_means
from learner.packing import Rows


class Surrogate(NamedTuple):
    """A policy loss of each token.

    Attributes:
        loss: float32[R, T], 0 where nothing is trained.
        clipped_low: bool[R, T], where the ratio or weight is cut because it is too low.
        clipped_high: bool[R, T], where it is cut because it is too high.
    """

    loss: jax.Array
    clipped_low: jax.Array
    clipped_high: jax.Array


type PolicyLoss = Callable[[TokenScores, Rows, jax.Array], Surrogate]
"""(scores[R, T] of the targets, the rows, the version being trained) → the loss of each token."""


def log_ratio(scores: TokenScores, rows: Rows) -> jax.Array:
    """The log of ρ, log π − log μ: float32[R, T], 0 where nothing is trained."""
    return jnp.where(rows.mask, scores.logprob - rows.logprobs, 0.0)


def reinforce(scores: TokenScores, rows: Rows, version: jax.Array) -> Surrogate:
    """``−A·log π`` (REINFORCE: Williams 1992, section 3).

    Right on-policy only; off-policy it is to be combined with a truncated importance weight.

    Args:
        scores: of the targets; arrays are [R, T].
        rows: the micro-batch.
        version: not read.
    """
    nowhere_RT = jnp.zeros(rows.mask.shape, bool)
    return Surrogate(_trained(-rows.advantages * scores.logprob, rows), nowhere_RT, nowhere_RT)


def ppo_clip(
    scores: TokenScores,
    rows: Rows,
    version: jax.Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> Surrogate:
    """``−min(ρ·A, clip(ρ, 1 − ε_low, 1 + ε_high)·A)`` (PPO: arXiv:1707.06347, eq. 7; two ε: DAPO, 2503.14476, eq. 8).

    With a dual clip, ``−max(min(…), c·A)`` where A < 0 (Ye et al. 2020, arXiv:1912.09729): a token that became many
    times as probable and was bad would otherwise outweigh the batch.

    Args:
        scores: of the targets under the policy being trained; arrays are [R, T].
        rows: the micro-batch.
        version: not read.
        clip_low: ε_low, in (0, 1].
        clip_high: ε_high, above 0.
        dual_clip: c, above 1; None does without.
    """
    return _clipped(bounded_exp(log_ratio(scores, rows)), rows, clip_low, clip_high, dual_clip)


def gspo(
    scores: TokenScores, rows: Rows, version: jax.Array, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> Surrogate:
    """``−min(s·A, clip(s, 1 − ε_low, 1 + ε_high)·A)`` with one ratio per sequence (GSPO: arXiv:2507.18071).

    ``s = exp(1/|o| Σ_t log ρ_t)`` (eq. 7), in the form that lets advantages differ between the tokens of a sequence,
    ``s_t = sg[s]·π_t / sg[π_t]`` (GSPO-token: eqs. 13 and 14), whose gradient is that of eq. 5 where they do not.
    To weigh as in the paper, aggregate by ``sequence_mean_token_mean``.

    Args:
        scores: of the targets under the policy being trained; arrays are [R, T].
        rows: the micro-batch.
        version: not read.
        clip_low: ε_low; a mean over tokens moves far less than a token.
        clip_high: ε_high.
    """
    mean_RT = stop_gradient(sequence_means(log_ratio(scores, rows), rows))
    # Exactly 0 in value; carries the gradient of each token's own log-probability.
    own_RT = jnp.where(rows.mask, scores.logprob - stop_gradient(scores.logprob), 0.0)
    return _clipped(bounded_exp(mean_RT + own_RT), rows, clip_low, clip_high, None)


def cispo(
    scores: TokenScores, rows: Rows, version: jax.Array, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> Surrogate:
    """``−sg[clip(ρ, 1 − ε_low, 1 + ε_high)]·A·log π`` (CISPO: MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5).

    The weight is clipped, not the update: rare tokens that made the difference keep their gradient.

    Args:
        scores: of the targets under the policy being trained; arrays are [R, T].
        rows: the micro-batch.
        version: not read.
        clip_low: ε_low, in (0, 1]; 1 sets no lower bound, as in the paper.
        clip_high: ε_high, above 0.
    """
    ratio_RT = stop_gradient(bounded_exp(log_ratio(scores, rows)))
    weight_RT = jnp.clip(ratio_RT, 1.0 - clip_low, 1.0 + clip_high)
    return Surrogate(
        _trained(-weight_RT * rows.advantages * scores.logprob, rows),
        clipped_low=rows.mask & (ratio_RT < 1.0 - clip_low),
        clipped_high=rows.mask & (ratio_RT > 1.0 + clip_high),
    )


def dppo(scores: TokenScores, rows: Rows, version: jax.Array, *, divergence: float = 0.15) -> Surrogate:
    """``−M·ρ·A``, where M drops tokens whose distribution has moved too far (DPPO: Qi et al. 2026, arXiv:2602.04879).

    The total variation between π and μ is bounded from below by that of the two-outcome distributions "this token or
    another", ``D = |π(token) − μ(token)|`` (binary TV). M is 0 where D > δ and the update would lead further away
    (A > 0 and ρ > 1, or A < 0 and ρ < 1), and 1 elsewhere. Unlike a ratio, D neither stops rare tokens early nor
    frequent ones late.

    Args:
        scores: of the targets under the policy being trained; arrays are [R, T].
        rows: the micro-batch.
        version: not read.
        divergence: δ, in (0, 1).
    """
    ratio_RT = bounded_exp(log_ratio(scores, rows))
    moved_RT = stop_gradient(jnp.exp(scores.logprob)) - jnp.exp(rows.logprobs)
    too_high_RT = rows.mask & (moved_RT > divergence) & (rows.advantages > 0)
    too_low_RT = rows.mask & (moved_RT < -divergence) & (rows.advantages < 0)
    loss_RT = jnp.where(too_high_RT | too_low_RT, 0.0, -ratio_RT * rows.advantages)
    return Surrogate(_trained(loss_RT, rows), clipped_low=too_low_RT, clipped_high=too_high_RT)


def decoupled_ppo(
    scores: TokenScores,
    rows: Rows,
    version: jax.Array,
    *,
    proximal: Literal["recomputed", "interpolated"] = "interpolated",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    behaviour_weight: Correction = importance,
) -> Surrogate:
    """``−sg[π_prox / μ]·min(u·A, clip(u, 1 − ε_low, 1 + ε_high)·A)`` with u = π / π_prox.

    The proximal policy anchors the trust region, the behaviour policy only the importance weight (Hilton et al. 2022,
    arXiv:2110.00641; for stale data of language models: AReaL, arXiv:2505.24298, section 5.2).

    * ``recomputed``: π_prox is the policy at the start of the step, in ``Rows.proximal``. With one update per batch u
      is then 1, and the loss is REINFORCE under the importance weight: nothing is clipped.
    * ``interpolated``: ``log π_prox = α·log μ + (1 − α)·sg[log π]`` with α = 1/d for a token that is d ≥ 1 versions old
      and α = 0 for one that is not (A-3PO, arXiv:2512.06547): it costs no second forward pass, and the older a token
      is, the closer its anchor is to the present.

    Args:
        scores: of the targets under the policy being trained; arrays are [R, T].
        rows: the micro-batch.
        version: int32, the version being trained.
        proximal: where π_prox comes from.
        clip_low: ε_low, in (0, 1].
        clip_high: ε_high, above 0.
        behaviour_weight: from log(π_prox / μ) to the importance weight; whole unless a truncated one is given.
    """
    current_RT = stop_gradient(scores.logprob)
    if proximal == "recomputed":
        anchor_RT = rows.proximal
    else:
        age_RT = version - rows.versions
        alpha_RT = jnp.where(age_RT >= 1, 1.0 / jnp.maximum(age_RT, 1), 0.0)
        anchor_RT = alpha_RT * rows.logprobs + (1.0 - alpha_RT) * current_RT
    drift_RT = jnp.where(rows.mask, scores.logprob - anchor_RT, 0.0)
    surrogate = _clipped(bounded_exp(drift_RT), rows, clip_low, clip_high, None)
    weight_RT = behaviour_weight(jnp.where(rows.mask, anchor_RT - rows.logprobs, 0.0), rows)
    return surrogate._replace(loss=weight_RT * surrogate.loss)


def _clipped(ratio_RT: jax.Array, rows: Rows, low: float, high: float, dual: float | None) -> Surrogate:
    """The pessimistic surrogate of PPO for any ratio."""
    advantages_RT = rows.advantages
    gain_RT = jnp.minimum(ratio_RT * advantages_RT, jnp.clip(ratio_RT, 1.0 - low, 1.0 + high) * advantages_RT)
    too_low_RT = (ratio_RT < 1.0 - low) & (advantages_RT < 0)
    too_high_RT = (ratio_RT > 1.0 + high) & (advantages_RT > 0)
    if dual is not None:
        bad_RT = advantages_RT < 0
        gain_RT = jnp.where(bad_RT, jnp.maximum(gain_RT, dual * advantages_RT), gain_RT)
        too_high_RT |= bad_RT & (ratio_RT > dual)
    return Surrogate(_trained(-gain_RT, rows), rows.mask & too_low_RT, rows.mask & too_high_RT)


def _trained(x_RT: jax.Array, rows: Rows) -> jax.Array:
    return jnp.where(rows.mask, x_RT, 0.0)


POLICY_LOSSES: dict[str, Callable[..., Surrogate]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "dppo": dppo,
    "decoupled_ppo": decoupled_ppo,
    "reinforce": reinforce,
}
