"""Hugging Face tensors in and out of the decoder's parameters.

A table says which tensor of a checkpoint is which parameter; both directions read it, so they cannot disagree. A linear
layer of Hugging Face is ``[outputs, inputs]``; here the input axes come first and heads have an axis of their own, so a
tensor is a transpose and a reshape away from a parameter.

Files are read and written by the tensor, and read only as far as a device needs it: a host never holds more than what
its own devices are given, and one tensor.

Axes: L = layers; the others as in ``learner.models.decoder``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.multihost_utils import process_allgather
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from learner.models.config import ModelConfig, ModelError, read_config, write_config
from learner.models.decoder import Decoder
from learner.models.lora import Lora

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_WEIGHTS_FILES = "model*.safetensors"
MOST_FILE_BYTES = 5_000_000_000
"""A larger model is written as several files, as Hugging Face does."""

_SAME = None
"""``inputs`` of a tensor that has the same axes on both sides: norms and embeddings."""
_BIAS = 0
"""``inputs`` of a tensor that has the parameter's axes in one."""


class Tensor(NamedTuple):
    """One parameter and the checkpoint's tensors it is stacked from."""

    path: tuple[str, ...]
    names: tuple[str, ...]
    inputs: int | None
    """Number of leading input axes of the parameter (without L)."""
    is_stacked: bool

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in a checkpoint of one layer's parameter of ``shape``."""
        if self.inputs is _SAME:
            return shape
        outputs = (math.prod(shape[self.inputs :]),)
        return (*outputs, math.prod(shape[: self.inputs])) if self.inputs else outputs


type _Table = dict[tuple[str, ...], tuple[str, int | None]]
"""Path of a layer's parameter → name of its tensor within the layer, and ``inputs``."""

_HEAD_PATH, _HEAD_NAME = ("head_VH",), "lm_head.weight"
_EMBEDDING_NAME = "model.embed_tokens.weight"
LAYER: _Table = {
    ("attention_norm", "weight"): ("input_layernorm.weight", _SAME),
    ("attention", "q_HND"): ("self_attn.q_proj.weight", 1),
    ("attention", "k_HKD"): ("self_attn.k_proj.weight", 1),
    ("attention", "v_HKD"): ("self_attn.v_proj.weight", 1),
    ("attention", "o_NDH"): ("self_attn.o_proj.weight", 2),
    ("mlp", "gate_HF"): ("mlp.gate_proj.weight", 1),
    ("mlp", "up_HF"): ("mlp.up_proj.weight", 1),
    ("mlp", "down_FH"): ("mlp.down_proj.weight", 1),
}
_QKV_BIAS: _Table = {
    ("attention", "q_bias_ND"): ("self_attn.q_proj.bias", _BIAS),
    ("attention", "k_bias_KD"): ("self_attn.k_proj.bias", _BIAS),
    ("attention", "v_bias_KD"): ("self_attn.v_proj.bias", _BIAS),
}
_QK_NORM: _Table = {
    ("attention", "q_norm", "weight"): ("self_attn.q_norm.weight", _SAME),
    ("attention", "k_norm", "weight"): ("self_attn.k_norm.weight", _SAME),
}
_PRE_NORM: _Table = {("mlp_norm", "weight"): ("post_attention_layernorm.weight", _SAME)}
_SANDWICH_NORM: _Table = {
    ("after_attention_norm", "weight"): ("post_attention_layernorm.weight", _SAME),
    ("mlp_norm", "weight"): ("pre_feedforward_layernorm.weight", _SAME),
    ("after_mlp_norm", "weight"): ("post_feedforward_layernorm.weight", _SAME),
}


class _Source(Protocol):
    """Tensors by name, read in part."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray: ...


class _Arrays:
    """Tensors in memory."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def names(self) -> set[str]:
        return set(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._arrays[name].shape)

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        return self._arrays[name][part]


