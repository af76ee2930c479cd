"""Hugging Face tensors in and out of the decoder's parameters.

Here are the tables of the families, and whole models in memory and in folders; ``learner.models.tensors`` moves tensors
by such a table.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from learner.models.config import ModelConfig, ModelError, read_config, write_config
from learner.models.decoder import Decoder
from learner.models.lora import Lora
from learner.models.tensors import (
    BIAS,
    SAME,
    WEIGHTS_FILE,
    WEIGHTS_FILES,
    Arrays,
    Files,
    Source,
    Tensor,
    by_path,
    load_table,
    parameter_path,
    stored_tensors,
)

INDEX_FILE = "model.safetensors.index.json"
MOST_FILE_BYTES = 5_000_000_000
"""A larger model is written as several files, as Hugging Face does."""

type _Table = dict[tuple[str, ...], tuple[str, int | None]]
"""Path of a layer's parameter → name of its tensor within the layer, and ``inputs``."""

_HEAD_PATH, _HEAD_NAME = ("head_VH",), "lm_head.weight"
_EMBEDDING_NAME = "model.embed_tokens.weight"
LAYER: _Table = {
    ("attention_norm", "weight"): ("input_layernorm.weight", SAME),
    ("attention", "q_HND"): ("self_attn.q_proj.weight", 1),
    ("attention", "k_HKD"): ("self_attn.k_proj.weight", 1),
    ("attention", "v_HKD"): ("self_attn.v_proj.weight", 1),
    ("attention", "o_NDH"): ("self_attn.o_proj.weight", 2),
    ("mlp", "gate_HF"): ("mlp.gate_proj.weight", 1),
    ("mlp", "up_HF"): ("mlp.up_proj.weight", 1),
    ("mlp", "down_FH"): ("mlp.down_proj.weight", 1),
}
_QKV_BIAS: _Table = {
    ("attention", "q_bias_ND"): ("self_attn.q_proj.bias", BIAS),
    ("attention", "k_bias_KD"): ("self_attn.k_proj.bias", BIAS),
    ("attention", "v_bias_KD"): ("self_attn.v_proj.bias", BIAS),
}
_QK_NORM: _Table = {
    ("attention", "q_norm", "weight"): ("self_attn.q_norm.weight", SAME),
    ("attention", "k_norm", "weight"): ("self_attn.k_norm.weight", SAME),
}
_PRE_NORM: _Table = {("mlp_norm", "weight"): ("post_attention_layernorm.weight", SAME)}
_SANDWICH_NORM: _Table = {
    ("after_attention_norm", "weight"): ("post_attention_layernorm.weight", SAME),
    ("mlp_norm", "weight"): ("pre_feedforward_layernorm.weight", SAME),
    ("after_mlp_norm", "weight"): ("post_feedforward_layernorm.weight", SAME),
}


@lru_cache(maxsize=8)
def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The decoder's graph, and its parameters as shapes: nothing is allocated."""
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    return graph, params


@lru_cache(maxsize=8)
def abstract_adapted(config: ModelConfig, lora: Lora) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """The graph of a decoder with adapters, its own parameters, and those of the adapters; as shapes."""
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0), lora)))
    adapters, base = nnx.split_state(params, nnx.LoRAParam, nnx.Param)
    return graph, base, adapters


def initial_params(config: ModelConfig, seed: int) -> nnx.State:
    """Freshly drawn parameters of a decoder."""
    # Compiled as a whole: drawn one by one, a small model takes seconds.
    return jax.jit(lambda: nnx.split(Decoder(config, nnx.Rngs(seed)))[1])()


def initial_adapters(config: ModelConfig, lora: Lora, seed: int, shardings: Any = None) -> nnx.State:
    """Fresh adapters of a decoder, which change nothing yet; the frozen base is not needed for them.

    Args:
        config: the decoder's shape.
        lora: their settings.
        seed: they are drawn with it.
        shardings: as for :func:`read_params`; the numbers do not depend on them.
    """

    def draw() -> nnx.State:
        params = nnx.split(Decoder(config, nnx.Rngs(seed), lora))[1]
        adapters, _ = nnx.split_state(params, nnx.LoRAParam, nnx.Param)
        return adapters

    placed = by_path(shardings) if shardings is not None else {}
    abstract = abstract_adapted(config, lora)[2]
    where = jax.tree.map_with_path(lambda path, _: placed.get(parameter_path(path)), abstract)
    return jax.jit(draw, out_shardings=where if placed else None)()


