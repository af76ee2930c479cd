"""The device mesh, and where each array lives on it.

Rows are split over ``data`` and ``fsdp`` together. Every weight is split over ``fsdp`` along
its hidden axis H, which all of them share; norms are small and live everywhere whole.
Optimizer moments live where their weights do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from learner.models.config import ModelConfig
from learner.models.weights import parameter_path

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
ROWS = PartitionSpec((DATA, FSDP))
"""How the rows of a micro-batch are split."""
WHOLE = PartitionSpec()
"""How what every device holds is split: not at all."""


class MeshError(ValueError):
    """The mesh does not fit the devices or the model; the message names both numbers."""


def make_mesh(
    config: ModelConfig, *, data: int, fsdp: int, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with axes ``data``, ``fsdp`` and ``tensor``.

    Args:
        config: the model whose weights are to be split.
        data: replicas of the weights.
        fsdp: devices that share one replica of the weights.
        tensor: must be 1.
        devices: the devices to use; all by default.

    Raises:
        MeshError: too few devices, a tensor axis, or a hidden size that cannot be split.
    """
    devices = jax.devices() if devices is None else devices
    if tensor != 1:
        raise MeshError(f"mesh axis tensor is {tensor}; only 1 is supported: use fsdp to split the weights")
    size = math.prod((data, fsdp, tensor))
    if size > len(devices):
        raise MeshError(f"mesh {data}x{fsdp}x{tensor} needs {size} devices; {len(devices)} exist: make it smaller")
    if config.hidden_size % fsdp:
        raise MeshError(f"hidden_size={config.hidden_size} cannot be split over fsdp={fsdp}; use a divisor of it")
    return Mesh(np.asarray(devices[:size]).reshape(data, fsdp, tensor), (DATA, FSDP, TENSOR))


def partition(tree: Any) -> Any:
    """The partition spec of every array of a tree of parameters, moments and counters."""
    return jax.tree.map_with_path(lambda path, leaf: _spec(parameter_path(path), leaf.ndim), tree)


def shardings(mesh: Mesh, tree: Any) -> Any:
    """Like :func:`partition`, as shardings on ``mesh``."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition(tree))


def gather(weights: Any) -> Any:
    """Make weights whole inside ``shard_map``; its transpose scatters their gradients back."""

    def whole(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        axis = _hidden_axis(parameter_path(path), leaf.ndim)
        return leaf if axis is None else jax.lax.all_gather(leaf, FSDP, axis=axis, tiled=True)

    return jax.tree.map_with_path(whole, weights)


def _spec(path: tuple[str, ...], ndim: int) -> PartitionSpec:
    axis = _hidden_axis(path, ndim)
    return WHOLE if axis is None else PartitionSpec(*[None] * axis, FSDP)


def _hidden_axis(path: tuple[str, ...], ndim: int) -> int | None:
    """The axis to split: H in the name of the weight (``o_NDH``); none for norms and counters.

    Stacked layers have one more axis than the name says, in front.
    """
    axes = path[-1].rpartition("_")[2] if path else ""
    if "H" not in axes:
        return None
    return ndim - len(axes) + axes.index("H")
