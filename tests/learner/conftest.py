"""A tiny model and a step over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import jax
import numpy as np
import pytest
from flax import nnx

from learner.mesh import make_mesh
from learner.models.config import ModelConfig
from learner.models.weights import initial_params
from learner.objectives import Objective, policy_objective, ppo_clip, token_mean
from learner.optimizer import Optimizer, make_optimizer
from learner.packing import Example, Ladder
from learner.step import TrainStep

type MakeStep = Callable[..., TrainStep]
type MakeExample = Callable[..., Example]

PPO = partial(policy_objective, loss=ppo_clip, aggregation=token_mean(), entropy_bonus=0.01, entropy_cap=4.0)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """These tests, and the programs that they start, compile much and compute little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        before = jax.config.values["jax_disable_most_optimizations"]
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def model() -> ModelConfig:
    return ModelConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )


@pytest.fixture(scope="session")
def params(model: ModelConfig) -> nnx.State:
    return initial_params(model, seed=0)


@pytest.fixture(scope="session")
def ladder() -> Ladder:
    return Ladder(((4, 32),))


@pytest.fixture(scope="session")
def optimizer() -> Optimizer:
    return make_optimizer(
        learning_rate=1e-2,
        warmup_steps=2,
        total_steps=20,
        decay="cosine",
        final_fraction=0.1,
        weight_decay=0.1,
        beta1=0.9,
        beta2=0.95,
        max_grad_norm=1.0,
    )


@pytest.fixture(scope="session")
def make_step(model: ModelConfig, ladder: Ladder, optimizer: Optimizer) -> MakeStep:
    @cache  # what one test compiled, the next may use
    def make(objective: Objective = PPO, *, ladder: Ladder = ladder, temperature: float = 1.0, **options) -> TrainStep:
        mesh = make_mesh(model, data=1, fsdp=1, devices=jax.devices()[:1])
        return TrainStep(model, mesh, ladder, optimizer, objective, temperature=temperature, **options)

    return make


@pytest.fixture(scope="session")
def make_example() -> MakeExample:
    def make(rng: np.random.Generator, size: int) -> Example:
        mask = rng.random(size) < 0.4
        mask[0] = False
        return Example(
            tokens=rng.integers(0, 23, size, dtype=np.int32),
            mask=mask,
            logprobs=np.where(mask, rng.normal(-3.0, 0.3, size), 0.0).astype(np.float32),
            versions=np.where(mask, rng.integers(0, 3, size), -1).astype(np.int32),
            advantages=rng.normal(size=size).astype(np.float32),
        )

    return make
