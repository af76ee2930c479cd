"""The device mesh, and where each array lives on it.

A weight's name says its axes, and an axis where it is split:

* over ``fsdp``: H, the hidden axis that all of them share. It is gathered again one layer at a time (ZeRO-3:
  Rajbhandari et al. 2020).
* over ``tensor``: query heads N, key/value heads K, feed-forward channels F and the vocabulary V. They stay split
  (Megatron: Shoeybi et al. 2019).

Norms are small and live everywhere whole. Optimizer moments live where their weights do. Rows of a micro-batch are
split over ``data`` and ``fsdp`` together, and are the same on every device of a ``tensor`` axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from learner.models.config import ModelConfig
from learner.models.tensors import parameter_path

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
ROWS = PartitionSpec((DATA, FSDP))
"""How the rows of a micro-batch are split."""
WHOLE = PartitionSpec()
"""How what every device holds is split: not at all."""

_AXES = {"H": FSDP, "N": TENSOR, "K": TENSOR, "F": TENSOR, "V": TENSOR}


class MeshError(ValueError):
    """The mesh does not fit the devices or the model; the message names both numbers."""


def make_mesh(
    config: ModelConfig, *, data: int, fsdp: int, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with axes ``data``, ``fsdp`` and ``tensor``; neighbours on the last are nearest to each other.

    Args:
        config: the model whose weights are to be split.
        data: replicas of the weights.
        fsdp: devices, times ``tensor``, that share one replica of the weights.
        tensor: devices that share the heads, the feed-forward channels and the vocabulary.
        devices: the devices to compile for; all that exist by default, to run on.

    Raises:
        MeshError: too few devices, a model that cannot be split like this, or processes that would share rows.
    """
    existing = jax.devices() if devices is None else devices
    size = math.prod((data, fsdp, tensor))
    if size > len(existing):
        raise MeshError(f"mesh {data}x{fsdp}x{tensor} needs {size} devices; {len(existing)} exist: make it smaller")
    check_mesh(config, fsdp=fsdp, tensor=tensor)
    arranged_DFT = _arranged(existing[:size], (data, fsdp, tensor))
    if devices is None:
        check_processes(arranged_DFT, jax.process_count())
    return Mesh(arranged_DFT, (DATA, FSDP, TENSOR))


def _arranged(devices: Sequence[jax.Device], shape: tuple[int, int, int]) -> np.ndarray:
    """The devices as an array of that shape; TPUs so that neighbours in the array are joined by links."""
    if devices[0].platform != "tpu":
        return np.asarray(devices).reshape(shape)
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def check_processes(devices_DFT: np.ndarray, count: int) -> None:
    """Raise ``MeshError`` where ``count`` processes cannot each bring an equal share of the rows."""
    shares = [sum(device.process_index == index for device in devices_DFT.flat) for index in range(count)]
    if len(set(shares)) > 1:
        raise MeshError(
            f"mesh {'x'.join(map(str, devices_DFT.shape))} has {' + '.join(map(str, shares))} devices of {count} "
            "processes; expected equally many of each: use a mesh of all their devices"
        )
    for devices_T in devices_DFT.reshape(-1, devices_DFT.shape[-1]):
        holders = sorted({device.process_index for device in devices_T})
        if len(holders) > 1:  # JAX would take what each brings for the same rows
            raise MeshError(
                f"tensor={len(devices_T)}: processes {', '.join(map(str, holders))} hold devices of one tensor axis, "
                "which share their rows, but each process brings rows of its own; use a smaller tensor axis, that one "
                "host holds, and a larger fsdp"
            )


def check_mesh(config: ModelConfig, *, fsdp: int, tensor: int) -> None:
    """Raise ``MeshError`` where the model cannot be split like this."""
    if config.hidden_size % fsdp:
        raise MeshError(f"hidden_size={config.hidden_size} cannot be split over fsdp={fsdp}; use a divisor of it")
    for name in ("num_key_value_heads", "num_attention_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % tensor:
            raise MeshError(f"{name}={getattr(config, name)} cannot be split over tensor={tensor}; use a divisor of it")


def partition(tree: Any) -> Any:
    """The partition spec of every array of a tree of parameters, moments and counters."""
    return jax.tree.map_with_path(lambda path, leaf: _spec(parameter_path(path), leaf.ndim), tree)


def shardings(mesh: Mesh, tree: Any) -> Any:
    """Like :func:`partition`, as shardings on ``mesh``."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition(tree))


def held(mesh: Mesh, tree: Any) -> Any:
    """Like :func:`partition`, for the arguments of a ``shard_map``: axes of ``mesh`` of size 1 count as split.

    That changes no layout. But the transpose of ``shard_map`` sums a gradient over every axis that its argument is not
    split over, and XLA copies what it sums over one device.
    """
    single = tuple(axis for axis, size in mesh.shape.items() if size == 1)

    def spec(path: tuple[Any, ...], leaf: jax.Array) -> PartitionSpec:
        split = _spec(parameter_path(path), leaf.ndim)
        if not leaf.ndim:
            return split
        kept = [None if axis in single else axis for axis in split] + [None] * (leaf.ndim - len(split))
        first, *rest = kept
        return PartitionSpec((*single, *([] if first is None else [first])), *rest)

    return jax.tree.map_with_path(spec, tree)


def gather(weights: Any, dtype: jnp.dtype) -> Any:
    """Make weights whole over ``fsdp`` inside ``shard_map``, as ``dtype``; its transpose scatters their gradients back.

    What is not split over ``fsdp`` (norms, biases) stays as it is.
    """

    def whole(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        spec = _spec(parameter_path(path), leaf.ndim)
        if FSDP not in spec:
            return leaf
        if jax.lax.axis_size(FSDP) == 1:  # XLA would still copy it, and its gradient on the way back
            return leaf.astype(dtype)
        return jax.lax.all_gather(leaf.astype(dtype), FSDP, axis=spec.index(FSDP), tiled=True)

    return jax.tree.map_with_path(whole, weights)


def _spec(path: tuple[str, ...], ndim: int) -> PartitionSpec:
    """Where each axis is split; stacked layers have one more axis than the name says, in front."""
    axes = path[-1].rpartition("_")[2] if path and "_" in path[-1] else ""
    split = [_AXES.get(axis) for axis in axes]
    if not any(split) or len(axes) > ndim:
        return WHOLE
    return PartitionSpec(*[None] * (ndim - len(axes)), *split)
