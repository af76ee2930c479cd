"""Adapters: without effect at first, then that of a merged model; trained alone; read and written as PEFT does."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from learner.mesh import make_mesh
from learner.models.attention import attend_packed, softcapped
from learner.models.config import ModelConfig, ModelError
from learner.models.lora import TARGETS, Lora, merge
from learner.models.peft import read_adapter, write_adapter
from learner.models.weights import (
    abstract_adapted,
    abstract_model,
    initial_adapters,
    parameter_path,
    read_model,
    to_hf,
    weights_digest,
)
from learner.objectives import cross_entropy
from learner.packing import Ladder, pack
from learner.step import TrainStep

FAMILIES = Path(__file__).parents[1] / "data" / "golden"
EVERYWHERE = Lora(rank=4, alpha=8.0, targets=tuple(TARGETS))
SOME = Lora(rank=3, alpha=6.0, targets=("v_proj", "o_proj", "down_proj"))


def moved(adapters: nnx.State, seed: int = 0) -> nnx.State:
    """Adapters as after some training: no part of them is zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + rng.normal(0, 0.05, leaf.shape).astype(np.float32), adapters)


def logits(config: ModelConfig, graph: nnx.GraphDef, *params: nnx.State) -> np.ndarray:
    """Of tokens at random, [R, T, V]."""
    tokens_RT = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (2, 24)))

    @jax.jit
    def run(*params: nnx.State) -> jax.Array:
        model = nnx.merge(graph, nnx.merge_state(*params) if len(params) > 1 else params[0])
        positions_RT = jnp.broadcast_to(jnp.arange(tokens_RT.shape[1]), tokens_RT.shape)
        hidden_RTH, _ = model(tokens_RT, positions_RT, attend_packed(jnp.ones_like(tokens_RT)))
        return softcapped(hidden_RTH @ model.output_VH.T, config.final_logit_softcapping)

    return np.asarray(run(*params))


def flat(tree) -> dict[str, np.ndarray]:
    """Leaves by their dotted name."""
    return {".".join(parameter_path(path)): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


@pytest.fixture(scope="module")
def adapters(model) -> nnx.State:
    return initial_adapters(model, EVERYWHERE, seed=0)


@pytest.fixture(scope="module")
def batch_of(make_example, ladder):
    def make(step: TrainStep):
        rng = np.random.default_rng(1)
        return [step.put(rows) for rows in pack([make_example(rng, size) for size in (31, 16, 12, 9, 5, 2)], ladder)]

    return make


@pytest.fixture(scope="module")
def lora_step(make_step, params) -> TrainStep:
    step = make_step(lora=EVERYWHERE)
    step.freeze(params)
    return step


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama3", SOME),
        ("mistral", EVERYWHERE),
        ("qwen2", EVERYWHERE),
        ("qwen3", EVERYWHERE),
        ("gemma2", SOME),
        ("gemma3", EVERYWHERE),
    ],
)
def test_adapters_change_nothing_at_first_and_later_what_a_merged_model_does(family: str, lora: Lora) -> None:
    config, base = read_model(FAMILIES / family)
    graph, adapted = abstract_model(config)[0], abstract_adapted(config, lora)[0]
    fresh = initial_adapters(config, lora, seed=3)
    before = logits(config, graph, base)
    np.testing.assert_array_equal(logits(config, adapted, base, fresh), before)
    trained = moved(fresh)
    merged = logits(config, graph, merge(base, trained, lora))
    assert np.abs(merged - before).max() > 1e-2
    np.testing.assert_allclose(logits(config, adapted, base, trained), merged, atol=1e-5)


def test_fresh_adapters_are_drawn_within_the_bounds_that_peft_draws_in(model, adapters) -> None:
    tree = flat(adapters)
    fans = {"in_HA": model.hidden_size, "in_FA": model.intermediate_size, "in_NDA": 4 * 8}
    for name, leaf in tree.items():
        fan = next((fan for half, fan in fans.items() if half in name), None)
        if fan is None:
            assert not leaf.any(), f"{name} is B, and not zero"
        else:
            assert 0.8 / math.sqrt(fan) < np.abs(leaf).max() <= 1 / math.sqrt(fan)
            assert abs(leaf.mean()) < 0.2 / math.sqrt(fan)
    other = flat(initial_adapters(model, EVERYWHERE, seed=1))
    assert any((other[name] != leaf).any() for name, leaf in tree.items()), "the seed does not matter"


