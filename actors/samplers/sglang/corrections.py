"""Repairs of SGLang-Jax 0.1.0rc0, each with its cause. They touch no other release: ``check_release`` comes first.

What our way of running it does not meet is not repaired. Its overlapped schedule hands buffers to the device that the
next step overwrites: it is off, and nothing outlives its step. A batch must not mix requests with and without
log-probabilities: all ask for them. Its tokenizer manager repeats log-probabilities and loses track of aborted
requests, and its loop spins when idle: neither runs here.
"""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, reshard

from actors.samplers.filters import EVERY_TOKEN, filtered, filtering
from actors.samplers.sglang.release import check_release

_log = logging.getLogger(__name__)


def correct_package() -> None:
    """Repair the imported package, once for the process.

    Raises:
        ReleaseError: the release is not the one these repairs were written for.
    """
    check_release()
    from sgl_jax.srt.layers.embeddings import Llama3RotaryEmbedding
    from sgl_jax.srt.layers.sampler import Sampler
    from sgl_jax.srt.managers.scheduler import Scheduler

    Sampler._regular_sampling = sample
    Llama3RotaryEmbedding.__init__ = _stretched(Llama3RotaryEmbedding.__init__)
    Scheduler.pause_generation = _pause_with_fresh_prefills(Scheduler.pause_generation)


def correct_scheduler(scheduler: Any, context_length: int) -> None:
    """Repair one scheduler, made for ``context_length`` tokens."""
    # It keeps six positions of the context to itself, though the last token sampled needs no key.
    scheduler.max_req_input_len = context_length - 1
    scheduler.max_req_len = context_length + 1
    # When a thread of it fails it sends SIGQUIT to its parent, which in a Ray actor is the node's raylet.
    scheduler.parent_process = scheduler.tp_worker.parent_process = _NoParent()


def sample(self: Any, operands: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    """One token for every row by the row's own seed, and the log-probabilities of what it was drawn from.

    Takes the place of ``Sampler._regular_sampling``. Its seeded draw makes its noise of 24 bits of a product hash and
    adds 1e-9 to every probability: it follows another distribution than the one whose log-probabilities are reported,
    and neighbouring seeds are not independent. Its draw without seeds has one key for the whole batch, so that a
    sample depends on who else is in it. Top-p is measured before the temperature is applied, min-p compares logits as
    if they were probabilities and puts 0 in place of what it drops, and the log-probabilities know of no filter.

    Args:
        self: the engine's sampler.
        operands: as the original: logits [B, V], then what to sample (a ``SamplingMetadata``); top_k 1 means greedy.

    Returns:
        int32[B], the tokens; [B, V], the log-probabilities.
    """
    logits_BV, metadata, *_ = operands
    scaled_BV = reshard(logits_BV, NamedSharding(self.mesh, PartitionSpec("data", None))).astype(jnp.float32)
    scaled_BV = scaled_BV / metadata.temperatures
    tokens_B, logprobs_BV = draw(
        scaled_BV, metadata.sampling_seeds, metadata.positions, metadata.top_ks, metadata.top_ps, metadata.min_ps
    )
    logprobs_BV = logprobs_BV.clip(min=jnp.finfo(logits_BV.dtype).min).astype(logits_BV.dtype)
    return (
        reshard(tokens_B, NamedSharding(self.mesh, PartitionSpec("data"))),
        reshard(logprobs_BV, NamedSharding(self.mesh, PartitionSpec("data", "tensor"))),
    )


def draw(
    scaled_BV: jax.Array,
    seeds_B: jax.Array,
    positions_B: jax.Array,
    top_ks_B: jax.Array,
    top_ps_B: jax.Array,
    min_ps_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Tokens int32[B] and log-probabilities float32[B, V] of temperature-scaled logits; top_k 1 means greedy."""
    greedy_B = top_ks_B == 1  # of the rows that only fill up the batch, too
    bounds = (jnp.where(greedy_B, EVERY_TOKEN, top_ks_B), top_ps_B, min_ps_B)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(0), seed.astype(jnp.uint32))
        key = jax.random.fold_in(key, position.astype(jnp.uint32))
        return jax.random.gumbel(key, (scaled_BV.shape[-1],), jnp.float32)

    kept_BV = jax.lax.cond(
        filtering(scaled_BV.shape[-1], *bounds).any(),
        lambda logits_BV: filtered(logits_BV, *bounds),
        lambda logits_BV: logits_BV,
        scaled_BV,
    )
    drawn_B = jnp.argmax(kept_BV + jax.vmap(noise)(seeds_B, positions_B), axis=-1)
    tokens_B = jnp.where(greedy_B, jnp.argmax(scaled_BV, axis=-1), drawn_B).astype(jnp.int32)
    return tokens_B, jax.nn.log_softmax(kept_BV, axis=-1)


def _pause_with_fresh_prefills(pause: Any) -> Any:
    """A ``pause_generation`` that does not lose what was prefilled in the step before.

    The original retracts the running batch, then drops the last one; requests whose prompt ran in that one have not
    joined the running batch yet and are never heard of again. It also leaves the emptied batch marked as full,
    after which nothing is admitted any more.
    """
    if hasattr(pause, "corrects"):
        return pause

    def pause_generation(self: Any, request: Any) -> None:
        last = self.last_batch
        if request.mode == "retract" and last is not None and last.forward_mode.is_extend():
            chunked = self._prepare_chunked_reqs_to_exclude()
            last.filter_batch(chunked_req_to_exclude=chunked)
            if not last.is_empty() and last is not self.running_batch:
                if self.running_batch.is_empty():
                    self.running_batch = last
                else:
                    self.running_batch.merge_batch(last)
        pause(self, request)
        for info in self.running_batch.reqs_info:
            info.batch_is_full = False

    pause_generation.corrects = pause  # type: ignore[attr-defined]
    return pause_generation


def _stretched(make: Any) -> Any:
    """An ``__init__`` of ``Llama3RotaryEmbedding`` after which its frequencies are used.

    It overrides a method that its base class calls no more, so that Llama 3.1 and later run with the frequencies of
    Llama 3. Source of the formula: ``_compute_llama3_parameters`` of the Transformers library.
    """
    if hasattr(make, "corrects"):
        return make

    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        frequencies = self._inv_freq_np
        turns = self.orig_max_position * frequencies / (2 * np.pi)  # within the original context
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        self._inv_freq_np = (frequencies * (kept + (1 - kept) / self.scaling_factor)).astype(np.float32)

    init.corrects = make  # type: ignore[attr-defined]
    return init


class _NoParent:
    """Hears the signal that the engine means for its parent; the engine's own failure is told by our thread."""

    def send_signal(self, signal: int) -> None:
        _log.error("SGLang-Jax asked to end its parent process with signal %d; it was not passed on", signal)
