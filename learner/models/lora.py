"""Low-rank adapters (LoRA: Hu et al. 2021, arXiv:2106.09685): a few weights are trained beside a frozen model.

A weight W of the decoder acts as W + α/r · A·B, with A from its inputs to r numbers and B from those to its outputs.
A is drawn and B is zero, so adapters change nothing before the first step. In training the product is taken beside the
frozen one, x·W + α/r · (x·A)·B, so that no gradient of W and no merged W ever exists; for everybody else W is merged.

Names say axes as everywhere (``learner.mesh``): the adapter of ``q_HND`` has ``in_HA`` and ``out_AND``. The axis A, of
the r numbers, is short and never split; the others are split as those of W are.

Axes: A = rank of the adapters; the others as in ``learner.models.decoder``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from learner.models.config import ModelError


class Target(NamedTuple):
    """A weight that can have an adapter.

    Attributes:
        module: the part of a layer that holds it.
        weight: its name there.
        inputs: number of its leading axes that are inputs.
    """

    module: str
    weight: str
    inputs: int

    @property
    def adapter(self) -> str:
        """Name of its adapter, beside it: ``q_adapter`` for ``q_HND``."""
        return self.weight.partition("_")[0] + "_adapter"

    @property
    def into(self) -> str:
        """Name of A."""
        return f"in_{self._axes[: self.inputs]}A"

    @property
    def out(self) -> str:
        """Name of B."""
        return f"out_A{self._axes[self.inputs :]}"

    @property
    def _axes(self) -> str:
        return self.weight.partition("_")[2]


TARGETS = {
    "q_proj": Target("attention", "q_HND", 1),
    "k_proj": Target("attention", "k_HKD", 1),
    "v_proj": Target("attention", "v_HKD", 1),
    "o_proj": Target("attention", "o_NDH", 2),
    "gate_proj": Target("mlp", "gate_HF", 1),
    "up_proj": Target("mlp", "up_HF", 1),
    "down_proj": Target("mlp", "down_FH", 1),
}
"""By the name that Hugging Face gives the weight."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Which weights have adapters, and how large these are.

    Attributes:
        rank: r, inner size of every adapter.
        alpha: α; adapters act by α/r.
        targets: keys of ``TARGETS``, in that order.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets:
            raise ModelError(f"LoRA targets are {list(self.targets)}; expected some of {', '.join(TARGETS)}")
        if self.rank < 1 or not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ModelError(f"LoRA rank is {self.rank} and alpha {self.alpha}; expected at least 1 and more than 0")
        # So that settings which mean the same are equal.
        object.__setattr__(self, "targets", tuple(name for name in TARGETS if name in self.targets))

    @property
    def scale(self) -> float:
        """α/r."""
        return self.alpha / self.rank


class Adapter(nnx.Module):
    """A and B of one weight."""

    def __init__(self, target: Target, lora: Lora, shape: tuple[int, ...], rngs: nnx.Rngs) -> None:
        """Draw A as PEFT does, uniformly within ±1/√inputs; B is zero.

        Args:
            target: the weight.
            lora: rank and scale.
            shape: of the weight.
            rngs: draws from ``params``.
        """
        inputs, outputs = shape[: target.inputs], shape[target.inputs :]
        bound = math.prod(inputs) ** -0.5
        drawn = jax.random.uniform(rngs.params(), (*inputs, lora.rank), jnp.float32, -bound, bound)
        setattr(self, target.into, nnx.LoRAParam(drawn))
        setattr(self, target.out, nnx.LoRAParam(jnp.zeros((lora.rank, *outputs), jnp.float32)))
        self.target, self.scale = target, lora.scale

    @property
    def into(self) -> jax.Array:
        """A, [*inputs, A]."""
        value: jax.Array = getattr(self, self.target.into)[...]
        return value

    @property
    def out(self) -> jax.Array:
        """B, [A, *outputs]."""
        value: jax.Array = getattr(self, self.target.out)[...]
        return value


def make_adapter(lora: Lora | None, name: str, weight: nnx.Param, rngs: nnx.Rngs) -> Adapter | None:
    """The adapter of the weight that Hugging Face calls ``name``; None if it has none."""
    if lora is None or name not in lora.targets:
        return None
    return Adapter(TARGETS[name], lora, weight[...].shape, rngs)


def merge(base: nnx.State, adapters: nnx.State, lora: Lora) -> nnx.State:
    """The decoder's parameters with W + α/r · A·B in place of every W that has an adapter, in float32.

    Args:
        base: the decoder's parameters; left as they are.
        adapters: of all its layers, stacked as the base is.
        lora: their settings.
    """
    merged = jax.tree.map(lambda leaf: leaf, base)  # new containers, the same arrays
    for target, into, out in pairs(adapters, lora):
        weights = merged["layers"][target.module]
        weight = weights[target.weight][...]
        layers = len(weight)
        inputs, outputs = math.prod(into.shape[1:-1]), math.prod(out.shape[2:])
        change_LIO = into.reshape(layers, inputs, -1) @ out.reshape(layers, -1, outputs)
        weights[target.weight] = weights[target.weight].replace(weight + lora.scale * change_LIO.reshape(weight.shape))
    return merged


def pairs(adapters: nnx.State, lora: Lora) -> Iterator[tuple[Target, Any, Any]]:
    """Each target with its A, [L, *inputs, A], and its B, [L, A, *outputs]."""
    for name in lora.targets:
        target = TARGETS[name]
        adapter = adapters["layers"][target.module][target.adapter]
        yield target, adapter[target.into][...], adapter[target.out][...]
