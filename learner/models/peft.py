"""Adapters as a folder of Hugging Face's PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

PEFT computes W + lora_alpha/r · lora_B·lora_A with lora_A [r, inputs] and lora_B [outputs, r]: the transposes of A and
B of ``learner.models.lora``, with heads in one axis. Other kinds of adapters that share the format are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from learner.models.config import ModelConfig, ModelError
from learner.models.lora import TARGETS, Lora
from learner.models.tensors import Tensor, stored_tensors
from learner.models.weights import LAYER, abstract_adapted, load_tensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model.model.layers"
"""PEFT's wrapper, the causal language model in it, the decoder in that."""

_ONLY: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layers_to_transform": None,
}
"""Settings of the format with the one value that is supported."""


def write_adapter(config: ModelConfig, lora: Lora, adapters: nnx.State, folder: Path, *, base: str) -> None:
    """Write adapters where PEFT reads them. In a gang every process calls this, and the first one writes.

    Args:
        config: the decoder's shape.
        lora: the adapters' settings.
        adapters: their parameters.
        folder: where to; made if missing.
        base: name or folder of the frozen model, for who loads them.
    """
    tensors = {}
    for name, tensor in stored_tensors(_tensors(config, lora), adapters):
        if jax.process_index() == 0:
            tensors[name] = tensor
    if jax.process_index() != 0:
        return
    about = {
        **_ONLY,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "init_lora_weights": True,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(about, indent=2) + "\n")


def read_adapter(config: ModelConfig, folder: Path, shardings: Any = None) -> tuple[Lora, nnx.State]:
    """Read the adapters of a decoder, as float32, and their settings.

    Args:
        config: the decoder's shape.
        folder: written by PEFT or :func:`write_adapter`.
        shardings: as for ``weights.read_params``.

    Raises:
        ModelError: the folder holds no adapters, those of another model, or of a kind that is not supported.
    """
    lora = read_settings(folder)
    try:
        abstract = abstract_adapted(config, lora)[2]
        table, tensors = list(_tensors(config, lora)), load_file(folder / WEIGHTS_FILE)
        return lora, load_tensors(table, abstract, tensors, shardings)
    except (ValueError, SafetensorError) as error:  # a ModelError is a ValueError
        raise ModelError(f"{folder}: {error}") from error


def read_settings(folder: Path) -> Lora:
    """The settings of the adapters in a folder; their weights are not read.

    Raises:
        ModelError: the folder holds no adapters, or those of a kind that is not supported.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ModelError(f"{folder} holds no {name}; expected a folder of PEFT with LoRA adapters")
    try:
        return _settings(json.loads((folder / CONFIG_FILE).read_text()))
    except ValueError as error:  # a ModelError is one, as is what is not JSON
        raise ModelError(f"{folder}: {error}") from error


def _settings(about: Any) -> Lora:
    if not isinstance(about, dict):
        raise ModelError(f"{CONFIG_FILE} holds {about!r}; expected the settings of LoRA by name")
    for name, only in _ONLY.items():
        # Newer versions of PEFT write an empty list or object where older ones write null.
        if (about.get(name, only) or None) != (only or None):
            raise ModelError(f"{name} is {about[name]!r} in {CONFIG_FILE}; this decoder supports {only!r}")
    rank, alpha, targets = about.get("r"), about.get("lora_alpha"), about.get("target_modules")
    if (
        not (isinstance(rank, int) and isinstance(alpha, int | float))
        or not isinstance(targets, list)
        or not all(isinstance(name, str) for name in targets)
    ):
        raise ModelError(
            f"r is {rank!r}, lora_alpha {alpha!r} and target_modules {targets!r} in {CONFIG_FILE}; expected a whole "
            "number, a number and a list of names"
        )
    return Lora(rank, alpha, tuple(targets))


def _tensors(config: ModelConfig, lora: Lora) -> Iterator[Tensor]:
    for name in lora.targets:
        target = TARGETS[name]
        weight = LAYER[target.module, target.weight][0]
        for half, letter, inputs in ((target.into, "A", target.inputs), (target.out, "B", 1)):
            suffix = f"{weight.removesuffix('.weight')}.lora_{letter}.weight"
            names = tuple(f"{_PREFIX}.{layer}.{suffix}" for layer in range(config.num_hidden_layers))
            yield Tensor(("layers", target.module, target.adapter, half), names, inputs, is_stacked=True)
