"""The SGLang-Jax engine without its thread: tests step it themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sampler_examples import CONFIG, CONTEXT, make_weights, write_checkpoint

from actors.samplers.contract import Generation
from actors.samplers.sglang.engine import SglangEngine
from learner.models.config import ModelConfig

SLOTS = 4


def make_engine(folder: Path, config: ModelConfig = CONFIG, **changes: Any) -> SglangEngine:
    arguments: dict[str, Any] = {
        "slots": SLOTS,
        "context_length": CONTEXT,
        "on_update": "recompute",
        "seed": 0,
        "dtype": "float32",
        "tensor": 1,
    }
    return SglangEngine(write_checkpoint(folder, config), **(arguments | changes))


def publish(engine: SglangEngine, seed: int) -> int:
    """The next version."""
    return engine.swap(0 if engine.version is None else engine.version + 1, engine.prepare(make_weights(seed)))


def finish(engine: SglangEngine, numbers: list[int]) -> list[Generation]:
    ended: dict[int, Generation] = {}
    for _ in range(500):
        ended |= dict(engine.step())
        if ended.keys() >= set(numbers):
            return [ended[number] for number in numbers]
    raise AssertionError(f"only {sorted(ended)} of {numbers} ended within 500 steps")
