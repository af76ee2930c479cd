"""Hugging Face tensors in and out of the decoder's parameters.

A table says which tensor of a checkpoint is which parameter; both directions read it, so
they cannot disagree. A linear layer of Hugging Face is ``[outputs, inputs]``; here the
input axes come first and heads have an axis of their own, so a tensor is a transpose and
a reshape away from a parameter.

Axes: L = layers; the others as in ``learner.models.decoder``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from learner.models.config import ModelConfig, ModelError, read_config, write_config
from learner.models.decoder import Decoder

WEIGHTS_FILE = "model.safetensors"

_KEPT = 0
"""``inputs`` of a tensor that has the same axes on both sides: norms and embeddings."""


class _Tensor(NamedTuple):
    """One parameter and the checkpoint's tensors it is stacked from."""

    path: tuple[str, ...]
    names: tuple[str, ...]
    inputs: int
    """Number of leading input axes of the parameter (without L)."""
    stacked: bool


_MODEL = {
    ("embedding_VH",): "model.embed_tokens.weight",
    ("norm", "weight"): "model.norm.weight",
}
_HEAD_PATH, _HEAD_NAME = ("head_VH",), "lm_head.weight"
_LAYER = {
    ("attention_norm", "weight"): ("input_layernorm", _KEPT),
    ("attention", "q_HND"): ("self_attn.q_proj", 1),
    ("attention", "k_HKD"): ("self_attn.k_proj", 1),
    ("attention", "v_HKD"): ("self_attn.v_proj", 1),
    ("attention", "o_NDH"): ("self_attn.o_proj", 2),
    ("attention", "q_norm", "weight"): ("self_attn.q_norm", _KEPT),
    ("attention", "k_norm", "weight"): ("self_attn.k_norm", _KEPT),
    ("mlp_norm", "weight"): ("post_attention_layernorm", _KEPT),
    ("mlp", "gate_HF"): ("mlp.gate_proj", 1),
    ("mlp", "up_HF"): ("mlp.up_proj", 1),
    ("mlp", "down_FH"): ("mlp.down_proj", 1),
}


@lru_cache(maxsize=8)
def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The decoder's graph, and its parameters as shapes: nothing is allocated."""
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    return graph, params


def initial_params(config: ModelConfig, seed: int) -> nnx.State:
    """Freshly drawn parameters of a decoder."""
    # Compiled as a whole: drawn one by one, a small model takes seconds.
    return jax.jit(lambda: nnx.split(Decoder(config, nnx.Rngs(seed)))[1])()


def to_hf(config: ModelConfig, params: nnx.State) -> dict[str, np.ndarray]:
    """The parameters as contiguous host arrays under their Hugging Face names.

    The arrays are copies: a later donation of ``params`` does not reach them.
    """
    host = _flat(jax.device_get(params))
    tensors: dict[str, np.ndarray] = {}
    for tensor in _tensors(config):
        value = host[tensor.path]
        for name, part in zip(tensor.names, value if tensor.stacked else [value], strict=True):
            if tensor.inputs:
                rows = math.prod(part.shape[: tensor.inputs])
                part = part.reshape(rows, -1).T
            tensors[name] = np.array(part, order="C")
    return tensors


def from_hf(config: ModelConfig, weights: Mapping[str, np.ndarray]) -> nnx.State:
    """The parameters of a decoder from tensors under their Hugging Face names, in float32.

    Raises:
        ModelError: a tensor is missing, unknown, of another shape, or not of a floating type.
    """
    weights = _without_tied_head(config, weights)
    table = list(_tensors(config))
    _check_names({name for tensor in table for name in tensor.names}, set(weights))
    _, abstract = abstract_model(config)
    shapes = {path: leaf.shape for path, leaf in _flat(abstract).items()}
    values = {}
    for tensor in table:
        shape = shapes[tensor.path][1:] if tensor.stacked else shapes[tensor.path]
        parts = [_part(name, weights[name], shape, tensor.inputs) for name in tensor.names]
        # jnp.array copies: on CPU jnp.asarray may alias the caller's memory.
        values[tensor.path] = jnp.array(np.stack(parts) if tensor.stacked else parts[0])
    return jax.tree.map_with_path(lambda path, _: values[parameter_path(path)], abstract)


