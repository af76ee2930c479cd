"""What a token attends to: softmax attention over packed rows, as XLA compiles it and as a TPU kernel.

Axes: R = rows, T = tokens of a row, C = tokens that are attended to, N = query heads, K = key/value heads, G = N/K,
D = head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

_MASKED = -1e30
"""Score of a masked pair; finite, so that a row with nothing to attend to stays finite."""

_SHORTEST_BLOCK = 64
_MOST_BLOCKS = 8
"""Blocks of queries in packed attention: each is unrolled, so their number bounds the program's size."""


_LANES = 128
"""Width of a TPU's vectors."""


class Reach(NamedTuple):
    """What a layer's attention is like, besides its weights.

    Attributes:
        window: tokens that a token sees, itself included; None for all before it.
        softcap: scores are bounded to ± this by tanh; None: they are not.
    """

    window: int | None = None
    softcap: float | None = None


class Attend(Protocol):
    """Mixes values; it decides what a token may see and where keys are kept."""

    def __call__(
        self, q_RTND: jax.Array, k_RTKD: jax.Array, v_RTKD: jax.Array, cache: Any, reach: Reach
    ) -> tuple[jax.Array, Any]:
        """(queries that are scaled already, keys, values, the layer's cache) → (mixed_RTND, the layer's new cache)."""
        ...


def softcapped(scores: jax.Array, cap: float | None) -> jax.Array:
    """``cap · tanh(scores / cap)`` (Gemma 2: Riviere et al. 2024, section 2); the scores themselves without a cap."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def attend_masked(
    q_RTND: jax.Array, k_RCKD: jax.Array, v_RCKD: jax.Array, allowed_RTC: jax.Array, softcap: float | None = None
) -> jax.Array:
    """Softmax attention over the allowed pairs, scores in float32; returns mixed_RTND."""
    rows, length, heads, head = q_RTND.shape
    kv_heads = k_RCKD.shape[2]
    q_RTKGD = q_RTND.reshape(rows, length, kv_heads, heads // kv_heads, head)
    scores = jnp.einsum("rtkgd,rckd->rkgtc", q_RTKGD, k_RCKD, preferred_element_type=jnp.float32)
    scores = jnp.where(allowed_RTC[:, None, None], softcapped(scores, softcap), _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_RCKD.dtype)
    return jnp.einsum("rkgtc,rckd->rtkgd", weights, v_RCKD).reshape(rows, length, heads, head)


def attend_packed(segments_RT: jax.Array) -> Attend:
    """Causal attention within each segment of packed rows; segment 0 is padding.

    Queries are taken in blocks, and a block is not compared with keys after its end or before its window: that saves
    half of the work or more.
    """
    length = segments_RT.shape[1]
    block = max(_SHORTEST_BLOCK, length // _MOST_BLOCKS)
    distance_TT = jnp.arange(length)[:, None] - jnp.arange(length)
    same_RTT = segments_RT[:, :, None] == segments_RT[:, None, :]

    def attend(
        q_RTND: jax.Array, k_RTKD: jax.Array, v_RTKD: jax.Array, cache: Any, reach: Reach
    ) -> tuple[jax.Array, Any]:
        window = reach.window or length
        allowed_RTT = same_RTT & (distance_TT >= 0) & (distance_TT < window)
        mixed = []
        for start in range(0, length, block):
            queries = slice(start, min(start + block, length))
            keys = slice(max(0, start - window + 1), queries.stop)
            mixed.append(
                attend_masked(
                    q_RTND[:, queries], k_RTKD[:, keys], v_RTKD[:, keys], allowed_RTT[:, queries, keys], reach.softcap
                )
            )
        return jnp.concatenate(mixed, axis=1), cache

    return attend


def attend_splash(segments_RT: jax.Array, *, interpret: bool = False) -> Attend:
    """The same as :func:`attend_packed` in one kernel: JAX's "splash" kernel for TPUs.

    FlashAttention (Dao et al. 2022) over the blocks that a mask leaves: scores never leave the chip.

    Args:
        segments_RT: int32; T is a multiple of 128.
        interpret: run the kernel step by step on any device, for tests.
    """
    length = segments_RT.shape[1]
    if length % _LANES:
        raise ValueError(f"a row has {length} tokens; the splash kernel needs a multiple of {_LANES}")
    block = next(size for size in (512, 256, _LANES) if length % size == 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    segments = splash.SegmentIds(segments_RT, segments_RT)

    def attend(
        q_RTND: jax.Array, k_RTKD: jax.Array, v_RTKD: jax.Array, cache: Any, reach: Reach
    ) -> tuple[jax.Array, Any]:
        rows, _, heads, head = q_RTND.shape
        kv_heads = k_RTKD.shape[2]
        square = (length, length)
        one = splash.CausalMask(square) if reach.window is None else splash.LocalMask(square, (reach.window - 1, 0), 0)
        kernel = splash.make_splash_mqa_single_device(
            splash.MultiHeadMask([one] * (heads // kv_heads)),
            block_sizes=sizes,
            attn_logits_soft_cap=reach.softcap,
            interpret=interpret,
        )
        q_RKGTD = q_RTND.reshape(rows, length, kv_heads, heads // kv_heads, head).transpose(0, 2, 3, 1, 4)
        by_head = jax.vmap(kernel, in_axes=(0, 0, 0, None))
        mixed_RKGTD = jax.vmap(by_head)(q_RKGTD, k_RTKD.swapaxes(1, 2), v_RTKD.swapaxes(1, 2), segments)
        mixed_RTND = mixed_RKGTD.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, head)
        return mixed_RTND.astype(q_RTND.dtype), cache

    return attend


type Kernel = Literal["xla", "splash"]

KERNELS: dict[Kernel, Callable[[jax.Array], Attend]] = {"xla": attend_packed, "splash": attend_splash}
"""int32 segments[R, T] → attention within them, by name."""


def suitable_kernel(platform: str, lengths: Iterable[int]) -> Kernel:
    """The kernel for a platform, such as ``tpu``, that takes rows of all these lengths."""
    return "splash" if platform == "tpu" and all(length % _LANES == 0 for length in lengths) else "xla"