def to_hf(config: ModelConfig, params: nnx.State) -> dict[str, np.ndarray]:
    """The parameters as contiguous host arrays under their Hugging Face names.

    The arrays are copies: a later donation of ``params`` does not reach them.
    """
    return {name: np.array(value, order="C") for name, value in seen_as_hf(config, params).items()}


def seen_as_hf(config: ModelConfig, params: nnx.State) -> dict[str, np.ndarray]:
    """Like :func:`to_hf` without a copy where the device's memory is the host's: ``params`` must stay as they are.

    The layers of a parameter then lie one behind the other, each with its axes in the order of the parameter.
    """
    host = by_path(jax.device_get(params))
    tensors: dict[str, np.ndarray] = {}
    for tensor in tensor_table(config):
        value = host[tensor.path]
        for name, part in zip(tensor.names, value if tensor.is_stacked else [value], strict=True):
            tensors[name] = tensor.stored(part)
    return tensors


def gather_hf(config: ModelConfig, params: nnx.State) -> dict[str, np.ndarray]:
    """Like :func:`to_hf`, of parameters that are spread over the processes of a gang, all of which must call this.

    Only the first process gets the tensors; for the others it is an empty dict.
    """
    tensors = {}
    for name, tensor in stored_tensors(tensor_table(config), params):
        if jax.process_index() == 0:
            tensors[name] = tensor
    return tensors


def from_hf(
    config: ModelConfig, weights: Mapping[str, np.ndarray], shardings: Any = None, *, borrow: bool = False
) -> nnx.State:
    """The parameters of a decoder from tensors under their Hugging Face names, in float32.

    Args:
        config: the decoder's shape.
        weights: tensors by name.
        shardings: as for :func:`read_params`.
        borrow: the parameters may lie in the memory of ``weights``, which then never change; see :func:`seen_as_hf`.

    Raises:
        ModelError: a tensor is missing, unknown, of another shape, or not of a floating type.
    """
    return _load(config, Arrays(weights), shardings, borrow=borrow)


def load_tensors(
    table: Sequence[Tensor], abstract: nnx.State, tensors: Mapping[str, np.ndarray], shardings: Any = None
) -> nnx.State:
    """Parameters of another table than the decoder's own, in float32.

    Args:
        table: which tensor is which parameter.
        abstract: the parameters as shapes.
        tensors: by name.
        shardings: as for :func:`read_params`.

    Raises:
        ModelError: a tensor is missing, unknown, of another shape, or not of a floating type.
    """
    return load_table(table, set(tensors), abstract, Arrays(tensors), shardings)


def read_model(folder: Path) -> tuple[ModelConfig, nnx.State]:
    """Read a Hugging Face checkpoint folder, with its parameters on one device.

    Raises:
        ModelError: the folder is not a checkpoint, or not one of this decoder.
    """
    config = read_config(folder)
    return config, read_params(config, folder, None)


def read_params(config: ModelConfig, folder: Path, shardings: Any) -> nnx.State:
    """Read the parameters of a checkpoint folder straight to where they belong.

    Args:
        config: of that folder.
        folder: with one or more ``model*.safetensors``.
        shardings: of each parameter, a tree like that of the parameters; None puts all on one device.

    Raises:
        ModelError: a tensor is missing, unknown, of another shape, or not of a floating type.
    """
    try:
        with Files(folder) as files:
            return _load(config, files, shardings)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}" if str(folder) not in str(error) else str(error)) from error