def test_the_gradient_is_that_of_the_merged_weights_by_the_chain_rule(
    make_step, lora_step, params, adapters, batch_of
) -> None:
    trained = moved(adapters)
    whole = make_step()
    merged = merge(params, trained, EVERYWHERE)
    expected, summary = whole.gradients(merged, batch_of(whole), 1)
    found, other_summary = lora_step.gradients(trained, batch_of(lora_step), 1)
    np.testing.assert_allclose(other_summary["loss"], summary["loss"], rtol=1e-5)
    for name, target in TARGETS.items():
        of_weight = np.asarray(expected["layers"][target.module][target.weight][...])
        layers, inputs = len(of_weight), math.prod(of_weight.shape[1 : 1 + target.inputs])
        of_weight = of_weight.reshape(layers, inputs, -1)
        ours, factors = (tree["layers"][target.module][target.adapter] for tree in (found, trained))
        a = np.asarray(factors[target.into][...]).reshape(layers, inputs, 4)
        b = np.asarray(factors[target.out][...]).reshape(layers, 4, -1)
        of_a = 2.0 * of_weight @ b.transpose(0, 2, 1)
        of_b = 2.0 * a.transpose(0, 2, 1) @ of_weight
        np.testing.assert_allclose(
            np.asarray(ours[target.into][...]).reshape(of_a.shape), of_a, atol=2e-6, err_msg=name
        )
        np.testing.assert_allclose(np.asarray(ours[target.out][...]).reshape(of_b.shape), of_b, atol=2e-6, err_msg=name)


def test_training_moves_the_adapters_alone(make_step, params, batch_of) -> None:
    step = make_step(cross_entropy, lora=SOME)
    step.freeze(params)
    before = flat(jax.tree.map(np.array, params))
    start = initial_adapters(step.model, SOME, seed=0)
    state, batch = step.initialise(start), batch_of(step)
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch, 0)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.3
    for name, leaf in flat(params).items():
        np.testing.assert_array_equal(leaf, before[name], err_msg=name)
    for name, leaf in flat(start).items():
        assert (flat(state.params)[name] != leaf).any(), f"{name} is not trained"
    merged = flat(step.snapshot(state.params))
    changed = {name for name, leaf in merged.items() if (leaf != before[name]).any()}
    assert {name.rpartition(".")[2] for name in changed} == {"v_HKD", "o_NDH", "down_FH"}
    whole = make_step(cross_entropy)
    _, summary = whole.gradients(step.snapshot(state.params), batch_of(whole), 0)
    _, ours = step.gradients(state.params, batch, 0)
    np.testing.assert_allclose(ours["loss"], summary["loss"], rtol=1e-5)


def test_no_gradient_and_no_moments_of_the_frozen_model_exist(optimizer) -> None:
    model = ModelConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
    )
    base_bytes = 4 * model.parameter_count

    def compiled(lora: Lora | None):
        mesh = make_mesh(model, data=1, fsdp=1, devices=jax.devices()[:1])
        step = TrainStep(
            model, mesh, Ladder(((1, 32),)), optimizer, cross_entropy, temperature=1.0, remat="full", lora=lora
        )
        moments = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.abstract_state.moments))
        memory = step.lower((1, 32)).add.compile().memory_analysis()
        return moments, memory.output_size_in_bytes, memory.temp_size_in_bytes

    for whole, of_adapters in zip(compiled(None), compiled(Lora(2, 4.0, tuple(TARGETS))), strict=True):
        assert whole > 0.9 * base_bytes, "the test shows nothing"
        assert of_adapters < 0.3 * base_bytes


def test_in_bfloat16_adapters_stay_float32(make_step, params, adapters, batch_of) -> None:
    step = make_step(dtype=jnp.bfloat16, lora=EVERYWHERE)
    step.freeze(params)
    found, _ = step.gradients(moved(adapters), batch_of(step), 1)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"float32"}


def test_a_step_that_was_given_nothing_to_freeze_says_so(make_step, adapters, batch_of) -> None:
    step = make_step(cross_entropy, lora=EVERYWHERE, temperature=0.5)
    with pytest.raises(RuntimeError, match="call freeze first"):
        step.gradients(adapters, batch_of(step), 0)


