"""Advantages and targets from the estimates of a value head, and the loss that trains one.

The decoder has no value head yet, so the configuration offers none of these; they are what one would use. The first two
run on the host, over the turns of one trajectory.

Axes: K = turns of one trajectory, R = rows, T = tokens of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from learner.packing import Rows


class VTrace(NamedTuple):
    """What V-trace says about each turn.

    Attributes:
        target: float32[K], what the value of the state before the turn should be.
        advantage: float32[K], importance-weighted advantage of the turn, for the policy gradient.
    """

    target: np.ndarray
    advantage: np.ndarray


def gae(
    reward_K: np.ndarray, value_K: np.ndarray, *, bootstrap: float = 0.0, discount: float, decay: float
) -> np.ndarray:
    """Generalised advantage estimation: ``A_k = Σ_{j ≥ k} (γλ)^{j − k}·δ_j`` (GAE: arXiv:1506.02438, eq. 16).

    ``δ_k = r_k + γ·V_{k+1} − V_k``. ``A + V`` is the target of the values.

    Args:
        reward_K: reward of each turn.
        value_K: value of the state before each turn.
        bootstrap: value of the state after the last; 0 where the episode ended.
        discount: γ, in (0, 1].
        decay: λ, in [0, 1]: 0 trusts the next value alone, 1 the rewards alone.

    Returns:
        float32[K].
    """
    following_K = np.append(value_K[1:], bootstrap)
    delta_K = reward_K + discount * following_K - value_K
    advantage_K, trace = np.zeros(len(reward_K)), 0.0
    for turn in reversed(range(len(reward_K))):
        advantage_K[turn] = trace = delta_K[turn] + discount * decay * trace
    return advantage_K.astype(np.float32)


def vtrace(
    reward_K: np.ndarray,
    value_K: np.ndarray,
    log_ratio_K: np.ndarray,
    *,
    bootstrap: float = 0.0,
    discount: float,
    decay: float = 1.0,
    cap_weight: float = 1.0,
    cap_trace: float = 1.0,
) -> VTrace:
    """Targets and advantages off-policy (V-trace: IMPALA, arXiv:1802.01561, eq. 1 and section 4.2).

    ``v_k = V_k + Σ_{j ≥ k} γ^{j − k}·(Π_{i<j} c_i)·ρ_j·(r_j + γ·V_{j+1} − V_j)`` with ``ρ = min(ρ̄, π/μ)`` and
    ``c = λ·min(c̄, π/μ)``; the advantage of a turn is ``ρ_k·(r_k + γ·v_{k+1} − V_k)``.

    Args:
        reward_K: reward of each turn.
        value_K: value of the state before each turn.
        log_ratio_K: log(π/μ) of each turn, the sum over its tokens.
        bootstrap: value of the state after the last; 0 where the episode ended.
        discount: γ, in (0, 1].
        decay: λ, in [0, 1].
        cap_weight: ρ̄; which policy's values the targets have as their fixed point.
        cap_trace: c̄, at most ρ̄; how far back a surprise reaches.
    """
    # A ratio is only ever compared with a cap from above, so the bound need not be tight.
    ratio_K = np.exp(np.minimum(np.asarray(log_ratio_K, np.float64), 60.0))
    weight_K, trace_K = np.minimum(ratio_K, cap_weight), decay * np.minimum(ratio_K, cap_trace)
    delta_K = weight_K * (reward_K + discount * np.append(value_K[1:], bootstrap) - value_K)
    surprise_K, trace = np.zeros(len(reward_K)), 0.0
    for turn in reversed(range(len(reward_K))):
        surprise_K[turn] = trace = delta_K[turn] + discount * trace_K[turn] * trace
    target_K = value_K + surprise_K
    advantage_K = weight_K * (reward_K + discount * np.append(target_K[1:], bootstrap) - value_K)
    return VTrace(target_K.astype(np.float32), advantage_K.astype(np.float32))


def value_loss(
    value_RT: jax.Array, behaviour_value_RT: jax.Array, target_RT: jax.Array, rows: Rows, *, clip: float
) -> jax.Array:
    """``½·max((V − G)², (clip(V, V_μ − ε, V_μ + ε) − G)²)`` of each token, 0 where nothing is trained.

    The pessimistic clipping that PPO's authors used beside the paper (Huang et al. 2022, "The 37 implementation details
    of PPO", detail 9): a value moves at most ε per batch towards its target.

    Args:
        value_RT: V, of the model being trained.
        behaviour_value_RT: V_μ, when the token was sampled or the step began.
        target_RT: G, from :func:`gae` or :func:`vtrace`.
        rows: the micro-batch.
        clip: ε, above 0; ``math.inf`` does without.

    Returns:
        float32[R, T], to be aggregated like a policy loss.
    """
    near_RT = behaviour_value_RT + jnp.clip(value_RT - behaviour_value_RT, -clip, clip)
    worse_RT = jnp.maximum(jnp.square(value_RT - target_RT), jnp.square(near_RT - target_RT))
    return jnp.where(rows.mask, 0.5 * worse_RT, 0.0)
