"""The compiled program of the local engine: one function, a small ladder of fixed shapes.

``extend`` runs the next tokens of some slots through the decoder, appends their keys to the
cache and samples one token behind the last of each row. A chunk of 1 is decoding; longer
chunks are prefill. Everything is compiled ahead of time: a shape outside the ladder cannot run.

Axes: R = rows, T = tokens of a row (the chunk), S = cache slots, C = cached positions,
L = layers, N = query heads, K = key/value heads, G = N/K, D = head dim, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from actors.samplers.filters import EVERY_TOKEN, filtered, filtering
from actors.samplers.local.cache import SlotCache
from learner.models.attention import Attend, Reach, softcapped
from learner.models.config import ModelConfig
from learner.models.decoder import Decoder
from learner.models.weights import abstract_model

_MASKED = -1e30
_PREFILL_CHUNKS = (32, 128)
_PREFILL_TOKENS = 512
"""Most tokens of one prefill call: it bounds how long decoding waits for it."""
_FEW_ROWS = 8
"""Rows of the small decoding shape: a lone request should not pay for all slots."""
BLOCK = 64
"""Cached positions that attention visits at a time."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One compiled shape: R rows of T tokens."""

    rows: int
    chunk: int


class Rows(NamedTuple):
    """The rows of one call; unused rows at the end have count 0.

    Attributes:
        tokens_RT: int32, the tokens to run.
        slots_R: int32, the slot of each row.
        starts_R: int32, position of each row's first token: how many keys its slot holds.
        counts_R: int32, valid tokens of each row.
        seeds_R2: uint32, the raw random key of each request.
        temperatures_R: float32; 0 is greedy.
        top_ks_R: int32, see ``actors.samplers.filters``; so are the next two.
        top_ps_R: float32.
        min_ps_R: float32.
    """

    tokens_RT: Any
    slots_R: Any
    starts_R: Any
    counts_R: Any
    seeds_R2: Any
    temperatures_R: Any
    top_ks_R: Any
    top_ps_R: Any
    min_ps_R: Any


