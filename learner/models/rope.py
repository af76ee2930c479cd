"""Rotary position embedding (Su et al. 2021), in the half-split layout of Hugging Face.

Axes: R = rows, T = tokens of a row, N = heads, D = head dim, E = D/2 frequencies.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from learner.models.config import RopeScaling


class Rotation(NamedTuple):
    """How far each pair of a head's components is turned at each token.

    Attributes:
        cos_RTE: float32, cosine of the angle.
        sin_RTE: float32, its sine.
    """

    cos_RTE: jax.Array
    sin_RTE: jax.Array


def rotation(positions_RT: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None) -> Rotation:
    """Angles at int32 ``positions_RT``: position × θ^(−2e/D), stretched by ``scaling``."""
    angle_RTE = positions_RT[..., None].astype(jnp.float32) * frequencies(head_dim, theta, scaling)
    return Rotation(jnp.cos(angle_RTE), jnp.sin(angle_RTE))


def rotate(x_RTND: jax.Array, by: Rotation) -> jax.Array:
    """Turn the components e and e + D/2 of every head by the token's angle; computed in float32."""
    cos, sin = by.cos_RTE[:, :, None], by.sin_RTE[:, :, None]
    first, second = jnp.split(x_RTND.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_RTND.dtype)


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """float32[E], radians per token.

    ``linear`` divides all of them by the factor (Chen et al. 2023, "position interpolation"). ``llama3`` divides those
    of long wavelengths and blends in between (Llama 3.1, Dubey et al. 2024, section 3.4.2, and its reference code).
    """
    half = head_dim // 2
    plain_E = theta ** (-np.arange(half, dtype=np.float64) / half)
    if scaling is None:
        return plain_E.astype(np.float32)
    stretched_E = plain_E / scaling.factor
    if scaling.rope_type == "linear":
        return stretched_E.astype(np.float32)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    periods_E = scaling.original_max_position_embeddings * plain_E / (2 * math.pi)  # that fit the original length
    smooth_E = np.clip((periods_E - low) / (high - low), 0.0, 1.0)
    return ((1 - smooth_E) * stretched_E + smooth_E * plain_E).astype(np.float32)
