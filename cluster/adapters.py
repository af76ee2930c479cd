"""Adapters as ``model.lora`` asks for them: settings, those that training starts from, what checkpoints say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flax import nnx

from cluster.config import LoraConfig
from learner.models.config import ModelConfig, ModelError
from learner.models.lora import Lora
from learner.models.peft import read_adapter, read_settings
from learner.models.weights import initial_adapters, weights_digest


def make_lora(settings: LoraConfig | None) -> Lora | None:
    """The learner's settings of adapters; None where the whole model is trained."""
    return None if settings is None else _lora(settings)


def first_adapters(settings: LoraConfig, model: ModelConfig, seed: int, shardings: Any = None) -> nnx.State:
    """The adapters that training starts from: fresh ones, or those of ``model.lora.path``.

    Args:
        settings: with rank, alpha and targets.
        model: that they are for.
        seed: fresh ones are drawn with it.
        shardings: where each parameter lives, by the names of a tree that may hold others; None: on one device.

    Raises:
        ModelError: the folder holds no adapters of this model and these settings.
    """
    if settings.path is None:
        return initial_adapters(model, _lora(settings), seed, shardings)
    check_first_adapters(settings)
    return read_adapter(model, settings.path, shardings)[1]


def check_first_adapters(settings: LoraConfig) -> None:
    """Read what describes the adapters at ``model.lora.path``, if that is given; their weights are not read.

    Raises:
        ModelError: the folder holds no adapters, or those of other settings.
    """
    if settings.path is None:
        return
    try:
        found = read_settings(settings.path)
    except ModelError as error:
        raise ModelError(f"model.lora.path: {error}") from error
    if found != _lora(settings):
        raise ModelError(
            f"model.lora.path={settings.path}: its rank is {found.rank}, alpha {found.alpha:g} and targets "
            f"{', '.join(found.targets)}; set model.lora.rank, alpha and targets to these"
        )


def checkpoint_identity(settings: LoraConfig, base: Path) -> dict[str, Any]:
    """What tells apart checkpoints of adapters: their settings, and the digest of the model in the folder ``base``."""
    lora = _lora(settings)
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": lora.targets, "base_sha256": weights_digest(base)}


def _lora(settings: LoraConfig) -> Lora:
    return Lora(settings.rank, settings.alpha, settings.targets)
