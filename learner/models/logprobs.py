"""Token log-probabilities from hidden states, without ever holding ``[tokens, vocabulary]`` whole.

Tokens are taken in chunks; the logits of a chunk are recomputed in the backward pass.

Axes: M = tokens, B = tokens of a chunk, H = hidden, V = vocabulary, or this device's share of it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from learner.models.attention import softcapped


class TokenScores(NamedTuple):
    """What the policy says about given tokens.

    Attributes:
        logprob: float32[M], log-probability of the token.
        entropy: float32[M], entropy in nats of the distribution it came from.
        greedy: bool[M], whether it is the most probable token.
        value: float32[M], what the value head says of the position that the token is predicted from; None without one.
    """

    logprob: jax.Array
    entropy: jax.Array
    greedy: jax.Array
    value: jax.Array | None = None


def token_scores(
    hidden_MH: jax.Array,
    output_VH: jax.Array,
    targets_M: jax.Array,
    *,
    temperature: float,
    softcap: float | None = None,
    tensor: str | None = None,
    chunk_entries: int = 2**22,
) -> TokenScores:
    """Score ``targets_M`` (int32) under ``softmax(cap(hidden @ output.T) / temperature)``, in float32.

    Args:
        hidden_MH: final hidden states, one per predicted token.
        output_VH: the output head, or this device's share of its rows.
        targets_M: the token to score at each position.
        temperature: divides the logits, as it does in the sampler.
        softcap: bounds the logits before, see ``attention.softcapped``.
        tensor: mesh axis over which the vocabulary is split; None if it is whole.
        chunk_entries: most entries of a chunk's logits; bounds the peak memory.
    """
    total, vocabulary = len(targets_M), len(output_VH)
    chunk = max(1, chunk_entries // vocabulary)

    def score(hidden_BH: jax.Array, targets_B: jax.Array) -> TokenScores:
        logits_BV = jnp.einsum("bh,vh->bv", hidden_BH, output_VH, preferred_element_type=jnp.float32)
        return _scores(softcapped(logits_BV, softcap) / temperature, targets_B, tensor)

    if total <= chunk:
        return score(hidden_MH, targets_M)
    padding = -total % chunk
    hidden_CBH = jnp.pad(hidden_MH, ((0, padding), (0, 0))).reshape(-1, chunk, hidden_MH.shape[1])
    targets_CB = jnp.pad(targets_M, (0, padding)).reshape(-1, chunk)
    body = jax.checkpoint(score, prevent_cse=False)
    _, scores = jax.lax.scan(lambda _, xs: (None, body(*xs)), None, (hidden_CBH, targets_CB))
    return jax.tree.map(lambda x_CB: x_CB.reshape(-1)[:total], scores)


def _scores(logits_BV: jax.Array, targets_B: jax.Array, tensor: str | None) -> TokenScores:
    """Scores from the logits of this device's share of the vocabulary."""
    highest_B = jax.lax.stop_gradient(logits_BV.max(axis=-1))
    if tensor is None:
        normaliser_B = jax.nn.logsumexp(logits_BV, axis=-1)
        chosen_B = jnp.take_along_axis(logits_BV, targets_B[:, None], axis=-1)[:, 0]
    else:
        size = logits_BV.shape[1]
        local_B = targets_B - size * jax.lax.axis_index(tensor)
        picked_B = jnp.take_along_axis(logits_BV, jnp.clip(local_B, 0, size - 1)[:, None], axis=-1)[:, 0]
        chosen_B = jax.lax.psum(jnp.where((local_B >= 0) & (local_B < size), picked_B, 0.0), tensor)
        highest_B = jax.lax.pmax(highest_B, tensor)
        sum_B = jax.lax.psum(jnp.exp(logits_BV - highest_B[:, None]).sum(axis=-1), tensor)
        normaliser_B = highest_B + jnp.log(sum_B)
    logprob_BV = logits_BV - normaliser_B[:, None]
    entropy_B = -jnp.sum(jnp.exp(logprob_BV) * logprob_BV, axis=-1)
    return TokenScores(
        logprob=chosen_B - normaliser_B,
        entropy=entropy_B if tensor is None else jax.lax.psum(entropy_B, tensor),
        greedy=jax.lax.stop_gradient(chosen_B) >= highest_B,
    )
