"""The one transformer: for the learner's packed rows, and the sampler's KV cache, of every family in ``config``.

Layers are stacked on a leading axis and run in one ``lax.scan``, so that compile time and program size do not grow with
depth, and sharded weights can be gathered one layer at a time. What differs from layer to layer (whether it slides) is
scanned beside them.

The same code runs inside ``shard_map``, where a device may hold some of the heads, feed-forward channels and vocabulary
only (tensor parallelism: Shoeybi et al. 2019): see ``Parallel``.

Axes: R = rows, T = tokens of a row, H = hidden, F = feed-forward, N = query heads, K = key/value heads, D = head dim,
L = layers, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from learner.models.attention import Attend, Reach
from learner.models.config import ModelConfig
from learner.models.lora import Adapter, Lora, make_adapter
from learner.models.rope import Rotation, rotate, rotation

type Gather = Callable[[Any], Any]
"""Makes weights whole, or as whole as this device's tensor shard is, from this device's parts of them."""

type Remat = Literal["none", "dots", "full", "offload"]
"""What the backward pass computes again: nothing; all but matrix products; all but what enters each layer; the same,
with what enters kept in the host's memory."""

_ENTERS = "enters_layer"

REMAT: dict[Remat, Callable[..., Any] | None] = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_ENTERS],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


