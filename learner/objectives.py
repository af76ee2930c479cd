"""Objectives: small pure functions, each an idea with a name.

An objective returns sums over the trained tokens it saw, and their number beside them. The
division happens once per batch, after micro-batches and devices have been added up, so how a
batch is cut never changes its gradient.

Axes: R = rows, T = tokens of a row, N = groups, G = trajectories of a group, K = turns of a trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from learner.models.logprobs import TokenScores
from learner.packing import Rows

_MAX_LOG_RATIO = 20.0
"""Bound of the log importance ratio: one absurd token must not overflow the batch."""


class Terms(NamedTuple):
    """What a micro-batch contributes; adds up over micro-batches and devices.

    Attributes:
        loss: float32, sum over the trained tokens.
        tokens: float32, number of trained tokens.
        means: sums that are reported per trained token.
        counts: sums that are reported as they are.
        maxima: reported as the largest.
    """

    loss: jax.Array
    tokens: jax.Array
    means: dict[str, jax.Array]
    counts: dict[str, jax.Array]
    maxima: dict[str, jax.Array]

    def __add__(self, other: Terms) -> Terms:  # type: ignore[override]
        """The contribution of both."""
        return Terms(
            self.loss + other.loss,
            self.tokens + other.tokens,
            jax.tree.map(jnp.add, self.means, other.means),
            jax.tree.map(jnp.add, self.counts, other.counts),
            jax.tree.map(jnp.maximum, self.maxima, other.maxima),
        )

    def summary(self, skipped_tokens: jax.Array | float = 0.0) -> dict[str, jax.Array]:
        """Loss and diagnostics of the whole batch, as scalars.

        Args:
            skipped_tokens: sampled tokens of the batch that were left out because they add nothing to the loss; they
                count in its mean, and in no other.
        """
        tokens = jnp.maximum(self.tokens, 1.0)
        means = {name: total / tokens for name, total in self.means.items()}
        loss = self.loss / jnp.maximum(self.tokens + skipped_tokens, 1.0)
        return {"loss": loss, **means, **self.counts, **self.maxima}


type Objective = Callable[[TokenScores, Rows, jax.Array], Terms]
"""(scores[R, T] of the targets, the rows, the version being trained) → terms."""


def grpo(reward_NG: np.ndarray) -> np.ndarray:
    """Group-relative advantage, A = (r − mean(r)) / std(r) within each group (GRPO: Shao et al. 2024, eq. 3).

    A group of equal rewards gets exactly 0: it says nothing about the policy.

    Args:
        reward_NG: total reward of each trajectory.

    Returns:
        float32[N, G].
    """
    centred_NG = dr_grpo(reward_NG)
    std_N1 = np.std(reward_NG, axis=1, keepdims=True)
    return (centred_NG / np.where(std_N1 > _EQUAL, std_N1, 1.0)).astype(np.float32)


def dr_grpo(reward_NG: np.ndarray) -> np.ndarray:
    """Centred advantage, A = r − mean(r) within each group (Dr. GRPO: Liu et al. 2025, eq. 3).

    Without the division by the standard deviation, easy and hard tasks weigh as their rewards do.

    Args:
        reward_NG: total reward of each trajectory.

    Returns:
        float32[N, G].
    """
    centred_NG = reward_NG - np.mean(reward_NG, axis=1, keepdims=True)
    return np.where(np.ptp(reward_NG, axis=1, keepdims=True) > _EQUAL, centred_NG, 0.0).astype(np.float32)


_EQUAL = 1e-6
"""Rewards closer than this are equal: their spread is rounding."""

ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"grpo": grpo, "dr_grpo": dr_grpo}


def trajectory_credit(
    rewards: Sequence[np.ndarray], *, advantage: Callable[[np.ndarray], np.ndarray]
) -> list[np.ndarray]:
    """Every turn of a trajectory gets the advantage of its total reward.

    Args:
        rewards: float32[K] of each trajectory of one group, K turns each.
        advantage: one of ``ADVANTAGES``.

    Returns:
        float32[K] of each trajectory.
    """
    total_1G = np.array([[reward_K.sum() for reward_K in rewards]])
    return [
        np.full(len(reward_K), value, np.float32)
        for reward_K, value in zip(rewards, advantage(total_1G)[0], strict=True)
    ]


def turn_credit(
    rewards: Sequence[np.ndarray], *, advantage: Callable[[np.ndarray], np.ndarray], discount: float
) -> list[np.ndarray]:
    """Every turn gets the advantage of the discounted return from it on, among all turns of the group.

    ``G_k = Σ_{j ≥ k} γ^{j − k}·r_j`` (Sutton & Barto 2018, eq. 3.8; turns of language agents as steps of a decision
    process: Zeng et al. 2025). What ended an episode is blamed more than what came long before.

    Args:
        rewards: float32[K] of each trajectory of one group, K turns each.
        advantage: one of ``ADVANTAGES``, applied to the returns of all turns together.
        discount: γ, in (0, 1].

    Returns:
        float32[K] of each trajectory.
    """
    returns = []
    for reward_K in rewards:
        return_K, following = np.zeros(len(reward_K)), 0.0
        for turn in reversed(range(len(reward_K))):
            return_K[turn] = following = reward_K[turn] + discount * following
        returns.append(return_K)
    ends = np.cumsum([len(return_K) for return_K in returns])[:-1]
    return np.split(advantage(np.concatenate(returns)[None])[0], ends)


def ppo_clip(
    scores: TokenScores,
    rows: Rows,
    version: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    entropy_bonus: float,
    entropy_cap: float,
) -> Terms:
    """Clipped surrogate against the behaviour policy with an entropy bonus, mean over trained tokens.

    ``−min(ρ·A, clip(ρ, 1 − ε_low, 1 + ε_high)·A) − β·min(H(π), H*)`` with ρ = π(token) / μ(token) (PPO: Schulman et
    al. 2017, eq. 7; asymmetric ε and token mean: DAPO, Yu et al. 2025, eq. 8). μ is the policy that sampled the token,
    whatever its version, so the ratio corrects for staleness and not only for the step's own drift.

    Args:
        scores: of the targets under the policy being trained; arrays are [R, T].
        rows: the micro-batch.
        version: int32, the version being trained; tokens of this very version measure how well
            sampler and learner agree.
        clip_low: ε_low, in (0, 1).
        clip_high: ε_high, above 0.
        entropy_bonus: β, at least 0; keeps the policy exploring (A3C: Mnih et al. 2016, section 4).
        entropy_cap: H*, in nats, above 0. A token's entropy beyond it earns nothing: once most groups have equal
            rewards nothing else holds the bonus back, and without a cap the policy can end in noise. A fixed weight and
            a cap per token, where SAC (arXiv:1812.05905, section 5) learns the weight that bounds the mean.
    """
    log_ratio_RT = jnp.where(rows.mask, scores.logprob - rows.logprobs, 0.0)
    ratio_RT = jnp.exp(jnp.clip(log_ratio_RT, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    clipped_RT = jnp.clip(ratio_RT, 1.0 - clip_low, 1.0 + clip_high)
    gain_RT = jnp.minimum(ratio_RT * rows.advantages, clipped_RT * rows.advantages)
    fixed_log_RT, fixed_RT = jax.lax.stop_gradient((log_ratio_RT, ratio_RT))
    same_version_RT = rows.mask & (rows.versions == version)
    cut_RT = jax.lax.stop_gradient(clipped_RT) * rows.advantages < fixed_RT * rows.advantages
    return Terms(
        loss=_total(-gain_RT - entropy_bonus * jnp.minimum(scores.entropy, entropy_cap), rows.mask),
        tokens=_total(jnp.ones_like(ratio_RT), rows.mask),
        means={
            "ratio_mean": _total(fixed_RT, rows.mask),
            "clip_fraction": _total(cut_RT, rows.mask),
            # k3 = ρ − 1 − log ρ estimates KL(μ‖π) without bias and is never negative
            # (Schulman 2020, "Approximating KL divergence").
            "kl_k3": _total(fixed_RT - 1.0 - fixed_log_RT, rows.mask),
            "entropy": jax.lax.stop_gradient(_total(scores.entropy, rows.mask)),
        },
        counts={"logprob_difference_tokens": _total(jnp.ones_like(ratio_RT), same_version_RT)},
        maxima={
            "ratio_max": jnp.max(jnp.where(rows.mask, fixed_RT, 0.0)),
            "logprob_difference_max": jnp.max(jnp.where(same_version_RT, jnp.abs(fixed_log_RT), 0.0)),
        },
    )


def cross_entropy(scores: TokenScores, rows: Rows, version: jax.Array) -> Terms:
    """Negative log-likelihood of the trained tokens, for supervised fine-tuning.

    ``−log π(token)``, mean over trained tokens. Advantages, behaviour log-probabilities and versions are not read.

    Args:
        scores: of the targets; arrays are [R, T].
        rows: the micro-batch.
        version: not read.
    """
    return Terms(
        loss=_total(-scores.logprob, rows.mask),
        tokens=_total(jnp.ones_like(scores.logprob), rows.mask),
        means={"accuracy": _total(scores.greedy, rows.mask), "entropy": _total(scores.entropy, rows.mask)},
        counts={},
        maxima={},
    )


POLICY_LOSSES: dict[str, Callable[..., Terms]] = {"ppo_clip": ppo_clip}


def _total(x_RT: jax.Array, mask_RT: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask_RT, x_RT, 0.0), dtype=jnp.float32)
