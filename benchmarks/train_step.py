"""``python -m benchmarks.train_step``: the packed training step against the matrix products that this machine can do.

Two Qwen3-shaped models in float32. Of each: tokens/s of the learner's step (packing's shapes, objective, optimizer, all
under ``shard_map``), the share of the measured matmul ceiling that its arithmetic reaches (``mfu_cpu``), how fast the
same model is under plain ``jit`` without ``shard_map``, and peak memory. The plain step is one program; with two
micro-batches it adds up their gradients as ours does, with one it has nothing to add up, which ours still does. FLOPs
are counted from the shapes: two for each weight and token, two for each pair of tokens in attention as far as it is
causal, three times that with the backward pass.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from learner.mesh import make_mesh
from learner.models.attention import attend_packed
from learner.models.config import ModelConfig
from learner.models.logprobs import token_scores
from learner.models.weights import abstract_model, initial_params
from learner.objectives import cross_entropy
from learner.optimizer import Optimizer, make_optimizer
from learner.packing import Example, Ladder, Rows, pack
from learner.step import TrainState, TrainStep

_LENGTH, _ROWS = 512, 4
_STEPS = 3
_MICRO_BATCHES = (2, 1)
"""Of a step; the last is the one that the figures which do not compare are of."""


def qwen3(hidden: int, layers: int, vocabulary: int) -> ModelConfig:
    """A decoder of Qwen3's proportions."""
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=128,
        max_position_embeddings=_LENGTH,
    )


MODELS = {"20m": qwen3(384, 6, 8192), "120m": qwen3(768, 10, 32768)}


def flops_per_token(model: ModelConfig) -> float:
    """Of one training step without recomputation: forward and twice that for the backward pass."""
    norms = 2 * model.hidden_size + 2 * model.head_dim
    layer_weights = model.parameter_count - model.vocab_size * model.hidden_size - model.hidden_size
    products = layer_weights - model.num_hidden_layers * norms + model.vocab_size * model.hidden_size
    pairs = model.num_hidden_layers * model.num_attention_heads * model.head_dim * 2 * (_LENGTH / 2)
    return 3 * 2 * (products + pairs)


def matmul_ceiling(model: ModelConfig) -> float:
    """FLOP/s of the largest products that the step has, one after the other."""
    tokens, hidden, inner = _ROWS * _LENGTH, model.hidden_size, model.intermediate_size
    best = 0.0
    for m, k, n in ((tokens, hidden, inner), (tokens, inner, hidden), (1024, 1024, 1024), (2048, 2048, 2048)):
        a, b = jnp.ones((m, k)), jnp.ones((k, n))
        best = max(best, 2 * m * k * n / _best_seconds(jax.jit(jnp.matmul), a, b))
    return best


