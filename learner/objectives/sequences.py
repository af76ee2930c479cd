"""Sums over each of the sequences that share a packed row.

A sequence never spans rows, so its sum needs no other row and no other device. Rows hold at most as many sequences
as tokens; that bound gives every sum a shape that does not depend on the data.

Axes: R = rows, T = tokens of a row, S = sequences of a row, numbered by their segment id − 1; S = T.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from learner.packing import Rows


def sequence_sums(x_RT: jax.Array, segments_RT: jax.Array) -> jax.Array:
    """The sum of ``x_RT`` over each sequence.

    Args:
        x_RT: float32, 0 where it is not to be counted.
        segments_RT: int32, as in ``Rows.segments``.

    Returns:
        float32[R, S], 0 for sequences that do not exist.
    """
    length = segments_RT.shape[1]
    # Padding ends a row; a last slot for it keeps the slots ascending, so that the sums are one pass.
    slot_RT = jnp.where(segments_RT == 0, length, segments_RT - 1)
    add = partial(jax.ops.segment_sum, num_segments=length + 1, indices_are_sorted=True)
    return jax.vmap(add)(x_RT, slot_RT)[:, :length]


def at_tokens(x_RS: jax.Array, segments_RT: jax.Array) -> jax.Array:
    """What belongs to each token's sequence: float32[R, T], 0 where padded."""
    x_RT = jnp.take_along_axis(x_RS, jnp.maximum(segments_RT - 1, 0), axis=1)
    return jnp.where(segments_RT == 0, 0.0, x_RT)


def trained_lengths(rows: Rows) -> jax.Array:
    """The number of trained tokens of each sequence: float32[R, S]."""
    return sequence_sums(jnp.where(rows.mask, 1.0, 0.0), rows.segments)


def sequence_means(x_RT: jax.Array, rows: Rows) -> jax.Array:
    """The mean of ``x_RT`` over the trained tokens of each token's sequence: float32[R, T], 0 where there are none."""
    sum_RS = sequence_sums(jnp.where(rows.mask, x_RT, 0.0), rows.segments)
    return at_tokens(sum_RS / jnp.maximum(trained_lengths(rows), 1.0), rows.segments)
