"""Advantages: how much better than expected a return was, in view of other returns of the batch.

Runs on the host, in NumPy. A group may hold any number of returns: it may have lost members, and with credit per turn
every turn has a return of its own.

Axes: M = returns of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

type Advantage = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(return float[M], group of each int[M], counted from 0) → float32[M]."""

_EQUAL = 1e-6
"""Returns closer than this are equal: their spread is rounding."""


def grpo(return_M: np.ndarray, group_M: np.ndarray) -> np.ndarray:
    """``(r − mean) / std`` within each group (GRPO: arXiv:2402.03300, section 4.1.2); exactly 0 if all are equal.

    Args:
        return_M: the returns.
        group_M: the group of each.
    """
    centred_M = _centred(return_M, group_M)
    variance_M = _mean(np.square(centred_M), group_M)
    return (centred_M / np.sqrt(np.where(variance_M > 0, variance_M, 1.0))).astype(np.float32)


def dr_grpo(return_M: np.ndarray, group_M: np.ndarray) -> np.ndarray:
    """``r − mean`` within each group (Dr. GRPO: arXiv:2503.20783, section 3.2); exactly 0 if all are equal.

    Without the division by the standard deviation, easy and hard tasks weigh as their rewards do.

    Args:
        return_M: the returns.
        group_M: the group of each.
    """
    return _centred(return_M, group_M).astype(np.float32)


def rloo(return_M: np.ndarray, group_M: np.ndarray) -> np.ndarray:
    """``r − mean of the others`` of the group, an unbiased baseline (RLOO: Kool et al. 2019; arXiv:2402.14740).

    ``n / (n − 1)`` times :func:`dr_grpo` for a group of n; 0 for n = 1. Unbiased only for one return per trajectory:
    the other turns of the same trajectory depend on the choice that is judged.

    Args:
        return_M: the returns.
        group_M: the group of each.
    """
    size_M = np.bincount(group_M)[group_M]
    return (_centred(return_M, group_M) * size_M / np.maximum(size_M - 1, 1)).astype(np.float32)


def batch_mean(return_M: np.ndarray, group_M: np.ndarray) -> np.ndarray:
    """``r − mean`` over the whole batch (REINFORCE with a baseline: Williams 1992, section 4).

    Compares tasks with each other, so it needs no groups, and tells easy tasks from hard ones as if that were the
    policy's doing.

    Args:
        return_M: the returns.
        group_M: not read.
    """
    return dr_grpo(return_M, np.zeros_like(group_M))


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce": batch_mean}


def _mean(x_M: np.ndarray, group_M: np.ndarray) -> np.ndarray:
    """The mean of each one's group: float64[M]."""
    counts = np.maximum(np.bincount(group_M), 1)
    return (np.bincount(group_M, weights=x_M) / counts)[group_M]


def _centred(return_M: np.ndarray, group_M: np.ndarray) -> np.ndarray:
    """The returns minus the mean of their group, exactly 0 where those of a group do not differ: float64[M]."""
    groups = int(group_M.max(initial=-1)) + 1
    highest, lowest = np.full(groups, -np.inf), np.full(groups, np.inf)
    np.maximum.at(highest, group_M, return_M)
    np.minimum.at(lowest, group_M, return_M)
    return np.where((highest - lowest)[group_M] > _EQUAL, return_M - _mean(return_M, group_M), 0.0)
