"""The value head: from a final hidden state to the return that is expected from there.

It lies beside the decoder, as one more entry of its parameters, so that it is trained, sharded and checkpointed with
them; samplers never see it. Beside an exported model it has a folder of its own, because serving engines read every
safetensors file of a model's folder.

Axes: M = positions, H = hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.multihost_utils import process_allgather
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from learner.models.config import ModelConfig, ModelError

VALUE_HEAD = "value_head"
"""Its entry among the parameters of a decoder."""
VALUE_FILE = Path("value_head") / "value_head.safetensors"
"""Where it lies in the folder of a model: ``value_head.weight`` [1, H] and ``value_head.bias`` [1]."""

type ValueGradient = Literal["trunk", "head"]
"""How far the gradient of the value loss flows: into the decoder, or no further than the head."""


class ValueHead(nnx.Module):
    """One linear layer; all zeros at first, so that it disturbs nothing before it has learned something."""

    def __init__(self, config: ModelConfig) -> None:
        self.weight_H = nnx.Param(jnp.zeros(config.hidden_size, jnp.float32))
        self.bias = nnx.Param(jnp.zeros((), jnp.float32))

    def __call__(self, hidden_MH: jax.Array) -> jax.Array:
        """The value of each position: float32[M]."""
        return hidden_MH.astype(jnp.float32) @ self.weight_H[...] + self.bias[...]


def abstract_value_head(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The head's graph, and its parameters as shapes."""
    graph, head = nnx.split(nnx.eval_shape(lambda: ValueHead(config)))
    return graph, head


def with_value_head(params: nnx.State, head: nnx.State) -> nnx.State:
    """The parameters of a decoder and its value head."""
    return nnx.State({**params, VALUE_HEAD: head})


def read_value_head(config: ModelConfig, folder: Path, shardings: Any = None) -> nnx.State:
    """The value head of a model folder; one of zeros where there is none.

    Args:
        config: of that folder.
        folder: of the model.
        shardings: of its parameters, a tree like them; None puts all on one device.

    Raises:
        ModelError: it is damaged, or that of another model.
    """
    path, _, abstract = folder / VALUE_FILE, *abstract_value_head(config)
    stored = {"value_head.weight": np.zeros((1, config.hidden_size)), "value_head.bias": np.zeros(1)}
    if path.exists():
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        try:
            stored = load_file(path)
        except SafetensorError as error:
            raise ModelError(f"{path} is damaged ({error}): fetch it again, or remove it to begin anew") from error
        if (found := {name: tensor.shape for name, tensor in stored.items()}) != shapes:
            raise ModelError(f"{path} holds {found}; expected {shapes}: is it that of another model?")
    whole = {"weight_H": stored["value_head.weight"].reshape(-1), "bias": stored["value_head.bias"].reshape(())}
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    placed = jax.tree.map(lambda _: here, abstract) if shardings is None else shardings

    def place(path: tuple[Any, ...], sharding: jax.sharding.Sharding) -> jax.Array:
        value = whole[path[0].key].astype(np.float32)
        return jax.make_array_from_callback(value.shape, sharding, lambda part: value[part])

    return jax.tree.map_with_path(place, placed)


def write_value_head(params: nnx.State, folder: Path) -> None:
    """Write the value head to a model folder, if there is one; in a gang every process calls this, the first writes."""
    if VALUE_HEAD not in params:
        return
    head = params[VALUE_HEAD]
    weight_H, bias = (_whole(head[name][...]) for name in ("weight_H", "bias"))
    if jax.process_index() == 0:
        (folder / VALUE_FILE).parent.mkdir(parents=True, exist_ok=True)
        save_file({"value_head.weight": weight_H[None], "value_head.bias": bias[None]}, folder / VALUE_FILE)


def _whole(part: Any) -> np.ndarray:
    return np.asarray(part if part.is_fully_addressable else process_allgather(part, tiled=True))
