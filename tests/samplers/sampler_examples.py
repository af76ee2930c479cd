"""Samplers under test, and an independent reference for what they claim.

Not in ``conftest.py``, whose name every test folder has: modules import what they need from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models

from actors.samplers.checkpoints import PublishedCheckpoints
from actors.samplers.contract import Generation, SamplerError, SamplingParams
from actors.samplers.local import LocalSampler
from actors.samplers.publication import Publication
from actors.samplers.sglang.client import SglangClient
from actors.samplers.sglang.sampler import SglangJaxSampler
from learner.models.attention import attend_packed
from learner.models.config import ModelConfig, write_config
from learner.models.weights import abstract_model, from_hf, to_hf

CONTEXT = 160
TOLERANCE = 1e-4
CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,  # SGLang-Jax serves multiples of it
    max_position_embeddings=CONTEXT,
)


def make_weights(seed: int, config: ModelConfig = CONFIG) -> dict[str, np.ndarray]:
    """Random weights whose distributions are far from uniform, and differ between seeds."""
    random = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith(".bias"):
            return random.standard_normal(shape, np.float32)
        if len(shape) == 1:  # the scale of a norm
            return np.full(shape, 2.0, np.float32)
        return random.standard_normal(shape, np.float32) * np.float32((2.0 / shape[1]) ** 0.5)

    return {name: draw(name, shape) for name, shape in _shapes(config).items()}


@lru_cache
def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_model(config)[1])
    return {name: array.shape for name, array in to_hf(config, zeros).items()}


class Reference:
    """A plain forward pass over the weights of every version."""

    def __init__(self, weights: dict[int, dict[str, np.ndarray]], config: ModelConfig = CONFIG) -> None:
        self.weights = weights
        self.config = config

    def reference(self, version: int, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """log p(next token | tokens so far), float32[T, V], by one forward pass over the whole sequence."""
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(tokens)] = tokens
        logprobs_RTV = _forward(
            self.config, from_hf(self.config, self.weights[version]), padded, np.float32(temperature or 1.0)
        )
        return np.asarray(logprobs_RTV)[0, : len(tokens)]

    def worst_difference(self, prompt: np.ndarray, generation: Generation, temperature: float = 1.0) -> float:
        """Largest |claimed - reference| log-probability, each token under the weights of its own version."""
        tokens = np.concatenate([prompt, generation.tokens])
        position = np.arange(len(prompt), len(tokens))
        worst = 0.0
        for version in np.unique(generation.versions):
            own = generation.versions == version
            reference_TV = self.reference(int(version), tokens, temperature)
            expected = reference_TV[position[own] - 1, generation.tokens[own]]
            worst = max(worst, float(np.abs(generation.logprobs[own] - expected).max()))
        return worst


class Served(Reference):
    """A sampler, and the weights of every version published to it."""

    def __init__(self, sampler: Any, publication: Callable[..., Publication] = Publication.of) -> None:
        super().__init__({})
        self.sampler = sampler
        self.publication = publication
        self.version = -1
        self.refusal = self.run(self._sample_too_early())
        self.run(self.publish())

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(work, 120)

        return asyncio.run(bounded())

    async def publish(self) -> int:
        self.version += 1
        self.weights[self.version] = make_weights(seed=self.version)
        return await self.sampler.update(self.publication(self.version, self.weights[self.version]))

    async def _sample_too_early(self) -> Exception | None:
        try:
            await self.sampler.generate([1, 2, 3], SamplingParams(max_tokens=1))
        except SamplerError as error:
            return error
        return None


@partial(jax.jit, static_argnums=0)
def _forward(config: ModelConfig, params: nnx.State, tokens_RT: jax.Array, temperature: jax.Array) -> jax.Array:
    model = nnx.merge(abstract_model(config)[0], params)
    positions_RT = jnp.broadcast_to(jnp.arange(tokens_RT.shape[1]), tokens_RT.shape)
    hidden_RTH, _ = model(tokens_RT, positions_RT, attend_packed(jnp.ones_like(tokens_RT)))
    return jax.nn.log_softmax(hidden_RTH @ model.output_VH.T / temperature, axis=-1)


def filtered_reference(logprobs_V: np.ndarray, *, top_k: int | None, top_p: float, min_p: float) -> np.ndarray:
    """log p of what the filters leave of a temperature-scaled distribution, -inf for the rest; by sorting, float64[V].

    In the order of Hugging Face: top-k, then top-p of what that left, renormalised, then min-p.
    """
    order = np.argsort(-logprobs_V, kind="stable")
    p_V = np.exp(logprobs_V.astype(np.float64))
    p_V[order[top_k:]] = 0.0 if top_k is not None else p_V[order[top_k:]]
    p_V /= p_V.sum()
    before = np.cumsum(p_V[order]) - p_V[order]
    p_V[order[before >= top_p]] = 0.0
    p_V[p_V < min_p * p_V.max()] = 0.0
    with np.errstate(divide="ignore"):
        return np.log(p_V / p_V.sum())


def make_tokenizer() -> Tokenizer:
    """Tokens for bytes and for pieces of text; the last two ids of the model under test have none."""
    pieces = [*"abcdefghijklmn", "Ġ", "Ã", "©", "â", "Ĥ", "¬", "ab", "ba", "abc", "Ġa", "bĠ", "cab", "Ã©a", "Ĥ¬", "aâ"]
    pieces += ["de", "fg", "hi", "jk", "lm", "nop", "Ġthe", "ĠĠ", "xyz"]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_checkpoint(folder: Path, config: ModelConfig = CONFIG) -> Path:
    """A checkpoint folder of the model under test, with the weights of seed 0."""
    make_tokenizer().save(str(folder / "tokenizer.json"))
    write_config(config, folder, eos_token_id=None)
    save_file(make_weights(0, config), folder / "model.safetensors")
    return folder


def make_sglang_jax(folder: Path, **changes: Any) -> SglangJaxSampler:
    arguments: dict[str, Any] = {
        "model": write_checkpoint(folder),
        "slots": 8,
        "context_length": CONTEXT,
        "on_update": "recompute",
        "seed": 0,
        "name": "under-test",
    }
    return SglangJaxSampler(**(arguments | changes))


def make_sglang(folder: Path, url: str, **changes: Any) -> SglangClient:
    (folder / "model").mkdir()
    arguments: dict[str, Any] = {
        "url": url,
        "model": write_checkpoint(folder / "model"),
        "slots": 64,
        "context_length": CONTEXT,
        "on_update": "recompute",
        "seed": 0,
        "name": "under-test",
    }
    return SglangClient(**(arguments | changes))


def in_folder(folder: Path) -> Callable[..., Publication]:
    """Publishes in a folder beside the model of ``make_sglang(folder, ...)``."""
    return PublishedCheckpoints(folder / "published", folder / "model").write


def make_local(**changes: Any) -> LocalSampler:
    arguments: dict[str, Any] = {
        "model": CONFIG,
        "slots": 8,
        "context_length": CONTEXT,
        "on_update": "recompute",
        "seed": 0,
        "name": "under-test",
    }
    return LocalSampler(**(arguments | changes))
