"""From ``model.lora`` to adapters."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from cluster.adapters import checkpoint_identity, first_adapters, make_lora
from cluster.config import LoraConfig
from learner.models.config import ModelConfig, ModelError
from learner.models.lora import TARGETS, Lora
from learner.models.peft import write_adapter

MODEL = ModelConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    max_position_embeddings=32,
)
SETTINGS = LoraConfig(rank=2, alpha=4.0, targets=("up_proj", "q_proj"))


def assert_same(ours, theirs) -> None:
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_the_configuration_knows_every_target():
    assert LoraConfig(rank=2, alpha=4.0).targets == tuple(TARGETS)
    assert make_lora(SETTINGS) == Lora(2, 4.0, ("q_proj", "up_proj"))
    assert make_lora(None) is None


def test_adapters_start_from_a_folder_of_the_same_settings(tmp_path: Path):
    fresh = first_adapters(SETTINGS, MODEL, seed=0)
    assert_same(fresh, first_adapters(SETTINGS, MODEL, seed=0))
    trained = jax.tree.map(lambda leaf: leaf + 0.5, fresh)
    write_adapter(MODEL, make_lora(SETTINGS), trained, tmp_path, base="base")
    assert_same(first_adapters(SETTINGS.model_copy(update={"path": tmp_path}), MODEL, seed=1), trained)
    other = SETTINGS.model_copy(update={"path": tmp_path, "alpha": 8.0})
    with pytest.raises(
        ModelError, match=r"model\.lora\.path=.*: its rank is 2, alpha 4 and targets q_proj, up_proj; set"
    ):
        first_adapters(other, MODEL, seed=0)
    same = SETTINGS.model_copy(update={"path": tmp_path})
    with pytest.raises(ModelError, match=r"lora_A.weight is \[2, 8\]; expected \[2, 16\]"):
        first_adapters(same, dataclasses.replace(MODEL, hidden_size=16), seed=0)


def test_checkpoints_are_known_by_settings_and_base(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    known = checkpoint_identity(SETTINGS, tmp_path)
    assert (known["rank"], known["alpha"], known["targets"]) == (2, 4.0, ("q_proj", "up_proj"))
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert checkpoint_identity(SETTINGS, tmp_path)["base_sha256"] != known["base_sha256"]
