"""Token log-probabilities in chunks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.models.logprobs import token_scores

TOKENS, HIDDEN, VOCABULARY = 37, 12, 29


def _inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    hidden_MH = jax.random.normal(keys[0], (TOKENS, HIDDEN))
    output_VH = jax.random.normal(keys[1], (VOCABULARY, HIDDEN))
    targets_M = jax.random.randint(keys[2], (TOKENS,), 0, VOCABULARY)
    return hidden_MH, output_VH, targets_M, jax.random.normal(keys[3], (TOKENS,))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 64])
def test_values_and_gradients_equal_the_naive_ones(temperature: float, chunk_tokens: int) -> None:
    hidden_MH, output_VH, targets_M, weight_M = _inputs()

    def chunked(hidden_MH, output_VH):
        chunk = chunk_tokens * VOCABULARY
        return token_scores(hidden_MH, output_VH, targets_M, temperature=temperature, chunk_entries=chunk)

    def naive(hidden_MH, output_VH):
        return jax.nn.log_softmax(hidden_MH @ output_VH.T / temperature)

    scores, all_MV = chunked(hidden_MH, output_VH), naive(hidden_MH, output_VH)
    np.testing.assert_allclose(scores.logprob, all_MV[jnp.arange(TOKENS), targets_M], atol=2e-6)
    np.testing.assert_allclose(scores.entropy, -(jnp.exp(all_MV) * all_MV).sum(-1), atol=2e-6)
    np.testing.assert_array_equal(scores.greedy, all_MV.argmax(-1) == targets_M)

    def our_sum(*a):
        scores = chunked(*a)
        return jnp.sum(weight_M * (scores.logprob + scores.entropy))

    def their_sum(*a):
        all_MV = naive(*a)
        return jnp.sum(weight_M * (all_MV[jnp.arange(TOKENS), targets_M] - (jnp.exp(all_MV) * all_MV).sum(-1)))

    ours, theirs = jax.grad(our_sum, (0, 1))(hidden_MH, output_VH), jax.grad(their_sum, (0, 1))
    for mine, expected in zip(ours, theirs(hidden_MH, output_VH), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5)


def test_the_logits_of_all_tokens_never_exist_at_once() -> None:
    tokens, vocabulary, hidden = 1024, 2048, 8
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((tokens, hidden), (vocabulary, hidden))]
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def peak_bytes(chunk_tokens: int) -> int:
        def loss(hidden_MH, output_VH, targets_M):
            chunk = chunk_tokens * vocabulary
            scores = token_scores(hidden_MH, output_VH, targets_M, temperature=1.0, chunk_entries=chunk)
            return scores.logprob.sum()

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    whole = tokens * vocabulary * 4
    assert peak_bytes(tokens) >= whole
    assert peak_bytes(64) < whole / 2
