"""``python -m benchmarks.sampler``: how fast samplers decode, and what new weights cost them.

* Decoding: tokens/s and the time to the first token at several numbers of concurrent requests, for ``local`` and, where
  it is installed, ``sglang_jax``; the same model, weights and prompts, in float32, each beside the ceiling of this run:
  the time that reading the weights once a step or multiplying by them would take at the least.
* Updates in flight: how long an engine that decodes is held up by a switch, against a copy of the weights.
* Publication to 1 and 4 samplers: see ``benchmarks.publication``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from actors.samplers.contract import SamplingParams
from actors.samplers.local import LocalSampler
from actors.samplers.publication import Publication
from actors.samplers.serving import EngineSampler
from benchmarks import publication
from learner.models.config import ModelConfig, write_config
from learner.models.weights import initial_params, seen_as_hf, to_hf

PARTS = ("decode", "update", "publication")
CONCURRENCY = (1, 8, 32, 64)
_PROMPT, _REPLY, _CONTEXT = 32, 32, 128
_ROUNDS = 3
_UPDATES = 10
MODEL = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=128,  # SGLang-Jax serves multiples of it
    max_position_embeddings=_CONTEXT,
)


def make_sampler(kind: str, folder: Path) -> EngineSampler:
    """A sampler of ``MODEL`` that holds version 0."""
    arguments: dict[str, Any] = {
        "model": folder,
        "slots": max(CONCURRENCY),
        "context_length": _CONTEXT,
        "on_update": "continue",
        "seed": 0,
        "name": kind,
    }
    sampler: EngineSampler
    if kind == "local":
        sampler = LocalSampler(**arguments)
    else:
        from actors.samplers.sglang.sampler import SglangJaxSampler

        sampler = SglangJaxSampler(**arguments)
    asyncio.run(sampler.update(Publication.of(0, to_hf(MODEL, initial_params(MODEL, 0)))))
    return sampler


def decode(sampler: EngineSampler) -> dict[str, float]:
    """Tokens/s and milliseconds to the first token, the best of some rounds of new prompts."""
    random, result = np.random.default_rng(0), {}
    for count in CONCURRENCY:
        seconds, first = [], []
        for _ in range(_ROUNDS):
            first.append(_seconds_of(sampler, random, count, 1))
            seconds.append(_seconds_of(sampler, random, count, _REPLY))
        result[f"tokens_s_{count}"] = round(count * _REPLY / min(seconds), 1)
        result[f"first_token_ms_{count}"] = round(1e3 * min(first), 2)
    return result


def _seconds_of(sampler: EngineSampler, random: np.random.Generator, count: int, reply: int) -> float:
    prompts = random.integers(0, MODEL.vocab_size, (count, _PROMPT)).astype(np.int32)
    params = SamplingParams(max_tokens=reply)

    async def sample() -> None:
        await asyncio.gather(*(sampler.generate(prompt, params) for prompt in prompts))

    start = time.perf_counter()
    asyncio.run(sample())
    return time.perf_counter() - start


def ceilings() -> dict[str, float]:
    """Tokens/s that no decoder of ``MODEL`` can exceed here, by memory or by arithmetic, prefill not counted."""
    weights = jnp.ones(50_000_000)  # 200 MB
    total = jax.jit(jnp.sum)
    bandwidth = weights.nbytes / _best(lambda: total(weights).block_until_ready())
    square = jnp.ones((2048, 2048))
    product = jax.jit(jnp.matmul)
    flops = 2 * 2048**3 / _best(lambda: product(square, square).block_until_ready())
    parameters = MODEL.parameter_count
    result = {"bandwidth_gb_s": round(bandwidth / 1e9, 1), "matmul_gflop_s": round(flops / 1e9, 1)}
    for count in CONCURRENCY:
        step = max(4 * parameters / bandwidth, 2 * parameters * count / flops)
        result[f"ceiling_tokens_s_{count}"] = round(count / step, 1)
    return result


def update_in_flight() -> dict[str, float]:
    """What updates of 100 MB cost an engine that decodes for 8 requests: switches, and a copy of the bytes."""
    model = publication.MODELS["100MB"]
    weights = [seen_as_hf(model, jax.block_until_ready(initial_params(model, seed))) for seed in (0, 1)]
    sampler = LocalSampler(model=model, slots=8, context_length=64, on_update="continue", seed=0, name="local")
    engine, swaps, swap = sampler._engine, [], sampler._engine.swap

    def timed_swap(version: int, leaves: list[jax.Array]) -> int:
        start = time.perf_counter()
        held = swap(version, leaves)
        swaps.append(time.perf_counter() - start)
        return held

    engine.swap = timed_swap  # type: ignore[method-assign]

    async def use() -> None:
        await sampler.update(Publication.of(0, weights[0]))
        calls = [asyncio.ensure_future(_keep_busy(sampler, seed)) for seed in range(8)]
        for version in range(1, _UPDATES + 1):
            await asyncio.sleep(0.1)
            await sampler.update(await asyncio.to_thread(Publication.of, version, weights[version % 2]))
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    with closing(sampler):
        asyncio.run(use())
    copy = publication.copy_seconds(weights[0])
    return {
        "switch_ms_median": round(1e3 * statistics.median(swaps[1:]), 3),
        "switch_ms_max": round(1e3 * max(swaps[1:]), 3),
        "copy_ms": round(1e3 * copy, 2),
        "switch_max_copies": round(max(swaps[1:]) / copy, 3),
    }


async def _keep_busy(sampler: EngineSampler, seed: int) -> None:
    while True:
        await sampler.generate([seed + 1, 2, 3], SamplingParams(max_tokens=50))


def main() -> None:
    """Print what was measured, and one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(prog="benchmarks.sampler", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; everything if not given"
    )
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    if "decode" in arguments.parts:
        result["decode"] = _compare()
    if "update" in arguments.parts:
        result["update"] = update_in_flight()
        print(f"update in flight: {result['update']}", flush=True)
    if "publication" in arguments.parts:
        with publication.local_ray():
            result["publication"] = publication.measure(publication.MODELS, publication.TRANSPORTS)
    if arguments.json:
        print(json.dumps(result))


def _compare() -> dict[str, Any]:
    result: dict[str, Any] = {"parameters": MODEL.parameter_count, "ceiling": ceilings()}
    print(f"ceiling: {result['ceiling']}", flush=True)
    kinds = ["local"] + (["sglang_jax"] if importlib.util.find_spec("sgl_jax") else [])
    with tempfile.TemporaryDirectory() as folder:
        write_config(MODEL, Path(folder), eos_token_id=None)
        save_file(to_hf(MODEL, initial_params(MODEL, 0)), Path(folder) / "model.safetensors")
        for kind in kinds:
            with closing(make_sampler(kind, Path(folder))) as sampler:
                result[kind] = decode(sampler)
            print(f"{kind}: {result[kind]}", flush=True)
    if "sglang_jax" in result:
        result["local_to_sglang_jax"] = {
            str(count): round(result["local"][f"tokens_s_{count}"] / result["sglang_jax"][f"tokens_s_{count}"], 2)
            for count in CONCURRENCY
        }
        print(f"local ÷ sglang_jax: {result['local_to_sglang_jax']}", flush=True)
    return result


def _best(call: Callable[[], Any]) -> float:
    call()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
