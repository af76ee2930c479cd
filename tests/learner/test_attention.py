"""Attention over packed rows: what XLA compiles against a plain reference, the kernel against that, gradients too."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.models.attention import Reach, attend_packed, attend_splash, suitable_kernel

ROWS, LENGTH, HEADS, KV_HEADS, HEAD = 2, 256, 4, 2, 8
REACHES = [Reach(), Reach(window=40), Reach(softcap=2.0), Reach(window=130, softcap=1.5)]


@pytest.fixture(scope="module")
def packed():
    """Queries, keys, values, segments; rows end in padding, and one segment has a single token."""
    rng = np.random.default_rng(0)
    shapes = ((ROWS, LENGTH, HEADS, HEAD), (ROWS, LENGTH, KV_HEADS, HEAD), (ROWS, LENGTH, KV_HEADS, HEAD))
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    sizes = ([100, 1, 120], [30, 60, 90, 70])
    segments = [np.repeat(np.arange(1, len(row) + 1), row) for row in sizes]
    return q, k, v, np.stack([np.pad(row, (0, LENGTH - len(row))) for row in segments]).astype(np.int32)


def reference(q, k, v, segments, reach):
    """One pair of tokens after the other."""
    mixed = np.zeros(q.shape)
    for row in range(ROWS):
        for at in np.flatnonzero(segments[row]):
            first = max(0, at - (reach.window or LENGTH) + 1)
            seen = [c for c in range(first, at + 1) if segments[row, c] == segments[row, at]]
            for head in range(HEADS):
                kv = head * KV_HEADS // HEADS
                scores = [float(q[row, at, head] @ k[row, c, kv]) for c in seen]
                if reach.softcap:
                    scores = [reach.softcap * math.tanh(score / reach.softcap) for score in scores]
                weights = [math.exp(score - max(scores)) for score in scores]
                total = sum(weights)
                mixed[row, at, head] = sum(w / total * v[row, c, kv] for w, c in zip(weights, seen, strict=True))
    return mixed


@pytest.mark.parametrize("reach", REACHES)
def test_a_token_sees_what_is_before_it_in_its_segment_and_window(packed, reach) -> None:
    q, k, v, segments = packed
    mixed, _ = jax.jit(lambda: attend_packed(jnp.asarray(segments))(q, k, v, None, reach))()
    sampled = segments > 0
    np.testing.assert_allclose(mixed[sampled], reference(q, k, v, segments, reach)[sampled], atol=1e-5)


@pytest.mark.parametrize("reach", REACHES)
def test_the_kernel_gives_the_same_values_and_gradients(packed, reach) -> None:
    q, k, v, segments = packed
    weight = np.random.default_rng(1).normal(size=q.shape).astype(np.float32) * (segments > 0)[..., None, None]

    def loss(make, q, k, v):
        mixed, _ = make(jnp.asarray(segments))(q, k, v, None, reach)
        return jnp.sum(mixed * weight), mixed

    both = [
        jax.jit(jax.value_and_grad(partial(loss, make), (0, 1, 2), has_aux=True))(q, k, v)
        for make in (attend_packed, partial(attend_splash, interpret=True))
    ]
    ((_, plain), plain_gradients), ((_, kernel), kernel_gradients) = both
    np.testing.assert_allclose(
        kernel * (segments > 0)[..., None, None], plain * (segments > 0)[..., None, None], atol=1e-5
    )
    for ours, theirs in zip(kernel_gradients, plain_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_a_row_that_the_kernel_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match="a row has 100 tokens; the splash kernel needs a multiple of 128"):
        attend_splash(jnp.ones((1, 100), jnp.int32))


def test_each_platform_gets_the_kernel_that_takes_its_rows() -> None:
    assert suitable_kernel("tpu", [128, 4096]) == "splash"
    assert suitable_kernel("tpu", [144, 4096]) == suitable_kernel("cpu", [128]) == "xla"