def weights_digest(folder: Path) -> str:
    """SHA-256 of the weights of a checkpoint folder, by which the same base is known again.

    Raises:
        ModelError: the folder holds no weights.
    """
    paths = sorted(folder.glob(WEIGHTS_FILES))
    if not paths:
        raise ModelError(f"{folder} holds no {WEIGHTS_FILE}; expected a Hugging Face checkpoint folder")
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def write_model(
    config: ModelConfig,
    params: nnx.State,
    folder: Path,
    *,
    eos_token_id: int | None,
    most_file_bytes: int = MOST_FILE_BYTES,
) -> None:
    """Write ``config.json`` and the weights; the tokenizer's files are the caller's.

    In a gang every process calls this, and the first one writes.

    Args:
        config: the decoder's shape.
        params: its parameters.
        folder: where to; made if missing.
        eos_token_id: as for ``write_config``.
        most_file_bytes: a larger model is written as several files and an index.

    Raises:
        ModelError: ``eos_token_id`` is outside the vocabulary.
    """
    is_writer = jax.process_index() == 0
    if is_writer:
        write_config(config, folder, eos_token_id=eos_token_id)
    files = _file_plan(config, most_file_bytes)
    file_of = {name: file for file, names in files.items() for name in names}
    held: dict[str, dict[str, np.ndarray]] = {file: {} for file in files}
    for name, part in stored_tensors(tensor_table(config), params):
        if is_writer:
            file = file_of[name]
            held[file][name] = part
            if len(held[file]) == len(files[file]):
                save_file(held.pop(file), folder / file, metadata={"format": "pt"})
    if is_writer and len(files) > 1:
        total = sum(_stored_bytes(config).values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _load(config: ModelConfig, source: Source, shardings: Any, *, borrow: bool = False) -> nnx.State:
    """Read every parameter, each device its own part."""
    names = source.names()
    if config.tie_word_embeddings and _HEAD_NAME in names:
        _check_tied_head(source)
        names -= {_HEAD_NAME}
    table = list(tensor_table(config))
    return load_table(table, names, abstract_model(config)[1], source, shardings, borrow=borrow)


def _stored_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of every tensor of a checkpoint, in the order in which they are written."""
    shapes = {path: leaf.shape for path, leaf in by_path(abstract_model(config)[1]).items()}
    return {
        name: 4 * math.prod(shapes[tensor.path][1 if tensor.is_stacked else 0 :])
        for tensor in tensor_table(config)
        for name in tensor.names
    }


def _file_plan(config: ModelConfig, most_bytes: int) -> dict[str, list[str]]:
    """The files of a checkpoint and the tensors in each."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in _stored_bytes(config).items():
        if groups[-1] and filled + size > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {WEIGHTS_FILE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, start=1)}


def tensor_table(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of a checkpoint of this decoder."""
    yield Tensor(("embedding_VH",), (_EMBEDDING_NAME,), SAME, is_stacked=False)
    yield Tensor(("norm", "weight"), ("model.norm.weight",), SAME, is_stacked=False)
    if not config.tie_word_embeddings:
        yield Tensor(_HEAD_PATH, (_HEAD_NAME,), SAME, is_stacked=False)
    family = config.family
    layer: _Table = {**LAYER}
    layer |= _SANDWICH_NORM if family.sandwich_norm else _PRE_NORM
    layer |= _QKV_BIAS if family.qkv_bias else {}
    layer |= _QK_NORM if family.qk_norm else {}
    for path, (suffix, inputs) in layer.items():
        names = tuple(f"model.layers.{i}.{suffix}" for i in range(config.num_hidden_layers))
        yield Tensor(("layers", *path), names, inputs, is_stacked=True)


def _check_tied_head(source: Source) -> None:
    """Some published checkpoints carry a copy of a tied head; it must be one."""
    everything = (slice(None), slice(None))
    if _EMBEDDING_NAME not in source.names() or not np.array_equal(
        source.read(_HEAD_NAME, everything), source.read(_EMBEDDING_NAME, everything)
    ):
        raise ModelError(
            f"tensor {_HEAD_NAME} differs from {_EMBEDDING_NAME} although config.json ties them; "
            "set tie_word_embeddings to false"
        )