@pytest.mark.parametrize(("family", "lora"), [("llama3", SOME), ("gemma3", EVERYWHERE)])
def test_a_written_adapter_means_to_peft_what_the_merged_model_is(tmp_path: Path, family: str, lora: Lora) -> None:
    """PEFT's format and equation, read with NumPy: W + lora_alpha/r · lora_B·lora_A for every wrapped linear layer."""
    config, base = read_model(FAMILIES / family)
    trained = moved(initial_adapters(config, lora, seed=0))
    write_adapter(config, lora, trained, tmp_path, base="base/folder")
    about, tensors = (
        json.loads((tmp_path / "adapter_config.json").read_text()),
        load_file(tmp_path / "adapter_model.safetensors"),
    )
    assert about["peft_type"] == "LORA" and about["task_type"] == "CAUSAL_LM"
    assert about["base_model_name_or_path"] == "base/folder"
    assert about["target_modules"] == list(lora.targets)
    weights = load_file(FAMILIES / family / "model.safetensors")
    used = set()
    for name, weight in weights.items():
        wrapped = "base_model.model." + name.removesuffix(".weight")
        a, b = tensors.get(f"{wrapped}.lora_A.weight"), tensors.get(f"{wrapped}.lora_B.weight")
        if a is not None:
            assert a.shape == (about["r"], weight.shape[1]) and b.shape == (weight.shape[0], about["r"])
            weights[name] = weight + about["lora_alpha"] / about["r"] * (b @ a)
            used |= {f"{wrapped}.lora_A.weight", f"{wrapped}.lora_B.weight"}
    assert used == set(tensors) and len(used) == 2 * len(lora.targets) * config.num_hidden_layers
    merged = to_hf(config, merge(base, trained, lora))
    assert set(merged) == set(weights)
    for name, weight in weights.items():
        np.testing.assert_allclose(merged[name], weight, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("lora", [EVERYWHERE, SOME], ids=["everywhere", "some"])
def test_a_written_adapter_is_read_back_exactly(tmp_path: Path, model, lora: Lora) -> None:
    trained = moved(initial_adapters(model, lora, seed=0))
    write_adapter(model, lora, trained, tmp_path, base="base")
    again, read = read_adapter(model, tmp_path)
    assert again == lora
    assert flat(read).keys() == flat(trained).keys()
    for name, leaf in flat(trained).items():
        np.testing.assert_array_equal(flat(read)[name], leaf, err_msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3' in adapter_config.json; this decoder supports 'LORA'"),
        ({"use_rslora": True}, "use_rslora is True"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is {'q_proj': 8}"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            r"LoRA targets are \['q_proj', 'lm_head'\]; expected some of q_proj, ",
        ),
        ({"target_modules": "all-linear"}, "target_modules 'all-linear' in .*; expected .* a list of names"),
        ({"target_modules": [["q_proj"]]}, r"target_modules \[\['q_proj'\]\] in .*; expected .* a list of names"),
        ({"r": "4"}, "r is '4', lora_alpha 8.0 .*; expected a whole number, a number"),
        ({"lora_alpha": None}, "lora_alpha None .*; expected a whole number, a number"),
        ({"target_modules": ["q_proj"]}, "has unknown base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"),
        ({"r": 5}, r"lora_A.weight is \[4, 16\]; expected \[5, 16\]"),
    ],
)
def test_adapters_of_another_kind_are_refused_by_name(tmp_path: Path, model, adapters, change, message) -> None:
    write_adapter(model, EVERYWHERE, adapters, tmp_path, base="base")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message) as caught:
        read_adapter(model, tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_settings_that_are_none_are_refused(tmp_path: Path, model, adapters) -> None:
    write_adapter(model, EVERYWHERE, adapters, tmp_path, base="base")
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"adapter_config\.json holds \[\]; expected the settings of LoRA"):
        read_adapter(model, tmp_path)


def test_a_folder_without_adapters_says_so(tmp_path: Path, model) -> None:
    with pytest.raises(ModelError, match=r"holds no adapter_config\.json"):
        read_adapter(model, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((4, 8.0, ("q_proj", "gate")), r"LoRA targets are \['q_proj', 'gate'\]; expected some of q_proj, k_proj, "),
        ((4, 8.0, ()), r"LoRA targets are \[\]"),
        ((0, 8.0, ("q_proj",)), "LoRA rank is 0"),
        ((4, math.inf, ("q_proj",)), "alpha inf"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message) -> None:
    with pytest.raises(ModelError, match=message):
        Lora(*settings)


def test_the_order_in_which_targets_are_named_does_not_matter() -> None:
    assert Lora(2, 4.0, ("down_proj", "q_proj")) == Lora(2, 4.0, ("q_proj", "down_proj"))


def test_the_digest_tells_weights_apart(tmp_path: Path) -> None:
    def write(value: float) -> str:
        save_file({"model.norm.weight": np.full(3, value, np.float32)}, tmp_path / "model.safetensors")
        return weights_digest(tmp_path)

    assert write(0.0) == write(0.0) != write(1.0)
    with pytest.raises(ModelError, match=r"holds no model\.safetensors"):
        weights_digest(tmp_path / "nowhere")
