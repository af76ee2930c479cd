"""``python -m benchmarks.logprob``: log-probabilities and entropy in chunks against all logits at once.

Memory is what the compiler plans for the gradient with respect to hidden states and output head, at Qwen's vocabulary
and 16,384 tokens; nothing of that size is run. Time is measured at fewer tokens, where both ways fit.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from learner.models.logprobs import TokenScores, token_scores

_VOCABULARY, _HIDDEN = 151_936, 1024
_PLANNED_TOKENS, _RUN_TOKENS = 16_384, 512
_ROUNDS = 3


def naive_scores(hidden_MH: jax.Array, output_VH: jax.Array, targets_M: jax.Array) -> TokenScores:
    """Every logit of every token at once."""
    logprob_MV = jax.nn.log_softmax(jnp.einsum("mh,vh->mv", hidden_MH, output_VH))
    return TokenScores(
        logprob=jnp.take_along_axis(logprob_MV, targets_M[:, None], axis=-1)[:, 0],
        entropy=-jnp.sum(jnp.exp(logprob_MV) * logprob_MV, axis=-1),
        greedy=jnp.argmax(logprob_MV, axis=-1) == targets_M,
    )


def chunked_scores(hidden_MH: jax.Array, output_VH: jax.Array, targets_M: jax.Array) -> TokenScores:
    """What the learner does."""
    return token_scores(hidden_MH, output_VH, targets_M, temperature=1.0)


WAYS: dict[str, Callable[..., TokenScores]] = {"naive": naive_scores, "chunked": chunked_scores}


def gradient(way: Callable[..., TokenScores]) -> Any:
    """The compiled gradient of a loss that uses log-probabilities and entropy."""

    def loss(hidden_MH: jax.Array, output_VH: jax.Array, targets_M: jax.Array) -> jax.Array:
        scores = way(hidden_MH, output_VH, targets_M)
        return jnp.sum(scores.logprob + 0.01 * scores.entropy)

    return jax.jit(jax.grad(loss, (0, 1)))


def planned_gib(way: Callable[..., TokenScores], tokens: int) -> float:
    """GiB of temporaries that the compiler plans, beside arguments and results."""
    shapes = ((tokens, _HIDDEN), (_VOCABULARY, _HIDDEN))
    hidden, output = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    compiled = gradient(way).lower(hidden, output, jax.ShapeDtypeStruct((tokens,), jnp.int32)).compile()
    return float(compiled.memory_analysis().temp_size_in_bytes / 2**30)


def seconds(way: Callable[..., TokenScores], tokens: int) -> float:
    """Best time of some runs."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(tokens, _HIDDEN)), jnp.float32)
    output = jnp.asarray(rng.normal(size=(_VOCABULARY, _HIDDEN)) / _HIDDEN**0.5, jnp.float32)
    targets = jnp.asarray(rng.integers(0, _VOCABULARY, tokens), jnp.int32)
    run = gradient(way)
    jax.block_until_ready(run(hidden, output, targets))
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run(hidden, output, targets))
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print a table, and one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(prog="benchmarks.logprob", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    whole_gib = 4 * _PLANNED_TOKENS * _VOCABULARY / 2**30
    result: dict[str, Any] = {"vocabulary": _VOCABULARY, "hidden": _HIDDEN, "logits_gib": round(whole_gib, 2)}
    print(f"{_PLANNED_TOKENS} tokens × {_VOCABULARY} float32 logits would be {whole_gib:.1f} GiB")
    for name, way in WAYS.items():
        result[name] = {
            "temporaries_gib": round(planned_gib(way, _PLANNED_TOKENS), 2),
            "seconds": round(seconds(way, _RUN_TOKENS), 2),
        }
        print(
            f"{name:8} {result[name]['temporaries_gib']:6.2f} GiB of temporaries at {_PLANNED_TOKENS} tokens, "
            f"{result[name]['seconds']:.2f} s at {_RUN_TOKENS}",
            flush=True,
        )
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
