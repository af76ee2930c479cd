"""Hugging Face checkpoints in and out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from learner.mesh import partition
from learner.models.attention import attend_packed, softcapped
from learner.models.config import ModelConfig, ModelError
from learner.models.tensors import Arrays, parameter_path, read_part
from learner.models.weights import (
    abstract_model,
    from_hf,
    initial_params,
    read_model,
    tensor_table,
    to_hf,
    write_model,
)

FAMILIES = Path(__file__).parents[1] / "data" / "golden"
GOLDEN = FAMILIES / "qwen3"
TIED = ModelConfig(
    vocab_size=19,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def tied() -> nnx.State:
    return initial_params(TIED, seed=0)


@pytest.mark.parametrize("layout", ["config.json", "config.older.json"])
@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_logits_equal_the_reference_library(tmp_path: Path, family: str, layout: str) -> None:
    shutil.copy(FAMILIES / family / layout, tmp_path / "config.json")
    shutil.copy(FAMILIES / family / "model.safetensors", tmp_path)
    config, params = read_model(tmp_path)
    model = nnx.merge(abstract_model(config)[0], params)
    reference = np.load(FAMILIES / family / "reference.npz")
    tokens_RT = jnp.asarray(reference["tokens"])
    positions_RT = jnp.broadcast_to(jnp.arange(tokens_RT.shape[1]), tokens_RT.shape)
    hidden_RTH, _ = model(tokens_RT, positions_RT, attend_packed(jnp.ones_like(tokens_RT)))
    logits_RTV = softcapped(hidden_RTH @ model.output_VH.T, config.final_logit_softcapping)
    np.testing.assert_allclose(logits_RTV, reference["logits"], atol=2e-4)


def test_tensors_survive_the_round_trip_exactly() -> None:
    original = load_file(GOLDEN / "model.safetensors")
    config, params = read_model(GOLDEN)
    returned = to_hf(config, params)
    assert set(returned) == set(original)
    for name, tensor in original.items():
        np.testing.assert_array_equal(returned[name], tensor, err_msg=name)


def test_a_written_folder_reads_back_as_the_same_model(tmp_path: Path, tied) -> None:
    write_model(TIED, tied, tmp_path, eos_token_id=1)
    config, read = read_model(tmp_path)
    assert config == TIED
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    for name, tensor in to_hf(TIED, tied).items():
        np.testing.assert_array_equal(to_hf(config, read)[name], tensor, err_msg=name)


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_a_written_family_reads_back_as_the_same_model(tmp_path: Path, family: str) -> None:
    config, params = read_model(FAMILIES / family)
    write_model(config, params, tmp_path, eos_token_id=None)
    again, read = read_model(tmp_path)
    assert again == config
    original = load_file(FAMILIES / family / "model.safetensors")
    assert config.parameter_count == sum(tensor.size for name, tensor in original.items())
    for name, tensor in to_hf(again, read).items():
        np.testing.assert_array_equal(tensor, original[name], err_msg=name)


def test_the_reference_library_reads_what_is_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for family in ("llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"):
        config, params = read_model(FAMILIES / family)
        write_model(config, params, tmp_path / family, eos_token_id=None)
        theirs = transformers.AutoConfig.from_pretrained(tmp_path / family)
        assert (theirs.model_type, theirs.head_dim if hasattr(theirs, "head_dim") else config.head_dim) == (
            *(config.model_type, config.head_dim),
        )
        assert tuple(kind == "sliding_attention" for kind in getattr(theirs, "layer_types", ())) in ((), config.slides)


def test_a_large_model_is_written_as_several_files(tmp_path: Path, tied) -> None:
    write_model(TIED, tied, tmp_path, eos_token_id=1, most_file_bytes=3000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    expected = to_hf(TIED, tied)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    for name, tensor in expected.items():
        np.testing.assert_array_equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)
    _, read = read_model(tmp_path)
    for name, tensor in to_hf(TIED, read).items():
        np.testing.assert_array_equal(tensor, expected[name], err_msg=name)


def test_bfloat16_checkpoints_are_read(tmp_path: Path, tied) -> None:
    write_model(TIED, tied, tmp_path, eos_token_id=1)
    rounded = {name: tensor.astype(jnp.bfloat16) for name, tensor in to_hf(TIED, tied).items()}
    save_file(rounded, tmp_path / "model.safetensors")
    for name, tensor in to_hf(TIED, read_model(tmp_path)[1]).items():
        np.testing.assert_array_equal(tensor, rounded[name].astype(np.float32), err_msg=name)


def test_a_device_reads_its_own_part_of_each_tensor_only(tied) -> None:
    """What a process of a gang reads: of every tensor that is split, the rows or columns of its own devices."""
    read_sizes = []

    class Spy(Arrays):
        def read(self, name, part):
            value = super().read(name, part)
            read_sizes.append(value.size)
            return value

    source, (_, abstract) = Spy(to_hf(TIED, tied)), abstract_model(TIED)
    whole = {parameter_path(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tied)}
    shapes = {parameter_path(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(abstract)}
    specs = {parameter_path(path): spec for path, spec in jax.tree.leaves_with_path(partition(abstract))}
    for tensor in tensor_table(TIED):
        shape, spec = shapes[tensor.path], specs[tensor.path]
        index = tuple(
            slice(size // 2, size) if axis < len(spec) and spec[axis] else slice(None)
            for axis, size in enumerate(shape)
        )
        read_sizes.clear()
        part = read_part(tensor, shape, source, index)
        np.testing.assert_array_equal(part, whole[tensor.path][index])
        assert sum(read_sizes) == part.size, "more was read than is held"


@pytest.mark.parametrize("eos_token_id", [0, 18, None])
def test_a_written_folder_says_where_other_engines_stop(tmp_path: Path, tied, eos_token_id: int | None) -> None:
    write_model(TIED, tied, tmp_path, eos_token_id=eos_token_id)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == eos_token_id
    assert read_model(tmp_path)[0] == TIED


@pytest.mark.parametrize("eos_token_id", [-1, 19])
def test_an_end_outside_the_vocabulary_is_refused_before_anything_is_written(
    tmp_path: Path, tied, eos_token_id: int
) -> None:
    with pytest.raises(ModelError, match=f"eos_token_id is {eos_token_id}; expected an id below vocab_size=19"):
        write_model(TIED, tied, tmp_path, eos_token_id=eos_token_id)
    assert not list(tmp_path.iterdir())


def test_host_arrays_are_contiguous_copies(tied) -> None:
    tensors = to_hf(TIED, tied)
    for tensor in tensors.values():
        assert tensor.flags.c_contiguous and tensor.flags.owndata


def test_parameters_do_not_alias_the_callers_memory(tied) -> None:
    tensors = to_hf(TIED, tied)
    params = from_hf(TIED, tensors)
    before = to_hf(TIED, params)
    for tensor in tensors.values():
        tensor[:] = 7.0
    for name, tensor in to_hf(TIED, params).items():
        np.testing.assert_array_equal(tensor, before[name], err_msg=name)


def test_parameter_count_is_that_of_the_tensors(tied) -> None:
    for config, params in ((TIED, tied), read_model(GOLDEN)):
        assert config.parameter_count == sum(tensor.size for tensor in to_hf(config, params).values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "lacks model.norm.weight"),
        (lambda w: w.update({"model.norm.bias": np.zeros(3, np.float32)}), "unknown model.norm.bias"),
        (lambda w: w.update({"model.norm.weight": np.zeros(3, np.float32)}), r"model.norm.weight is \[3\]; expected"),
        (
            lambda w: w.update({"model.layers.1.self_attn.o_proj.weight": np.zeros((32, 12), np.float32)}),
            r"model.layers.1.self_attn.o_proj.weight is \[32, 12\]; expected \[12, 32\]",
        ),
        (lambda w: w.update({"model.norm.weight": np.zeros(12, np.int8)}), "model.norm.weight is int8"),
        (lambda w: w.update({"lm_head.weight": np.zeros((19, 12), np.float32)}), "tie_word_embeddings"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(change, message, tied) -> None:
    weights = to_hf(TIED, tied)
    change(weights)
    with pytest.raises(ModelError, match=message):
        from_hf(TIED, weights)


def test_the_copy_of_a_tied_head_is_accepted(tied) -> None:
    weights = to_hf(TIED, tied)
    from_hf(TIED, weights | {"lm_head.weight": weights["model.embed_tokens.weight"].copy()})


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        read_model(tmp_path)
    shutil.copy(GOLDEN / "config.json", tmp_path)
    with pytest.raises(ModelError, match=r"holds no model\.safetensors"):
        read_model(tmp_path)
