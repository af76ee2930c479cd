"""Credit: which choice of a trajectory gets which advantage.

Runs on the host, in NumPy.

Axes: K = turns of one trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from learner.objectives.advantages import Advantage

type Credit = Callable[[Sequence[Sequence[np.ndarray]]], list[list[np.ndarray]]]
"""Rewards float[K] of each trajectory of each group of a batch → advantages float32[K] of each turn."""


def trajectory_credit(rewards: Sequence[Sequence[np.ndarray]], *, advantage: Advantage) -> list[list[np.ndarray]]:
    """Every turn of a trajectory gets the advantage of its total reward.

    Args:
        rewards: float[K] of each trajectory of each group.
        advantage: one of ``ADVANTAGES``, applied to the totals.
    """
    totals = [[np.array([np.sum(reward_K, dtype=np.float64)]) for reward_K in group] for group in rewards]
    return [
        [np.full(len(reward_K), one[0], np.float32) for reward_K, one in zip(group, advantages, strict=True)]
        for group, advantages in zip(rewards, _judge(totals, advantage), strict=True)
    ]


def turn_credit(
    rewards: Sequence[Sequence[np.ndarray]], *, advantage: Advantage, discount: float
) -> list[list[np.ndarray]]:
    """Every turn gets the advantage of the discounted return from it on, among all turns of the group.

    ``G_k = Σ_{j ≥ k} γ^{j − k}·r_j`` (Sutton & Barto 2018, eq. 3.8; turns of language agents as steps of a decision
    process: Zeng et al. 2025). What ended an episode is blamed more than what came long before.

    Args:
        rewards: float[K] of each trajectory of each group.
        advantage: one of ``ADVANTAGES``, applied to the returns of all turns together.
        discount: γ, in (0, 1].
    """
    return _judge([[_returns(reward_K, discount) for reward_K in group] for group in rewards], advantage)


def deferred_credit(rewards: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """Every turn gets 1, the weight of the advantage that one of ``ESTIMATORS`` finds for it on the devices.

    Args:
        rewards: float[K] of each trajectory of each group.
    """
    return [[np.ones(len(reward_K), np.float32) for reward_K in group] for group in rewards]


def overlong_penalty(tokens: int, *, limit: int, buffer: int) -> float:
    """What to subtract from the reward of a trajectory for its length.

    The soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13), for the whole trajectory: 0 up to
    ``limit − buffer`` tokens, from there rising linearly to 1 at ``limit``, and 1 beyond.

    Args:
        tokens: length of the trajectory.
        limit: L_max, in tokens.
        buffer: L_cache, in tokens; at least 1.
    """
    return min(1.0, max(0.0, (tokens - (limit - buffer)) / buffer))


def _returns(reward_K: np.ndarray, discount: float) -> np.ndarray:
    return_K, following = np.zeros(len(reward_K)), 0.0
    for turn in reversed(range(len(reward_K))):
        return_K[turn] = following = float(reward_K[turn]) + discount * following
    return return_K


def _judge(returns: Sequence[Sequence[np.ndarray]], advantage: Advantage) -> list[list[np.ndarray]]:
    """The advantages of returns, in the shape of the returns."""
    flat = [return_K for group in returns for return_K in group]
    if not flat:
        return [[] for _ in returns]
    group_M = np.repeat(np.arange(len(returns)), [sum(map(len, group)) for group in returns])
    advantage_M = advantage(np.concatenate(flat), group_M)
    pieces = iter(np.split(advantage_M, np.cumsum([len(return_K) for return_K in flat])[:-1]))
    return [[next(pieces) for _ in group] for group in returns]
