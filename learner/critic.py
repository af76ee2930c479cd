"""The critic: what the values at the start of a step say about the turns of a batch.

Everything is found on the devices, and sums go over all of them, so that the processes of a gang agree. How a batch is
cut into micro-batches changes nothing: their moments are put together before anything is normalised.

Axes: R = rows, T = tokens of a row, B = micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from learner.mesh import DATA, FSDP, ROWS, WHOLE
from learner.objectives.values import Estimator, turn_starts
from learner.packing import Rows

_EQUAL = 1e-6
"""Advantages with a smaller standard deviation are equal: their spread is rounding."""


class Moments(NamedTuple):
    """Of some numbers: arrays of micro-batches on the devices, or of them all.

    Attributes:
        size: how many there are.
        mean: of them; 0 if there are none.
        squares: the sum of their squared distances from the mean.
    """

    size: jax.Array | np.ndarray
    mean: jax.Array | np.ndarray
    squares: jax.Array | np.ndarray

    @property
    def variance(self) -> float:
        """0 if there are no numbers."""
        return float(self.squares / max(1.0, float(self.size)))


class Critic:
    """Fills in advantages and what values should be. Compiled for each shape of rows when it first meets it.

    Attributes:
        estimator: from rows to advantages and targets.
    """

    def __init__(self, mesh: Mesh, estimator: Estimator, *, normalise: bool) -> None:
        """Make a critic; nothing is compiled.

        Args:
            mesh: of the training step.
            estimator: one of ``ESTIMATORS``, its settings bound.
            normalise: whether the advantages of a batch's turns are shifted to mean 0 and scaled to a standard
                deviation of 1 (Huang et al. 2022, "The 37 implementation details of PPO", detail 7).
        """
        self.estimator, self._normalise = estimator, normalise
        self._whole = NamedSharding(mesh, WHOLE)
        judge = jax.shard_map(self._judge, mesh=mesh, in_specs=ROWS, out_specs=(ROWS, ROWS, WHOLE))
        self._judged = jax.jit(judge)
        self._scaled = jax.jit(_scale, out_shardings=NamedSharding(mesh, ROWS))

    def __call__(self, batch: Sequence[Rows]) -> tuple[list[Rows], dict[str, float]]:
        """The batch with ``advantages`` and ``returns`` filled in, and what came out.

        Args:
            batch: micro-batches on the devices, with ``values`` and ``proximal`` filled in; ``advantages`` holds the
                weight of each advantage.

        Returns:
            The batch; and over its turns value_mean, and explained_variance: 1 − Var(G − V)/Var(G), the share of the
            differences between returns that the values foresaw, 0 if there are none.
        """
        judged = [self._judged(rows) for rows in batch]
        found = jax.device_get([moments for _, _, moments in judged])
        names = ("advantage", "target", "surprise")
        advantage, target, surprise = (_together([each[name] for each in found]) for name in names)
        shift, scale = 0.0, 1.0
        if self._normalise:
            deviation = math.sqrt(advantage.variance)
            shift, scale = float(advantage.mean), 1.0 / deviation if deviation > _EQUAL else 0.0
        on_device = [jax.device_put(np.float32(number), self._whole) for number in (shift, scale)]
        filled = [
            rows._replace(advantages=self._scaled(rows.advantages, advantage_RT, *on_device), returns=target_RT)
            for rows, (advantage_RT, target_RT, _) in zip(batch, judged, strict=True)
        ]
        explained = 1.0 - surprise.variance / target.variance if target.variance > 0 else 0.0
        return filled, {"value_mean": float(target.mean - surprise.mean), "explained_variance": explained}

    def _judge(self, rows: Rows) -> tuple[jax.Array, jax.Array, dict[str, Moments]]:
        """Advantages and targets of this device's rows, and the moments over all; runs under ``shard_map``."""
        advantage_RT, target_RT = self.estimator(rows)
        starts_RT = turn_starts(rows)
        moments = {
            "advantage": _moments(advantage_RT, starts_RT),
            "target": _moments(target_RT, starts_RT),
            "surprise": _moments(target_RT - rows.values, starts_RT),
        }
        return advantage_RT, target_RT, moments


def _scale(weight_RT: jax.Array, advantage_RT: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    return weight_RT * (advantage_RT - shift) * scale


def _moments(x_RT: jax.Array, mask_RT: jax.Array) -> Moments:
    """Over the rows of all devices, where ``mask_RT`` is true; runs under ``shard_map``."""

    def total(part_RT: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sum(jnp.where(mask_RT, part_RT, 0.0)), (DATA, FSDP))

    count = total(jnp.ones_like(x_RT))
    mean = total(x_RT) / jnp.maximum(count, 1.0)
    return Moments(count, mean, total(jnp.square(x_RT - mean)))


def _together(found: Sequence[Moments]) -> Moments:
    """The moments of all micro-batches, in float64 (Chan, Golub & LeVeque 1979)."""
    count_B, mean_B, squares_B = np.array(found, np.float64).reshape(-1, 3).T
    count = count_B.sum()
    mean = (count_B * mean_B).sum() / max(1.0, count)
    return Moments(count, mean, squares_B.sum() + (count_B * np.square(mean_B - mean)).sum())
