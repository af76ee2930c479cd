"""The one transformer: a Qwen3-style decoder for the learner's packed rows and the sampler's KV cache.

Layers are stacked on a leading axis and run in one ``lax.scan``, so that compile time and
program size do not grow with depth, and sharded weights can be gathered one layer at a time.

Axes: R = rows, T = tokens of a row, S = cache slots, C = cached positions of a slot,
H = hidden, F = feed-forward, N = query heads, K = key/value heads, G = N/K, D = head dim,
L = layers, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from learner.models.config import ModelConfig

type Gather = Callable[[Any], Any]
"""Makes one layer's weights whole from this device's shards of them."""

type Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""(query_RTND, key_RTKD, value_RTKD, layer's cache) → (mixed_RTND, layer's new cache)."""

_MASKED = -1e30
"""Score of a masked pair; finite, so that a row with nothing to attend to stays finite."""

_SHORTEST_BLOCK = 64
_MOST_BLOCKS = 8
"""Blocks of queries in packed attention: each is unrolled, so their number bounds the program's size."""


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis (Zhang & Sennrich 2019), in float32."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.ones((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x``, normed over its last axis; same shape and type."""
        x_f32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + self.eps)
        return (x_f32 * scale * self.weight[...]).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with normed queries and keys and rotary positions."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        hidden, head = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_HND = _projection(rngs, (hidden, heads, head), fan_in=hidden)
        self.k_HKD = _projection(rngs, (hidden, kv_heads, head), fan_in=hidden)
        self.v_HKD = _projection(rngs, (hidden, kv_heads, head), fan_in=hidden)
        self.o_NDH = _projection(rngs, (heads, head, hidden), fan_in=heads * head)
        self.q_norm = RMSNorm(head, config.rms_norm_eps)
        self.k_norm = RMSNorm(head, config.rms_norm_eps)
        self.rope_theta = config.rope_theta

    def __call__(self, x_RTH: jax.Array, positions_RT: jax.Array, attend: Attend, cache: Any) -> tuple[jax.Array, Any]:
        """The layer's mixed_RTH, and its new cache; ``attend`` decides what a token sees."""
        q_RTND = self.q_norm(_project(x_RTH, self.q_HND[...]))
        k_RTKD = self.k_norm(_project(x_RTH, self.k_HKD[...]))
        v_RTKD = _project(x_RTH, self.v_HKD[...])
        q_RTND = rotate(q_RTND, positions_RT, self.rope_theta)
        k_RTKD = rotate(k_RTKD, positions_RT, self.rope_theta)
        mixed_RTND, cache = attend(q_RTND, k_RTKD, v_RTKD, cache)
        return _project(mixed_RTND, self.o_NDH[...]), cache


class Mlp(nnx.Module):
    """SwiGLU feed-forward (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_HF = _projection(rngs, (hidden, inner), fan_in=hidden)
        self.up_HF = _projection(rngs, (hidden, inner), fan_in=hidden)
        self.down_FH = _projection(rngs, (inner, hidden), fan_in=inner)

    def __call__(self, x_RTH: jax.Array) -> jax.Array:
        """The feed-forward's output, [R, T, H]."""
        gated_RTF = jax.nn.silu(_project(x_RTH, self.gate_HF[...])) * _project(x_RTH, self.up_HF[...])
        return _project(gated_RTF, self.down_FH[...])


class Layer(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config, rngs)

    def __call__(self, x_RTH: jax.Array, positions_RT: jax.Array, attend: Attend, cache: Any) -> tuple[jax.Array, Any]:
        """The layer's output, [R, T, H], and its new cache."""
        mixed_RTH, cache = self.attention(self.attention_norm(x_RTH), positions_RT, attend, cache)
        x_RTH = x_RTH + mixed_RTH
        return x_RTH + self.mlp(self.mlp_norm(x_RTH)), cache