class _Files:
    """Tensors of the files of a checkpoint folder; to be used as a context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open = ExitStack()
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> _Files:
        paths = sorted(self._folder.glob(_WEIGHTS_FILES))
        if not paths:
            raise ModelError(f"{self._folder} holds no {WEIGHTS_FILE}; expected a Hugging Face checkpoint folder")
        for path in paths:
            try:
                file = self._open.enter_context(safe_open(path, "np"))
            except SafetensorError as error:
                raise ModelError(f"{path} is damaged ({error}): fetch it again") from error
            self._file_of |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        return self._file_of[name].get_slice(name)[part]


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

    placed = _flat(shardings) if shardings is not None else {}
    abstract = abstract_adapted(config, lora)[2]
    where = jax.tree.map_with_path(lambda path, _: placed.get(parameter_path(path)), abstract)
    return jax.jit(draw, out_shardings=where if placed else None)()


def to_hf(config: ModelConfig, params: nnx.State) -> dict[str, np.ndarray]:
    """The parameters as contiguous host arrays under their Hugging Face names.

    The arrays are copies: a later donation of ``params`` does not reach them.
    """
    host = _flat(jax.device_get(params))
    tensors: dict[str, np.ndarray] = {}
    for tensor in _tensors(config):
        value = host[tensor.path]
        for name, part in zip(tensor.names, value if tensor.is_stacked else [value], strict=True):
            tensors[name] = _stored(tensor, part)
    return tensors


def gather_hf(config: ModelConfig, params: nnx.State) -> dict[str, np.ndarray]:
    """Like :func:`to_hf`, of parameters that are spread over the processes of a gang, all of which must call this.

    Only the first process gets the tensors; for the others it is an empty dict.
    """
    tensors = {}
    for name, tensor in stored_tensors(_tensors(config), params):
        if jax.process_index() == 0:
            tensors[name] = tensor
    return tensors


def from_hf(config: ModelConfig, weights: Mapping[str, np.ndarray], shardings: Any = None) -> nnx.State:
    """The parameters of a decoder from tensors under their Hugging Face names, in float32.

    Args:
        config: the decoder's shape.
        weights: tensors by name.
        shardings: as for :func:`read_params`.

    Raises:
        ModelError: a tensor is missing, unknown, of another shape, or not of a floating type.
    """
    return _load(config, _Arrays(weights), shardings)


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
    return _load_table(table, set(tensors), abstract, _Arrays(tensors), shardings)


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
        with _Files(folder) as files:
            return _load(config, files, shardings)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}" if str(folder) not in str(error) else str(error)) from error


def weights_digest(folder: Path) -> str:
    """SHA-256 of the weights of a checkpoint folder, by which the same base is known again.

    Raises:
        ModelError: the folder holds no weights.
    """
    paths = sorted(folder.glob(_WEIGHTS_FILES))
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
    for name, part in stored_tensors(_tensors(config), params):
        if is_writer:
            file = file_of[name]
            held[file][name] = part
            if len(held[file]) == len(files[file]):
                save_file(held.pop(file), folder / file, metadata={"format": "pt"})
    if is_writer and len(files) > 1:
        total = sum(_stored_bytes(config).values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _load(config: ModelConfig, source: _Source, shardings: Any) -> nnx.State:
    """Read every parameter, each device its own part."""
    names = source.names()
    if config.tie_word_embeddings and _HEAD_NAME in names:
        _check_tied_head(source)
        names -= {_HEAD_NAME}
    table = list(_tensors(config))
    return _load_table(table, names, abstract_model(config)[1], source, shardings)


def _load_table(
    table: Sequence[Tensor], names: set[str], abstract: nnx.State, source: _Source, shardings: Any
) -> nnx.State:
    """Read what a table names, each device its own part; ``names`` are those that the source has."""
    _check_names({name for tensor in table for name in tensor.names}, names)
    shapes = {path: leaf.shape for path, leaf in _flat(abstract).items()}
    placed = _flat(shardings) if shardings is not None else {}
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    values = {}
    for tensor in table:
        shape = shapes[tensor.path]
        _check_shapes(tensor, shape, source)
        values[tensor.path] = jax.make_array_from_callback(
            shape, placed.get(tensor.path, here), partial(_part, tensor, shape, source)
        )
    return jax.tree.map_with_path(lambda path, _: values[parameter_path(path)], abstract)


def _part(tensor: Tensor, shape: tuple[int, ...], source: _Source, index: tuple[slice, ...]) -> np.ndarray:
    """The part of a parameter that ``index`` names, float32, in memory of its own."""
    spans = [range(*span.indices(size)) for span, size in zip(index, shape, strict=True)]
    part = np.empty([len(span) for span in spans], np.float32)
    if tensor.is_stacked:
        for position, layer in enumerate(spans[0]):
            part[position] = _read(tensor, shape[1:], spans[1:], source, tensor.names[layer])
    else:
        part[...] = _read(tensor, shape, spans, source, tensor.names[0])
    return part


def _read(tensor: Tensor, shape: tuple[int, ...], spans: Sequence[range], source: _Source, name: str) -> np.ndarray:
    """Part of one layer's parameter, as it is here."""
    if tensor.inputs is _SAME:
        value = source.read(name, tuple(slice(span.start, span.stop) for span in spans))
    else:
        outputs = _flat_span(spans[tensor.inputs :], shape[tensor.inputs :])
        inputs = (_flat_span(spans[: tensor.inputs], shape[: tensor.inputs]),) if tensor.inputs else ()
        value = source.read(name, (outputs, *inputs)).T
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ModelError(f"tensor {name} is {value.dtype}; expected a floating type: quantised weights do not load")
    return value.reshape([len(span) for span in spans])


