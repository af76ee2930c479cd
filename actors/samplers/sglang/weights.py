"""Hugging Face tensors to the leaves of an engine's parameters, by the engine's own table.

Checked against the table before anything is replaced: every tensor there, none unknown, shapes and dtypes that fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from actors.samplers.contract import UpdateError
from actors.samplers.sglang.release import MODEL_TYPES, ReleaseError

_TABLES = {model_type: f"_create_{model_type}_weight_mappings" for model_type in MODEL_TYPES}


def check_weights(weights: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Find out whether ``weights`` are those of the served model, whose tensors have ``shapes``.

    Raises:
        UpdateError: a tensor is missing, unknown, misshapen, or not of floating point.
    """
    for problem, names in (
        ("is missing", sorted(shapes.keys() - weights.keys())),
        ("is unknown to the served model", sorted(weights.keys() - shapes.keys())),
    ):
        if names:
            raise UpdateError(
                f"tensor {names[0]} {problem} ({len(names)} in all); publish the weights of the served model"
            )
    for name, shape in shapes.items():
        value = weights[name]
        if value.shape != shape:
            raise UpdateError(
                f"tensor {name} has shape {list(value.shape)}; expected {list(shape)}: publish the weights of the "
                "served model"
            )
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise UpdateError(f"tensor {name} is {value.dtype}; expected floating point")


class _Tensor(NamedTuple):
    """One tensor of a checkpoint and the leaf it becomes."""

    leaf: int
    shape: tuple[int, ...]
    """Of the tensor in a checkpoint."""
    transposed: bool
    copies: int
    """Times that each key/value head is repeated, so that every device of a tensor-parallel group has one."""


class WeightTable:
    """Which tensor is which leaf of one engine."""

    def __init__(self, runner: Any) -> None:
        """Read the table of the model behind ``runner``, an engine's ``model_runner``.

        Raises:
            ReleaseError: the model has parameters that no tensor of the table fills as a whole.
        """
        # Descriptions: the arrays themselves are to be freed once they are replaced.
        self._leaves = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in runner.model_state_leaves
        ]
        self._head_dim: int = runner.model_config.head_dim
        positions = _positions(runner)
        mappings = getattr(runner.model, _TABLES[runner.model_config.hf_config.model_type])()
        self._tensors = {
            name: self._tensor(runner, name, mapping, positions[mapping.target_path])
            for name, mapping in mappings.items()
            if mapping.target_path in positions  # Qwen2's table names a bias of the output that its model does not have
        }
        filled = sorted(tensor.leaf for tensor in self._tensors.values())
        if filled != list(range(len(self._leaves))):
            raise ReleaseError(
                f"sampler.kind=sglang_jax: {len(filled)} tensors fill {len(set(filled))} of the engine's "
                f"{len(self._leaves)} parameters; expected one for each: use another model, or sampler.kind=local"
            )

    def zeros(self) -> dict[str, np.ndarray]:
        """Weights of the right shapes, all 0."""
        return {name: np.zeros(tensor.shape, np.float32) for name, tensor in self._tensors.items()}

    def leaves(self, weights: Mapping[str, np.ndarray]) -> list[jax.Array]:
        """The leaves that hold ``weights``, on the engine's devices and in its dtype; its own stay as they are.

        Raises:
            UpdateError: a tensor is missing, unknown, misshapen, or not of floating point.
        """
        check_weights(weights, {name: tensor.shape for name, tensor in self._tensors.items()})
        leaves: list[Any] = [None] * len(self._leaves)
        for name, tensor in self._tensors.items():
            leaves[tensor.leaf] = self._leaf(tensor, weights[name])
        return jax.block_until_ready(leaves)

    def _tensor(self, runner: Any, name: str, mapping: Any, leaf: int) -> _Tensor:
        if any(
            value is not None
            for value in (mapping.reshape, mapping.repeat, mapping.transpose_axes, mapping.physical_to_logical_map)
        ):
            raise ReleaseError(
                f"sampler.kind=sglang_jax: the engine reshapes {name}; expected a transpose at most: "
                "use another model, or sampler.kind=local"
            )
        copies = 1
        if mapping.kv_head_padding and runner.model_config.needs_kv_head_replication(runner.attention_tp_size):
            copies = int(runner.model_config.get_num_kv_head_replicas(runner.attention_tp_size))
        shape = tuple(self._leaves[leaf].shape)
        outputs_first = shape[::-1] if mapping.transpose else shape
        return _Tensor(leaf, (outputs_first[0] // copies, *outputs_first[1:]), mapping.transpose, copies)

    def _leaf(self, tensor: _Tensor, value: np.ndarray) -> jax.Array:
        held = self._leaves[tensor.leaf]
        if tensor.copies > 1:
            by_head = value.reshape(-1, self._head_dim, *value.shape[1:])
            value = np.repeat(by_head, tensor.copies, axis=0).reshape(-1, *value.shape[1:])
        # A copy in any case: a CPU device would otherwise serve from the caller's memory.
        copied = np.array(value.T if tensor.transposed else value, dtype=held.dtype, order="C", copy=True)
        return jax.device_put(copied, held.sharding)


def _positions(runner: Any) -> dict[str, int]:
    """Positions of the engine's leaves by dotted path, such as ``model.layers.0.mlp.up_proj.weight``."""
    from flax import nnx

    paths = jax.tree_util.tree_flatten_with_path(nnx.split(runner.model)[1])[0]
    return {".".join(_words(path)): position for position, (path, _) in enumerate(paths)}


def _words(path: tuple[Any, ...]) -> list[str]:
    # The last entry is the variable's own value.
    return [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey | jax.tree_util.SequenceKey)]