class Decoder(nnx.Module):
    """Embedding, L stacked layers, final norm and (unless tied) an output head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        scale = config.hidden_size**-0.5
        self.config = config
        self.embedding_VH = nnx.Param(
            scale * jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), jnp.float32)
        )
        self.layers = _stack_layers(config, rngs)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.head_VH = _projection(rngs, (config.vocab_size, config.hidden_size), fan_in=config.hidden_size)

    def __call__(
        self,
        tokens_RT: jax.Array,
        positions_RT: jax.Array,
        attend: Attend,
        caches: Any = None,
        *,
        gather: Gather = lambda layer: layer,
        remat: bool = False,
    ) -> tuple[jax.Array, Any]:
        """Final hidden states, and each layer's new cache stacked on a leading L axis.

        Args:
            tokens_RT: int32, token ids.
            positions_RT: int32, position of each token within its own sequence.
            attend: mixes values; it decides what a token may see and where keys are kept.
            caches: pytree with a leading L axis, given to ``attend`` one layer at a time.
            gather: makes one layer's weights whole, inside the scan.
            remat: recompute each layer in the backward pass instead of keeping its activations.

        Returns:
            hidden_RTH after the final norm, and the new caches.
        """
        graph, stacked = nnx.split(self.layers)

        def run_layer(x_RTH: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            weights, cache = layer
            return nnx.merge(graph, gather(weights))(x_RTH, positions_RT, attend, cache)

        body = jax.checkpoint(run_layer, prevent_cse=False) if remat else run_layer
        x_RTH, caches = jax.lax.scan(body, self.embedding_VH[...][tokens_RT], (stacked, caches))
        return self.norm(x_RTH), caches

    @property
    def output_VH(self) -> jax.Array:
        """The output head; the embedding itself when they are tied."""
        return self.embedding_VH[...] if self.config.tie_word_embeddings else self.head_VH[...]


def rotate(x_RTND: jax.Array, positions_RT: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (Su et al. 2021), in the half-split layout of Hugging Face."""
    half = x_RTND.shape[-1] // 2
    frequency_D2 = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_RT[:, :, None, None].astype(jnp.float32) * frequency_D2
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x_RTND.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_RTND.dtype)


def attend_masked(q_RTND: jax.Array, k_RCKD: jax.Array, v_RCKD: jax.Array, allowed_RTC: jax.Array) -> jax.Array:
    """Softmax attention over the allowed pairs, scores in float32; returns mixed_RTND."""
    rows, length, heads, head = q_RTND.shape
    kv_heads = k_RCKD.shape[2]
    q_RTKGD = q_RTND.reshape(rows, length, kv_heads, heads // kv_heads, head)
    scores = jnp.einsum("rtkgd,rckd->rkgtc", q_RTKGD, k_RCKD, preferred_element_type=jnp.float32) * head**-0.5
    scores = jnp.where(allowed_RTC[:, None, None], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_RCKD.dtype)
    return jnp.einsum("rkgtc,rckd->rtkgd", weights, v_RCKD).reshape(rows, length, heads, head)


def attend_packed(segments_RT: jax.Array) -> Attend:
    """Causal attention within each segment of packed rows; segment 0 is padding.

    Queries are taken in blocks, and a block is not compared with keys after its end: that saves up to
    half of the work.
    """
    length = segments_RT.shape[1]
    block = max(_SHORTEST_BLOCK, length // _MOST_BLOCKS)
    causal_TT = jnp.tril(jnp.ones((length, length), bool))
    allowed_RTT = causal_TT & (segments_RT[:, :, None] == segments_RT[:, None, :])

    def attend(q_RTND: jax.Array, k_RTKD: jax.Array, v_RTKD: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        mixed = []
        for start in range(0, length, block):
            end = min(start + block, length)
            allowed = allowed_RTT[:, start:end, :end]
            mixed.append(attend_masked(q_RTND[:, start:end], k_RTKD[:, :end], v_RTKD[:, :end], allowed))
        return jnp.concatenate(mixed, axis=1), cache

    return attend


def _project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply the axes of ``x`` after R and T into the leading axes of ``weight``.

    Done as one flat matrix product: XLA's CPU backend is a third slower on the same product with more axes.
    """
    inputs = x.ndim - 2
    size = math.prod(weight.shape[:inputs])
    flat = x.reshape(-1, size) @ weight.reshape(size, -1)
    return flat.reshape(*x.shape[:2], *weight.shape[inputs:])


def _projection(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int) -> nnx.Param:
    return nnx.Param(fan_in**-0.5 * jax.random.normal(rngs.params(), shape, jnp.float32))


def _stack_layers(config: ModelConfig, rngs: nnx.Rngs) -> Layer:
    @nnx.split_rngs(splits=config.num_hidden_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> Layer:
        return Layer(config, rngs)

    return make(rngs)