def measure(model: ModelConfig) -> dict[str, float]:
    """Numbers of one model."""
    optimizer = make_optimizer(
        learning_rate=1e-4,
        warmup_steps=0,
        total_steps=100,
        decay="constant",
        final_fraction=1.0,
        weight_decay=0.0,
        beta1=0.9,
        beta2=0.95,
        max_grad_norm=1.0,
    )
    ladder = Ladder(((_ROWS, _LENGTH),))
    params = initial_params(model, seed=0)
    mesh = make_mesh(model, data=1, fsdp=1, devices=jax.devices()[:1])
    step = TrainStep(model, mesh, ladder, optimizer, cross_entropy, temperature=1.0)
    result: dict[str, float] = {"parameters": model.parameter_count}
    for count in _MICRO_BATCHES:
        batch = [step.put(rows) for rows in pack([_example(model, seed) for seed in range(count * _ROWS)], ladder)]
        ours, plain = _seconds_of_both(step, plain_step(model, optimizer), batch, params)
        result[f"ratio_to_plain_jit_{count}_micro_batches"] = round(plain / ours, 3)
    tokens, ceiling = _ROWS * _LENGTH, matmul_ceiling(model)
    rate = tokens / ours
    return result | {
        "tokens_s": round(rate, 1),
        "gflop_s": round(rate * flops_per_token(model) / 1e9, 1),
        "ceiling_gflop_s": round(ceiling / 1e9, 1),
        "mfu_cpu": round(rate * flops_per_token(model) / ceiling, 3),
        "plain_jit_tokens_s": round(tokens / plain, 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def _seconds_of_both(
    step: TrainStep, plain: Callable[[TrainState, list[Rows]], Any], batch: list[Rows], params: nnx.State
) -> tuple[float, float]:
    """The best of a few steps of ours and of the plain one, in turns: what else the machine does meets both."""
    states = [step.initialise(params), step.initialise(params)]
    ours = partial(step, batch=batch, version=0)
    calls: list[Callable[[TrainState], Any]] = [ours, lambda state: plain(state, batch)]
    best = [np.inf, np.inf]
    for turn in range(_STEPS + 1):
        for which, call in enumerate(calls):
            start = time.perf_counter()
            states[which], metrics = jax.block_until_ready(call(states[which]))
            if turn:  # the first compiles
                best[which] = min(best[which], time.perf_counter() - start)
            assert np.isfinite(float(metrics["loss"]))
    return best[0], best[1]


def plain_step(model: ModelConfig, optimizer: Optimizer) -> Callable[[TrainState, list[Rows]], Any]:
    """The same update and the same diagnostics, as one would write them without a mesh."""
    graph, _ = abstract_model(model)

    def loss(params: nnx.State, rows: Rows) -> tuple[jax.Array, dict[str, jax.Array]]:
        decoder = nnx.merge(graph, params)
        hidden_RTH, _ = decoder(rows.tokens, rows.positions, attend_packed(rows.segments))
        hidden_MH = hidden_RTH.reshape(-1, hidden_RTH.shape[-1])
        scores = token_scores(hidden_MH, decoder.output_VH, rows.targets.reshape(-1), temperature=1.0)
        mean = partial(jnp.mean, where=rows.mask.reshape(-1))
        value = -mean(scores.logprob)
        return value, {"loss": value, "accuracy": mean(scores.greedy), "entropy": mean(scores.entropy)}

    @partial(jax.jit, donate_argnums=0)
    def update(state: TrainState, batch: list[Rows]) -> tuple[TrainState, dict[str, jax.Array]]:
        slope = jax.grad(loss, has_aux=True)
        gradient, diagnostics = slope(state.params, batch[0])
        if len(batch) > 1:
            rest = jax.tree.map(lambda *parts: jnp.stack(parts), *batch[1:])
            (gradient, diagnostics), _ = jax.lax.scan(
                lambda total, rows: (jax.tree.map(jnp.add, total, slope(state.params, rows)), None),
                (gradient, diagnostics),
                rest,
            )
            gradient, diagnostics = jax.tree.map(lambda total: total / len(batch), (gradient, diagnostics))
        change, moments = optimizer.rule.update(gradient, state.moments, state.params)
        return TrainState(optax.apply_updates(state.params, change), moments, state.step + 1), diagnostics

    return update


def main() -> None:
    """Print a table, and one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(prog="benchmarks.train_step", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    result = {}
    for name, model in MODELS.items():
        result[name] = measure(model)
        print(f"{name:5} {result[name]}", flush=True)
    if arguments.json:
        print(json.dumps(result))


def _best_seconds(run: Callable[..., Any], *arguments: Any) -> float:
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)


def _example(model: ModelConfig, seed: int) -> Example:
    rng = np.random.default_rng(seed)
    mask = np.ones(_LENGTH, bool)
    mask[0] = False
    zeros = np.zeros(_LENGTH, np.float32)
    tokens = rng.integers(0, model.vocab_size, _LENGTH, dtype=np.int32)
    return Example(tokens, mask, zeros, zeros.astype(np.int32), zeros)


if __name__ == "__main__":
    main()