def _flat_span(spans: Sequence[range], shape: Sequence[int]) -> slice:
    """Several axes of which only the first may be cut, as one."""
    inner = math.prod(shape[1:])
    assert all(len(span) == size for span, size in zip(spans[1:], shape[1:], strict=True)), (spans, shape)
    return slice(spans[0].start * inner, spans[0].stop * inner)


def _stored(tensor: Tensor, part: np.ndarray) -> np.ndarray:
    """One layer's parameter as a checkpoint has it, in memory of its own."""
    if tensor.inputs:
        part = part.reshape(math.prod(part.shape[: tensor.inputs]), -1).T
    elif tensor.inputs is _BIAS:
        part = part.reshape(-1)
    return np.array(part, order="C")


def stored_tensors(table: Iterable[Tensor], params: nnx.State) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of a checkpoint, brought to the host one at a time; in a gang, by all processes together."""
    leaves = _flat(params)
    for tensor in table:
        leaf = leaves[tensor.path]
        for layer, name in enumerate(tensor.names):
            part = _pick(leaf, layer) if tensor.is_stacked else leaf
            host = np.asarray(part) if part.is_fully_addressable else process_allgather(part, tiled=True)
            yield name, _stored(tensor, host)


_pick = jax.jit(partial(jax.lax.dynamic_index_in_dim, keepdims=False))


def _stored_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of every tensor of a checkpoint, in the order in which they are written."""
    shapes = {path: leaf.shape for path, leaf in _flat(abstract_model(config)[1]).items()}
    return {
        name: 4 * math.prod(shapes[tensor.path][1 if tensor.is_stacked else 0 :])
        for tensor in _tensors(config)
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


def _tensors(config: ModelConfig) -> Iterator[Tensor]:
    yield Tensor(("embedding_VH",), (_EMBEDDING_NAME,), _SAME, is_stacked=False)
    yield Tensor(("norm", "weight"), ("model.norm.weight",), _SAME, is_stacked=False)
    if not config.tie_word_embeddings:
        yield Tensor(_HEAD_PATH, (_HEAD_NAME,), _SAME, is_stacked=False)
    family = config.family
    layer: _Table = {**LAYER}
    layer |= _SANDWICH_NORM if family.sandwich_norm else _PRE_NORM
    layer |= _QKV_BIAS if family.qkv_bias else {}
    layer |= _QK_NORM if family.qk_norm else {}
    for path, (suffix, inputs) in layer.items():
        names = tuple(f"model.layers.{i}.{suffix}" for i in range(config.num_hidden_layers))
        yield Tensor(("layers", *path), names, inputs, is_stacked=True)


def _check_shapes(tensor: Tensor, shape: tuple[int, ...], source: _Source) -> None:
    expected = tensor.stored_shape(shape[1:] if tensor.is_stacked else shape)
    for name in tensor.names:
        if source.shape(name) != expected:
            raise ModelError(
                f"tensor {name} is {list(source.shape(name))}; expected {list(expected)}: "
                "is config.json that of another model?"
            )


def _check_tied_head(source: _Source) -> None:
    """Some published checkpoints carry a copy of a tied head; it must be one."""
    everything = (slice(None), slice(None))
    if _EMBEDDING_NAME not in source.names() or not np.array_equal(
        source.read(_HEAD_NAME, everything), source.read(_EMBEDDING_NAME, everything)
    ):
        raise ModelError(
            f"tensor {_HEAD_NAME} differs from {_EMBEDDING_NAME} although config.json ties them; "
            "set tie_word_embeddings to false"
        )


def _check_names(expected: set[str], given: set[str]) -> None:
    problems = [
        f"{what} {', '.join(sorted(names)[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for what, names in (("lacks", expected - given), ("has unknown", given - expected))
        if names
    ]
    if problems:
        raise ModelError(f"checkpoint {'; '.join(problems)}; expected the {len(expected)} tensors of its configuration")


def _flat(params: nnx.State) -> dict[tuple[str, ...], Any]:
    return {parameter_path(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}


def parameter_path(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The parameter a pytree path leads to, as names; empty where it leads to none.

    An optimizer's moments are trees of parameters too, so the same name is found in them.
    """
    return tuple(str(step.key) for step in path if isinstance(step, jax.tree_util.DictKey))
