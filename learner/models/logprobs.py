"""Token log-probabilities from hidden states, without ever holding ``[tokens, vocabulary]`` whole.

Tokens are taken in chunks; the logits of a chunk are recomputed in the backward pass.

Axes: M = tokens, B = tokens of a chunk, H = hidden, V = vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenScores(NamedTuple):
    """What the policy says about given tokens.

    Attributes:
        logprob: float32[M], log-probability of the token.
        entropy: float32[M], entropy in nats of the distribution it came from.
        greedy: bool[M], whether it is the most probable token.
    """

    logprob: jax.Array
    entropy: jax.Array
    greedy: jax.Array


def token_scores(
    hidden_MH: jax.Array,
    output_VH: jax.Array,
    targets_M: jax.Array,
    *,
    temperature: float,
    chunk_entries: int = 2**22,
) -> TokenScores:
    """Score ``targets_M`` (int32) under ``softmax(hidden @ output.T / temperature)``, in float32.

    Args:
        hidden_MH: final hidden states, one per predicted token.
        output_VH: the output head.
        targets_M: the token to score at each position.
        temperature: divides the logits, as it does in the sampler.
        chunk_entries: most entries of a chunk's logits; bounds the peak memory.
    """
    total, vocabulary = len(targets_M), len(output_VH)
    chunk = max(1, chunk_entries // vocabulary)

    def score(hidden_BH: jax.Array, targets_B: jax.Array) -> TokenScores:
        logits_BV = jnp.einsum("bh,vh->bv", hidden_BH, output_VH, preferred_element_type=jnp.float32) / temperature
        return _scores(logits_BV, targets_B)

    if total <= chunk:
        return score(hidden_MH, targets_M)
    padding = -total % chunk
    hidden_CBH = jnp.pad(hidden_MH, ((0, padding), (0, 0))).reshape(-1, chunk, hidden_MH.shape[1])
    targets_CB = jnp.pad(targets_M, (0, padding)).reshape(-1, chunk)
    body = jax.checkpoint(score, prevent_cse=False)
    _, scores = jax.lax.scan(lambda _, xs: (None, body(*xs)), None, (hidden_CBH, targets_CB))
    return jax.tree.map(lambda x_CB: x_CB.reshape(-1)[:total], scores)


def _scores(logits_BV: jax.Array, targets_B: jax.Array) -> TokenScores:
    normaliser_B = jax.nn.logsumexp(logits_BV, axis=-1)
    chosen_B = jnp.take_along_axis(logits_BV, targets_B[:, None], axis=-1)[:, 0]
    logprob_BV = logits_BV - normaliser_B[:, None]
    return TokenScores(
        logprob=chosen_B - normaliser_B,
        entropy=-jnp.sum(jnp.exp(logprob_BV) * logprob_BV, axis=-1),
        greedy=jax.lax.stop_gradient(chosen_B >= jnp.max(logits_BV, axis=-1)),
    )