def read_model(folder: Path) -> tuple[ModelConfig, nnx.State]:
    """Read a Hugging Face checkpoint folder.

    Raises:
        ModelError: the folder is not a checkpoint, or not one of this decoder.
    """
    config = read_config(folder)
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no {WEIGHTS_FILE}; expected a Hugging Face checkpoint folder")
    weights: dict[str, np.ndarray] = {}
    for file in files:
        weights.update(load_file(file))
    try:
        return config, from_hf(config, weights)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error


def write_model(config: ModelConfig, params: nnx.State, folder: Path, *, eos_token_id: int | None) -> None:
    """Write ``config.json`` and ``model.safetensors``; the tokenizer's files are the caller's.

    Args:
        config: the decoder's shape.
        params: its parameters.
        folder: where to; made if missing.
        eos_token_id: as for ``write_config``.

    Raises:
        ModelError: ``eos_token_id`` is outside the vocabulary.
    """
    write_config(config, folder, eos_token_id=eos_token_id)
    save_file(to_hf(config, params), folder / WEIGHTS_FILE, metadata={"format": "pt"})


def _tensors(config: ModelConfig) -> Iterator[_Tensor]:
    for path, name in _MODEL.items():
        yield _Tensor(path, (name,), _KEPT, stacked=False)
    if not config.tie_word_embeddings:
        yield _Tensor(_HEAD_PATH, (_HEAD_NAME,), _KEPT, stacked=False)
    for path, (suffix, inputs) in _LAYER.items():
        names = tuple(f"model.layers.{i}.{suffix}.weight" for i in range(config.num_hidden_layers))
        yield _Tensor(("layers", *path), names, inputs, stacked=True)


def _part(name: str, weight: np.ndarray, shape: tuple[int, ...], inputs: int) -> np.ndarray:
    """One checkpoint tensor as a parameter of ``shape``."""
    expected = (math.prod(shape[inputs:]), math.prod(shape[:inputs])) if inputs else shape
    if tuple(weight.shape) != expected:
        raise ModelError(
            f"tensor {name} is {list(weight.shape)}; expected {list(expected)}: is config.json that of another model?"
        )
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ModelError(f"tensor {name} is {weight.dtype}; expected a floating type: quantised weights do not load")
    weight = np.asarray(weight, np.float32)
    return weight.T.reshape(shape) if inputs else weight


def _without_tied_head(config: ModelConfig, weights: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Drop the copy of a tied head that some published checkpoints carry."""
    if not config.tie_word_embeddings or _HEAD_NAME not in weights:
        return weights
    if not np.array_equal(weights[_HEAD_NAME], weights.get("model.embed_tokens.weight", np.empty(0))):
        raise ModelError(
            f"tensor {_HEAD_NAME} differs from model.embed_tokens.weight although config.json ties them; "
            "set tie_word_embeddings to false"
        )
    return {name: weight for name, weight in weights.items() if name != _HEAD_NAME}


def _check_names(expected: set[str], given: set[str]) -> None:
    problems = [
        f"{what} {', '.join(sorted(names)[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for what, names in (("lacks", expected - given), ("has unknown", given - expected))
        if names
    ]
    if problems:
        raise ModelError(f"checkpoint {'; '.join(problems)}; expected the {len(expected)} tensors of its config.json")


def _flat(params: nnx.State) -> dict[tuple[str, ...], Any]:
    return {parameter_path(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}


def parameter_path(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The parameter a pytree path leads to, as names; empty where it leads to none.

    An optimizer's moments are trees of parameters too, so the same name is found in them.
    """
    return tuple(str(step.key) for step in path if isinstance(step, jax.tree_util.DictKey))