def ladder(slots: int) -> tuple[Shape, ...]:
    """The shapes of an engine: three row counts for decoding, two chunk lengths for prefill with two each."""
    shapes = {Shape(min(rows, slots), 1) for rows in (_FEW_ROWS, max(1, slots // 2), slots)}
    for chunk in _PREFILL_CHUNKS:
        rows = min(slots, _PREFILL_TOKENS // chunk)
        shapes |= {Shape(rows, chunk), Shape(max(1, rows // 4), chunk)}
    return tuple(sorted(shapes, key=lambda shape: (shape.chunk, shape.rows)))


class Program:
    """The compiled functions of one engine, over the leaves of a parameter tree.

    Flat leaves, because flattening the parameter tree on every call costs more than the call's own dispatch.
    """

    def __init__(self, config: ModelConfig, cache: SlotCache, shapes: tuple[Shape, ...], *, filters: bool) -> None:
        self.shapes = shapes
        self._cache = cache
        graph, self._abstract = abstract_model(config)
        self._treedef = jax.tree.structure(self._abstract)
        self._make = partial(_extend, graph, self._treedef, filters)
        self._extend: dict[Shape, Callable[..., Any]] = {}
        self._copy: Callable[..., Any] | None = None

    @property
    def longest_chunk(self) -> int:
        """Most tokens of a row in one call."""
        return max(shape.chunk for shape in self.shapes)

    def warm_up(self, leaves: list[jax.Array]) -> None:
        """Compile every shape, two at a time, and run each once with these parameters."""
        with ThreadPoolExecutor(2) as pool:
            compiled = pool.map(self._compile, self.shapes)
            self._extend = dict(zip(self.shapes, compiled, strict=True))
        cache, slot = _struct(self._cache.keys_LSKCD), jax.ShapeDtypeStruct((), jnp.int32)
        copy = jax.jit(_copy_slot, donate_argnums=(0, 1))
        self._copy = copy.lower(cache, cache, slot, slot).compile()
        for shape in self.shapes:
            self.extend(leaves, shape, self.empty_rows(shape))
        self.copy_slot(0, 0)

    def shape_for(self, rows: int, chunk: int) -> Shape:
        """The smallest shape with this chunk that holds ``rows``."""
        return next(shape for shape in self.shapes if shape.chunk == chunk and shape.rows >= rows)

    def chunk_for(self, count: int) -> int:
        """The shortest chunk that holds ``count`` tokens, else the longest."""
        chunks = sorted({shape.chunk for shape in self.shapes})
        return next((chunk for chunk in chunks if chunk >= count), chunks[-1])

    def most_rows(self, chunk: int) -> int:
        """Most rows of one call with this chunk."""
        return max(shape.rows for shape in self.shapes if shape.chunk == chunk)

    def empty_rows(self, shape: Shape) -> Rows:
        """Rows that do nothing: they write behind the context, where nothing is ever read."""
        behind = self._cache.tokens_SC.shape[1] - self.longest_chunk
        return Rows(
            tokens_RT=np.zeros((shape.rows, shape.chunk), np.int32),
            slots_R=np.zeros(shape.rows, np.int32),
            starts_R=np.full(shape.rows, behind, np.int32),
            counts_R=np.zeros(shape.rows, np.int32),
            seeds_R2=np.zeros((shape.rows, 2), np.uint32),
            temperatures_R=np.ones(shape.rows, np.float32),
            top_ks_R=np.full(shape.rows, EVERY_TOKEN, np.int32),
            top_ps_R=np.ones(shape.rows, np.float32),
            min_ps_R=np.zeros(shape.rows, np.float32),
        )

    def extend(self, leaves: list[jax.Array], shape: Shape, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Run one call; returns the sampled tokens int32[R] and their log-probabilities float32[R]."""
        cache = self._cache
        cache.keys_LSKCD, cache.values_LSKCD, packed = self._extend[shape](
            leaves, cache.keys_LSKCD, cache.values_LSKCD, rows
        )
        token_R, logprob_R = np.asarray(packed)
        return token_R, logprob_R.view(np.float32)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy all keys and values of one slot to another."""
        cache = self._cache
        assert self._copy is not None
        cache.keys_LSKCD, cache.values_LSKCD = self._copy(
            cache.keys_LSKCD, cache.values_LSKCD, np.int32(source), np.int32(target)
        )

    def _compile(self, shape: Shape) -> Callable[..., Any]:
        cache = _struct(self._cache.keys_LSKCD)
        leaves = [_struct(leaf) for leaf in jax.tree.leaves(self._abstract)]
        rows = Rows(*(_struct(array) for array in self.empty_rows(shape)))
        extend = jax.jit(self._make, donate_argnums=(1, 2))
        return extend.lower(leaves, cache, cache, rows).compile()


def _extend(
    graph: nnx.GraphDef[Decoder],
    treedef: Any,
    filters: bool,
    leaves: list[jax.Array],
    keys_LSKCD: jax.Array,
    values_LSKCD: jax.Array,
    rows: Rows,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
    chunk = rows.tokens_RT.shape[1]
    positions_RT = rows.starts_R[:, None] + jnp.arange(chunk)
    attend = _attend_slots(keys_LSKCD, values_LSKCD, rows)
    hidden_RTH, new = model(rows.tokens_RT, positions_RT, attend, jnp.arange(len(keys_LSKCD)))
    keys_LSKCD, values_LSKCD = _append(rows, (keys_LSKCD, values_LSKCD), new)
    last_R = jnp.maximum(rows.counts_R - 1, 0)
    hidden_RH = jnp.take_along_axis(hidden_RTH, last_R[:, None, None], axis=1)[:, 0]
    logits_RV = jnp.einsum("rh,vh->rv", hidden_RH, model.output_VH, preferred_element_type=jnp.float32)
    logits_RV = softcapped(logits_RV, model.config.final_logit_softcapping)
    token_R, logprob_R = sample(logits_RV, rows.starts_R + rows.counts_R, rows, filters=filters)
    # One array, so that one transfer brings both to the host.
    return keys_LSKCD, values_LSKCD, jnp.stack([token_R, jax.lax.bitcast_convert_type(logprob_R, jnp.int32)])


def _attend_slots(keys_LSKCD: jax.Array, values_LSKCD: jax.Array, rows: Rows) -> Attend:
    """Attention over a slot's cached keys and, causally, the chunk's own; each layer returns its new keys.

    The cache is only read here: written inside the scan over layers, all of it would be copied on every call.
    Cached positions are visited in blocks, up to the longest row's, with a running softmax (Milakov &
    Gimelshein 2018): short rows do not pay for the context length, and no shape depends on it.
    """
    cached_R = jnp.where(rows.counts_R > 0, rows.starts_R, 0)
    blocks = (jnp.max(cached_R) + BLOCK - 1) // BLOCK

    def attend(
        q_RTND: jax.Array, k_RTKD: jax.Array, v_RTKD: jax.Array, cache: Any, reach: Reach
    ) -> tuple[jax.Array, Any]:
        count, chunk, heads, head = q_RTND.shape
        q_RKGTD = q_RTND.reshape(count, chunk, k_RTKD.shape[2], -1, head).transpose(0, 2, 3, 1, 4)
        positions_RT = rows.starts_R[:, None] + jnp.arange(chunk)
        k_RKTD, v_RKTD = k_RTKD.swapaxes(1, 2), v_RTKD.swapaxes(1, 2)

        def visit(block: jax.Array, running: _Running) -> _Running:
            def read(array_LSKCD: jax.Array) -> jax.Array:
                sizes = (1, 1, *array_LSKCD.shape[2:3], BLOCK, head)
                row = partial(jax.lax.dynamic_slice, array_LSKCD, slice_sizes=sizes)
                return jax.vmap(lambda slot: row((cache, slot, 0, block * BLOCK, 0))[0, 0])(rows.slots_R)

            at_C = block * BLOCK + jnp.arange(BLOCK)
            cached_RC = at_C < cached_R[:, None]
            # A weight of 0 does not silence garbage that is not finite: values are masked as well as scores.
            values_RKCD = jnp.where(cached_RC[:, None, :, None], read(values_LSKCD), 0.0)
            allowed_RTC = cached_RC[:, None]
            if reach.window is not None:
                allowed_RTC = allowed_RTC & (positions_RT[:, :, None] - at_C < reach.window)
            return _mix(running, q_RKGTD, read(keys_LSKCD), values_RKCD, allowed_RTC[:, None, None], reach.softcap)

        nothing = _Running(
            highest_RKGT=jnp.full(q_RKGTD.shape[:-1], _MASKED),
            total_RKGT=jnp.zeros(q_RKGTD.shape[:-1]),
            mixed_RKGTD=jnp.zeros(q_RKGTD.shape),
        )
        distance_TT = jnp.arange(chunk)[:, None] - jnp.arange(chunk)
        seen_TT = (distance_TT >= 0) & (distance_TT < (reach.window or chunk))
        running = _mix(nothing, q_RKGTD, k_RKTD, v_RKTD, seen_TT, reach.softcap)
        running = jax.lax.fori_loop(0, blocks, visit, running)
        mixed_RKGTD = running.mixed_RKGTD / running.total_RKGT[..., None]
        mixed_RTND = mixed_RKGTD.transpose(0, 3, 1, 2, 4).reshape(count, chunk, heads, head)
        return mixed_RTND.astype(q_RTND.dtype), (k_RKTD, v_RKTD)

    return attend


class _Running(NamedTuple):
    """A softmax average over the keys visited so far."""

    highest_RKGT: jax.Array
    total_RKGT: jax.Array
    mixed_RKGTD: jax.Array


def _mix(
    running: _Running,
    q_RKGTD: jax.Array,
    k_RKCD: jax.Array,
    v_RKCD: jax.Array,
    allowed: jax.Array,
    softcap: float | None,
) -> _Running:
    """Add keys to the average; ``allowed`` broadcasts to [R, K, G, T, C]."""
    scores = jnp.einsum("rkgtd,rkcd->rkgtc", q_RKGTD, k_RKCD, preferred_element_type=jnp.float32)
    scores = jnp.where(allowed, softcapped(scores, softcap), _MASKED)
    highest_RKGT = jnp.maximum(running.highest_RKGT, scores.max(axis=-1))
    kept_RKGT = jnp.exp(running.highest_RKGT - highest_RKGT)
    weights = jnp.exp(scores - highest_RKGT[..., None])
    mixed_RKGTD = jnp.einsum("rkgtc,rkcd->rkgtd", weights, v_RKCD, preferred_element_type=jnp.float32)
    return _Running(
        highest_RKGT,
        running.total_RKGT * kept_RKGT + weights.sum(axis=-1),
        running.mixed_RKGTD * kept_RKGT[..., None] + mixed_RKGTD,
    )


def _append(rows: Rows, cache: tuple[jax.Array, jax.Array], new: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
    """Write each row's new keys and values behind those of its slot, in place."""

    def write(row: jax.Array, cache: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
        at = (0, rows.slots_R[row], 0, rows.starts_R[row], 0)
        chunks = (jax.lax.dynamic_slice_in_dim(array, row, 1, axis=1) for array in new)
        return tuple(jax.lax.dynamic_update_slice(a, chunk, at) for a, chunk in zip(cache, chunks, strict=True))

    keys_LSKCD, values_LSKCD = jax.lax.fori_loop(0, len(rows.slots_R), write, cache)
    return keys_LSKCD, values_LSKCD


def sample(logits_RV: jax.Array, positions_R: jax.Array, rows: Rows, *, filters: bool) -> tuple[jax.Array, jax.Array]:
    """Draw one token per row and its log-probability under the distribution drawn from.

    A row's randomness is its own key folded with the position of the token: what else is in the batch,
    and how often the request was interrupted, does not change it.

    Args:
        logits_RV: the model's.
        positions_R: int32, of the tokens drawn.
        rows: how to sample.
        filters: whether a row may filter; if not, the program holds no filter.

    Returns:
        token_R int32, logprob_R float32 (of temperature-scaled and filtered logits; of the logits themselves when
        greedy).
    """
    temperature_R = jnp.where(rows.temperatures_R == 0.0, 1.0, rows.temperatures_R)
    bounds = (rows.top_ks_R, rows.top_ps_R, rows.min_ps_R)

    def from_all(logits_RV: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _draw(logits_RV.astype(jnp.float32) / temperature_R[:, None], positions_R, rows)

    def from_some(logits_RV: jax.Array) -> tuple[jax.Array, jax.Array]:
        scaled_RV = logits_RV.astype(jnp.float32) / temperature_R[:, None]
        return _draw(filtered(scaled_RV, *bounds), positions_R, rows)

    if not filters:
        return from_all(logits_RV)
    # Both branches hold the whole draw: a call without filters neither pays for them nor differs by a bit.
    return jax.lax.cond(filtering(logits_RV.shape[-1], *bounds).any(), from_some, from_all, logits_RV)


def _draw(logits_RV: jax.Array, positions_R: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    def draw(seed_2: jax.Array, position: jax.Array, logits_V: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        return jax.random.categorical(jax.random.fold_in(key, position), logits_V)

    drawn_R = jax.vmap(draw)(rows.seeds_R2, positions_R, logits_RV)
    token_R = jnp.where(rows.temperatures_R == 0.0, jnp.argmax(logits_RV, axis=-1), drawn_R).astype(jnp.int32)
    logprob_RV = jax.nn.log_softmax(logits_RV, axis=-1)
    return token_R, jnp.take_along_axis(logprob_RV, token_R[:, None], axis=-1)[:, 0]


def _copy_slot(keys_LSKCD: jax.Array, values_LSKCD: jax.Array, source: jax.Array, target: jax.Array) -> tuple[Any, Any]:
    def copy(array: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice_in_dim(array, source, 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(array, row, target, axis=1)

    return copy(keys_LSKCD), copy(values_LSKCD)


def _struct(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