class Parallel(NamedTuple):
    """How a decoder is spread over devices, seen from one of them.

    Attributes:
        gather: applied to the weights of one layer, inside the scan.
        tensor: mesh axis over which heads, feed-forward channels and vocabulary are split; None if they are whole.
    """

    gather: Gather = lambda layer: layer
    tensor: str | None = None

    def total(self, part: jax.Array) -> jax.Array:
        """The sum of what each tensor shard computed."""
        return part if self.tensor is None else jax.lax.psum(part, self.tensor)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis (Zhang & Sennrich 2019), in float32."""

    def __init__(self, size: int, config: ModelConfig) -> None:
        self.offset = 1.0 if config.family.unit_offset else 0.0
        self.weight = nnx.Param(jnp.full((size,), 1.0 - self.offset, jnp.float32))
        self.eps = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x``, normed over its last axis; same shape and type."""
        x_f32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + self.eps)
        return (x_f32 * scale * (self.offset + self.weight[...])).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, lora: Lora | None) -> None:
        hidden, head = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_HND = _projection(rngs, (hidden, heads, head), fan_in=hidden)
        self.k_HKD = _projection(rngs, (hidden, kv_heads, head), fan_in=hidden)
        self.v_HKD = _projection(rngs, (hidden, kv_heads, head), fan_in=hidden)
        self.o_NDH = _projection(rngs, (heads, head, hidden), fan_in=heads * head)
        if config.family.qkv_bias:
            self.q_bias_ND = nnx.Param(jnp.zeros((heads, head), jnp.float32))
            self.k_bias_KD = nnx.Param(jnp.zeros((kv_heads, head), jnp.float32))
            self.v_bias_KD = nnx.Param(jnp.zeros((kv_heads, head), jnp.float32))
        if config.family.qk_norm:
            self.q_norm = RMSNorm(head, config)
            self.k_norm = RMSNorm(head, config)
        self.q_adapter = make_adapter(lora, "q_proj", self.q_HND, rngs)
        self.k_adapter = make_adapter(lora, "k_proj", self.k_HKD, rngs)
        self.v_adapter = make_adapter(lora, "v_proj", self.v_HKD, rngs)
        self.o_adapter = make_adapter(lora, "o_proj", self.o_NDH, rngs)
        self.config = config

    def __call__(
        self, x_RTH: jax.Array, turn: Rotation, attend: Attend, reach: Reach | None, slides: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        """This device's part of the layer's mixed_RTH, and the layer's new cache.

        ``reach`` is None where layers differ; then ``slides`` says at run time which kind this one is.
        """
        q_RTND = _project(x_RTH, self.q_HND, self.q_adapter)
        k_RTKD = _project(x_RTH, self.k_HKD, self.k_adapter)
        v_RTKD = _project(x_RTH, self.v_HKD, self.v_adapter)
        if self.config.family.qkv_bias:
            q_RTND += self.q_bias_ND[...].astype(q_RTND.dtype)
            k_RTKD += self.k_bias_KD[...].astype(k_RTKD.dtype)
            v_RTKD += self.v_bias_KD[...].astype(v_RTKD.dtype)
        if self.config.family.qk_norm:
            q_RTND, k_RTKD = self.q_norm(q_RTND), self.k_norm(k_RTKD)
        q_RTND, k_RTKD = rotate(q_RTND, turn) * self.config.query_scale, rotate(k_RTKD, turn)
        softcap = self.config.attn_logit_softcapping
        if reach is not None:
            mixed_RTND, cache = attend(q_RTND, k_RTKD, v_RTKD, cache, reach)
        else:
            mixed_RTND, cache = jax.lax.cond(
                slides,
                partial(attend, reach=Reach(self.config.sliding_window, softcap)),
                partial(attend, reach=Reach(None, softcap)),
                *(q_RTND, k_RTKD, v_RTKD, cache),
            )
        return _project(mixed_RTND, self.o_NDH, self.o_adapter), cache


class Mlp(nnx.Module):
    """Gated feed-forward (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, lora: Lora | None) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_HF = _projection(rngs, (hidden, inner), fan_in=hidden)
        self.up_HF = _projection(rngs, (hidden, inner), fan_in=hidden)
        self.down_FH = _projection(rngs, (inner, hidden), fan_in=inner)
        self.gate_adapter = make_adapter(lora, "gate_proj", self.gate_HF, rngs)
        self.up_adapter = make_adapter(lora, "up_proj", self.up_HF, rngs)
        self.down_adapter = make_adapter(lora, "down_proj", self.down_FH, rngs)
        self.activation = config.hidden_act

    def __call__(self, x_RTH: jax.Array) -> jax.Array:
        """This device's part of the feed-forward's output, [R, T, H]."""
        gate_RTF = _project(x_RTH, self.gate_HF, self.gate_adapter)
        gated_RTF = jax.nn.silu(gate_RTF) if self.activation == "silu" else jax.nn.gelu(gate_RTF, approximate=True)
        up_RTF = _project(x_RTH, self.up_HF, self.up_adapter)
        return _project(gated_RTF * up_RTF, self.down_FH, self.down_adapter)


class Layer(nnx.Module):
    """One transformer layer, normed before and, in some families, after each of its halves."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, lora: Lora | None) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config)
        self.attention = Attention(config, rngs, lora)
        self.mlp_norm = RMSNorm(config.hidden_size, config)
        self.mlp = Mlp(config, rngs, lora)
        if config.family.sandwich_norm:
            self.after_attention_norm = RMSNorm(config.hidden_size, config)
            self.after_mlp_norm = RMSNorm(config.hidden_size, config)
        self.is_sandwich = config.family.sandwich_norm

    def __call__(
        self,
        x_RTH: jax.Array,
        turn: Rotation,
        attend: Attend,
        reach: Reach | None,
        slides: jax.Array,
        cache: Any,
        parallel: Parallel,
    ) -> tuple[jax.Array, Any]:
        """The layer's output, [R, T, H], and its new cache."""
        mixed_RTH, cache = self.attention(self.attention_norm(x_RTH), turn, attend, reach, slides, cache)
        mixed_RTH = parallel.total(mixed_RTH)
        x_RTH = x_RTH + (self.after_attention_norm(mixed_RTH) if self.is_sandwich else mixed_RTH)
        out_RTH = parallel.total(self.mlp(self.mlp_norm(x_RTH)))
        return x_RTH + (self.after_mlp_norm(out_RTH) if self.is_sandwich else out_RTH), cache


class Decoder(nnx.Module):
    """Embedding, L stacked layers, final norm and (unless tied) an output head; with ``lora``, adapters besides."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, lora: Lora | None = None) -> None:
        scale = config.hidden_size**-0.5
        self.config = config
        self.embedding_VH = nnx.Param(
            scale * jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), jnp.float32)
        )
        self.layers = _stack_layers(config, rngs, lora)
        self.norm = RMSNorm(config.hidden_size, config)
        if not config.tie_word_embeddings:
            self.head_VH = _projection(rngs, (config.vocab_size, config.hidden_size), fan_in=config.hidden_size)

    def __call__(
        self,
        tokens_RT: jax.Array,
        positions_RT: jax.Array,
        attend: Attend,
        caches: Any = None,
        *,
        parallel: Parallel = Parallel(),  # noqa: B008 - it is immutable
        remat: Remat = "none",
    ) -> tuple[jax.Array, Any]:
        """Final hidden states, and each layer's new cache stacked on a leading L axis.

        Args:
            tokens_RT: int32, token ids.
            positions_RT: int32, position of each token within its own sequence.
            attend: mixes values; it decides what a token may see and where keys are kept.
            caches: pytree with a leading L axis, given to ``attend`` one layer at a time.
            parallel: how the decoder is spread over devices.
            remat: what the backward pass computes again instead of keeping it.

        Returns:
            hidden_RTH after the final norm, in the type of the embedding, and the new caches.
        """
        config = self.config
        graph, stacked = nnx.split(self.layers)
        turn = rotation(positions_RT, config.head_dim, config.rope_theta, config.rope_scaling)
        local_turn = turn
        if config.rope_local_base_freq is not None:
            local_turn = rotation(positions_RT, config.head_dim, config.rope_local_base_freq, None)
        reach = _common_reach(config)

        def run_layer(x_RTH: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            weights, slides, cache = layer
            x_RTH = checkpoint_name(x_RTH, _ENTERS)
            own_turn = turn
            if config.rope_local_base_freq is not None:
                own_turn = jax.tree.map(partial(jnp.where, slides), local_turn, turn)
            module = nnx.merge(graph, parallel.gather(weights))
            return module(x_RTH, own_turn, attend, reach, slides, cache, parallel)

        policy = REMAT[remat]
        body = run_layer if policy is None else jax.checkpoint(run_layer, prevent_cse=False, policy=policy)
        slides_L = jnp.asarray(config.slides)
        x_RTH, caches = jax.lax.scan(body, self._embed(tokens_RT, parallel), (stacked, slides_L, caches))
        return self.norm(x_RTH), caches

    @property
    def output_VH(self) -> jax.Array:
        """The output head; the embedding itself when they are tied."""
        return self.embedding_VH[...] if self.config.tie_word_embeddings else self.head_VH[...]

    def _embed(self, tokens_RT: jax.Array, parallel: Parallel) -> jax.Array:
        table_VH = self.embedding_VH[...]
        if parallel.tensor is None:
            x_RTH = table_VH[tokens_RT]
        else:
            rows = len(table_VH)
            local_RT = tokens_RT - rows * jax.lax.axis_index(parallel.tensor)
            is_here_RT1 = ((local_RT >= 0) & (local_RT < rows))[..., None]
            x_RTH = parallel.total(jnp.where(is_here_RT1, table_VH[jnp.clip(local_RT, 0, rows - 1)], 0))
        if self.config.family.scaled_embedding:
            # Hugging Face rounds the factor to the type of the weights.
            x_RTH = x_RTH * jnp.asarray(math.sqrt(self.config.hidden_size), x_RTH.dtype)
        return x_RTH


def _common_reach(config: ModelConfig) -> Reach | None:
    """What all layers reach; None where some slide and some do not."""
    if not any(config.slides):
        return Reach(None, config.attn_logit_softcapping)
    return Reach(config.sliding_window, config.attn_logit_softcapping) if all(config.slides) else None


def _project(x: jax.Array, weight: nnx.Param, adapter: Adapter | None) -> jax.Array:
    """Multiply the axes of ``x`` after R and T into the leading axes of ``weight``, as its adapter changes it."""
    product = _multiply(x, weight[...])
    if adapter is None:
        return product
    # The scale goes where the numbers are fewest.
    inner_RTA = adapter.scale * _multiply(x, adapter.into.astype(x.dtype))
    return product + _multiply(inner_RTA, adapter.out.astype(x.dtype))


def _multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Done as one flat matrix product: XLA's CPU backend is a third slower on the same product with more axes."""
    inputs, shape = x.ndim - 2, weight.shape
    size = math.prod(shape[:inputs])
    flat = x.reshape(-1, size) @ weight.reshape(size, -1)
    return flat.reshape(*x.shape[:2], *shape[inputs:])


def _projection(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int) -> nnx.Param:
    return nnx.Param(fan_in**-0.5 * jax.random.normal(rngs.params(), shape, jnp.float32))


def _stack_layers(config: ModelConfig, rngs: nnx.Rngs, lora: Lora | None) -> Layer:
    @nnx.split_rngs(splits=config.num_hidden_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> Layer:
        return Layer(config, rngs, lora)

    return make(rngs)
