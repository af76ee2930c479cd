"""Stored tensors and parameters: a table says which is which, and both directions read it, so they cannot disagree.

A linear layer of Hugging Face is ``[outputs, inputs]``; here the input axes come first and heads have an axis of their
own, so a tensor is a transpose and a reshape away from a parameter. Tensors are read only as far as a device needs
them, and written one at a time: a host never holds more than what its own devices are given, and one tensor.

Axes: L = layers; the others as in ``learner.models.decoder``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.multihost_utils import process_allgather
from safetensors import SafetensorError, safe_open

from learner.models.config import ModelError

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_FILES = "model*.safetensors"

SAME = None
"""``inputs`` of a tensor that has the same axes on both sides: norms and embeddings."""
BIAS = 0
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
        if self.inputs is SAME:
            return shape
        outputs = (math.prod(shape[self.inputs :]),)
        return (*outputs, math.prod(shape[: self.inputs])) if self.inputs else outputs

    def stored(self, part: np.ndarray) -> np.ndarray:
        """One layer's parameter as a checkpoint has it, over the same memory; its axes may lie there the other way."""
        if self.inputs:
            return part.reshape(math.prod(part.shape[: self.inputs]), -1).T
        return part.reshape(-1) if self.inputs is BIAS else part


class Source(Protocol):
    """Tensors by name, read in part."""

    def names(self) -> set[str]:
        """Of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        ...

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """Part of one tensor."""
        ...


class Arrays:
    """Tensors in memory."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        return tuple(self._arrays[name].shape)

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """Part of one tensor."""
        return self._arrays[name][part]


class Files:
    """Tensors of the files of a checkpoint folder; to be used as a context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open = ExitStack()
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> Files:
        paths = sorted(self._folder.glob(WEIGHTS_FILES))
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
        """Of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """Part of one tensor."""
        return self._file_of[name].get_slice(name)[part]


def load_table(
    table: Sequence[Tensor],
    names: set[str],
    abstract: nnx.State,
    source: Source,
    shardings: Any,
    *,
    borrow: bool = False,
) -> nnx.State:
    """Read what a table names, each device its own part; ``names`` are those that the source has.

    With ``borrow``, what lies in the source's memory as it is wanted may stay there.
    """
    _check_names({name for tensor in table for name in tensor.names}, names)
    shapes = {path: leaf.shape for path, leaf in by_path(abstract).items()}
    placed = by_path(shardings) if shardings is not None else {}
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    values = {}
    for tensor in table:
        shape = shapes[tensor.path]
        _check_shapes(tensor, shape, source)
        values[tensor.path] = jax.make_array_from_callback(
            shape, placed.get(tensor.path, here), partial(read_part, tensor, shape, source, borrow=borrow)
        )
    return jax.tree.map_with_path(lambda path, _: values[parameter_path(path)], abstract)


def read_part(
    tensor: Tensor, shape: tuple[int, ...], source: Source, index: tuple[slice, ...], *, borrow: bool = False
) -> np.ndarray:
    """The part of a parameter that ``index`` names, float32, in memory of its own unless that may be borrowed."""
    spans = [range(*span.indices(size)) for span, size in zip(index, shape, strict=True)]
    names = [tensor.names[layer] for layer in spans[0]] if tensor.is_stacked else [tensor.names[0]]
    inner = 1 if tensor.is_stacked else 0
    read = partial(_read, tensor, shape[inner:], spans[inner:], source)
    whole = [len(span) for span in spans]
    if borrow and (joined := _joined([read(name) for name in names], whole)) is not None:
        return joined
    part = np.empty(whole, np.float32)
    for position, name in enumerate(names):
        part[position if tensor.is_stacked else ...] = read(name)
    return part


def _joined(parts: Sequence[np.ndarray], shape: Sequence[int]) -> np.ndarray | None:
    """Arrays that lie in memory one behind the other as one array of ``shape`` there; None if they do not."""
    first = parts[0]
    start, size = first.ctypes.data, first.nbytes
    for position, part in enumerate(parts):
        if part.dtype != np.float32 or not part.flags.c_contiguous or part.ctypes.data != start + position * size:
            return None
    strides = first.strides if len(shape) == first.ndim else (size, *first.strides)
    return np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)


def _read(tensor: Tensor, shape: tuple[int, ...], spans: Sequence[range], source: Source, name: str) -> np.ndarray:
    """Part of one layer's parameter, as it is here."""
    if tensor.inputs is SAME:
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


def stored_tensors(table: Iterable[Tensor], params: nnx.State) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of a checkpoint, brought to the host one at a time; in a gang, by all processes together."""
    leaves = by_path(params)
    for tensor in table:
        leaf = leaves[tensor.path]
        for layer, name in enumerate(tensor.names):
            part = _pick(leaf, layer) if tensor.is_stacked else leaf
            host = np.asarray(part) if part.is_fully_addressable else process_allgather(part, tiled=True)
            yield name, np.array(tensor.stored(host), order="C")


_pick = jax.jit(partial(jax.lax.dynamic_index_in_dim, keepdims=False))


def _check_shapes(tensor: Tensor, shape: tuple[int, ...], source: Source) -> None:
    expected = tensor.stored_shape(shape[1:] if tensor.is_stacked else shape)
    for name in tensor.names:
        if source.shape(name) != expected:
            raise ModelError(
                f"tensor {name} is {list(source.shape(name))}; expected {list(expected)}: "
                "is config.json that of another model?"
            )


def _check_names(expected: set[str], given: set[str]) -> None:
    problems = [
        f"{what} {', '.join(sorted(names)[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for what, names in (("lacks", expected - given), ("has unknown", given - expected))
        if names
    ]
    if problems:
        raise ModelError(f"checkpoint {'; '.join(problems)}; expected the {len(expected)} tensors of its configuration")


def by_path(params: nnx.State) -> dict[tuple[str, ...], Any]:
    """The leaves of a tree of parameters, or of what belongs to them, by their paths."""
    return {parameter_path(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}


def parameter_path(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The parameter a pytree path leads to, as names; empty where it leads to none.

    An optimizer's moments are trees of parameters too, so the same name is found in them.
    """
    return tuple(str(step.key) for step in path if isinstance(step, jax.tree_util.DictKey))
