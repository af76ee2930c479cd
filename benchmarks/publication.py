"""Publication of weights to Ray actors that serve them, against a bare copy of the same bytes in memory.

From the learner's arrays to the last acknowledgement: digests, transport, verification, a switch between two decode
steps. The samplers are idle; ``benchmarks.sampler`` says what an update does to one that decodes. Beside it
stands the floor of this machine: one copy, and one verification for each sampler, all cores at work on nothing else.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import jax
import numpy as np
import ray

from actors.samplers.local import LocalSampler
from actors.samplers.publication import Publication, verified
from cluster.publication import Broadcaster, ObjectStore, SharedMemory, Transport
from cluster.ray_runtime import actor_environment
from learner.models.config import ModelConfig
from learner.models.weights import initial_params, seen_as_hf

COUNTS = (1, 4)
_WARM, _ROUNDS = 3, 5
_STORE_BYTES = 4 << 30


def _model(hidden: int, heads: int, inner: int, layers: int, vocabulary: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=128,
        max_position_embeddings=64,
    )


MODELS = {
    "1MB": _model(128, 1, 256, 1, 512),
    "100MB": _model(1024, 8, 4096, 1, 8192),
    "500MB": _model(1024, 8, 4096, 7, 8192),
}


def measure(models: dict[str, ModelConfig], transports: dict[str, Callable[[], Transport]]) -> dict[str, Any]:
    """Seconds for each model, transport and number of samplers, and as multiples of one copy."""
    result: dict[str, Any] = {}
    for name, model in models.items():
        versions = [seen_as_hf(model, jax.block_until_ready(initial_params(model, seed))) for seed in (0, 1)]
        copy, read = copy_seconds(versions[0]), verification_seconds(versions[0])
        result[name] = row = {
            "bytes": sum(value.nbytes for value in versions[0].values()),
            "copy_ms": _ms(copy),
            "verification_ms": _ms(read),
            **{f"floor_{count}_copies": round(1 + count * read / copy, 2) for count in COUNTS},
        }
        with _samplers(model, max(COUNTS)) as samplers:
            for transport, make in transports.items():
                for count in COUNTS:
                    chosen = dict(list(samplers.items())[:count])
                    seconds = publication_seconds(make, chosen, versions)
                    row |= {
                        f"{transport}_{count}_ms": _ms(seconds),
                        f"{transport}_{count}_copies": round(seconds / copy, 2),
                    }
        print(f"publication {name}: {row}", flush=True)
    return result


def copy_seconds(weights: dict[str, np.ndarray]) -> float:
    """Of one copy into memory that is there already."""
    source = np.concatenate([np.ravel(value, order="K") for value in weights.values()])
    target = np.zeros_like(source)
    return statistics.median(_seconds(lambda: np.copyto(target, source)) for _ in range(_ROUNDS))


def verification_seconds(weights: dict[str, np.ndarray]) -> float:
    """Of one comparison of every byte with its digest, by all cores."""
    publication = Publication.of(0, weights)
    return statistics.median(_seconds(lambda: verified(publication)) for _ in range(_ROUNDS))


_published = 0


def publication_seconds(
    make: Callable[[], Transport], samplers: dict[str, Any], versions: list[dict[str, np.ndarray]]
) -> float:
    """Median of a few publications, after some that make room."""
    global _published  # versions only rise in the life of a sampler
    times = []
    with closing(Broadcaster(make(), samplers, timeout_seconds=120.0)) as broadcast:
        for turn in range(_WARM + _ROUNDS):
            _published += 1
            version, weights = _published, versions[turn % 2]
            seconds = _seconds(lambda: broadcast(version, weights))  # noqa: B023 - called at once
            if turn >= _WARM:
                times.append(seconds)
    return statistics.median(times)


@contextmanager
def local_ray() -> Iterator[None]:
    """Ray on this machine, with room for three versions of the largest model."""
    ray.init(
        num_cpus=max(COUNTS),
        object_store_memory=_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _samplers(model: ModelConfig, count: int) -> Iterator[dict[str, Any]]:
    remote: Any = ray.remote
    make = remote(num_cpus=0, max_concurrency=100, runtime_env=actor_environment(1))(LocalSampler)
    actors = {}
    for index in range(count):  # one after the other: compiling takes memory
        actor = make.remote(
            model=model, slots=1, context_length=32, on_update="recompute", seed=0, name=f"sampler-{index}"
        )
        ray.get(actor.status.remote())
        actors[f"sampler-{index}"] = actor
    try:
        yield actors
    finally:
        for actor in actors.values():
            ray.kill(actor)


TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "object_store": ObjectStore,
    "shared_memory": lambda: SharedMemory("benchmark"),
}


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
