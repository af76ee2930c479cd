"""Counting compilations."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from learner.models.compilations import CompilationCounter


def test_each_new_shape_counts_once_and_a_known_one_not_at_all() -> None:
    counter = CompilationCounter()
    double = jax.jit(lambda x: x * 2.0 + 1.0)
    small, large = jax.device_put((jnp.ones(3), jnp.ones(4)))
    start = counter.count
    double(small)
    assert counter.count == start + 1
    double(small)
    assert counter.count == start + 1
    double(large)
    assert counter.count == start + 2


def test_eager_operations_count() -> None:
    counter = CompilationCounter()
    x = jnp.ones(17)
    start = counter.count
    jnp.arctan2(x, x)
    assert counter.count > start
