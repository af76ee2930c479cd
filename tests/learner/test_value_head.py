"""The value head: in the step, in checkpoints, and beside an exported model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from learner.checkpoints import Checkpoints
from learner.critic import Critic
from learner.models.attention import attend_packed
from learner.models.compilations import CompilationCounter
from learner.models.config import ModelError
from learner.models.value_head import VALUE_FILE, VALUE_HEAD, read_value_head, with_value_head, write_value_head
from learner.models.weights import abstract_model, read_model, to_hf, write_model
from learner.objectives import gae, policy_objective, ppo_clip, sequence_mean_token_mean, vtrace
from learner.packing import Example, Ladder, Rows, pack
from learner.recipe import spread
from learner.step import TrainStep

NOWHERE = Path("no", "such", "folder")
LENGTHS = (31, 16, 15, 12, 9, 7, 5, 3, 2)
OBJECTIVE = partial(policy_objective, loss=ppo_clip, aggregation=sequence_mean_token_mean(), value_weight=0.5)
GAE = partial(gae, discount=0.9, decay=0.8)


@pytest.fixture(scope="module")
def step(make_step) -> TrainStep:
    return make_step(OBJECTIVE, value_gradient="trunk")


@pytest.fixture(scope="module")
def head(model) -> nnx.State:
    """One that has learned something: from zeros there would be nothing to see."""
    zeros, rng = read_value_head(model, NOWHERE), np.random.default_rng(5)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.5, leaf.shape).astype(np.float32)), zeros)


@pytest.fixture(scope="module")
def valued_params(params, head) -> nnx.State:
    return with_value_head(params, head)


@pytest.fixture(scope="module")
def examples(make_example) -> list[Example]:
    rng, made = np.random.default_rng(1), []
    for i, size in enumerate(LENGTHS):
        e = make_example(rng, size)
        runs = int((e.mask & ~np.append(False, e.mask[:-1])).sum())
        rewards = spread(rng.normal(size=runs).astype(np.float32), e.mask) if runs else np.zeros(size, np.float32)
        made.append(
            Example(
                e.tokens, e.mask, e.logprobs, e.versions, e.mask.astype(np.float32), rewards=rewards, is_cut=i % 2 == 0
            )
        )
    return made


def judge(step: TrainStep, params, examples, ladder, estimator=GAE, *, normalise=True):
    """Micro-batches with everything filled in, as the learner does it, and what the critic said."""
    anchored = []
    for rows in pack(examples, ladder):
        on_device = step.put(rows)
        scores = step.logprobs(params, on_device)
        anchored.append(on_device._replace(proximal=scores.logprob, values=scores.value))
    return Critic(step.mesh, estimator, normalise=normalise)(anchored)


def by_sequence(batch: list[Rows], names=("advantages", "returns", "values")) -> dict[bytes, np.ndarray]:
    found = {}
    for rows in batch:
        for r in range(len(rows.tokens)):
            for segment in range(1, int(rows.segments[r].max()) + 1):
                own = np.asarray(rows.segments[r]) == segment
                found[np.asarray(rows.tokens)[r, own].tobytes()] = np.stack(
                    [np.asarray(getattr(rows, name))[r, own] for name in names]
                )
    return found


def assert_trees_close(ours, theirs, **tolerance) -> None:
    for (path, mine), other in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, other, err_msg=jax.tree_util.keystr(path), **tolerance)


def test_values_are_a_linear_function_of_the_final_hidden_state(
    step, model, params, head, valued_params, ladder, examples
):
    for rows in pack(examples, ladder):
        found = step.logprobs(valued_params, step.put(rows)).value
        decoder = nnx.merge(abstract_model(model)[0], params)
        hidden_RTH, _ = decoder(rows.tokens, rows.positions, attend_packed(rows.segments))
        expected = np.einsum("rth,h->rt", hidden_RTH, head["weight_H"][...]) + head["bias"][...]
        np.testing.assert_allclose(found, expected, atol=1e-5)


def naive_gradient(model, valued_params, rows: Rows, *, flows: bool):
    """Of the value loss alone: a whole pass over plain rows, no step."""
    graph = abstract_model(model)[0]
    mask, cut, segments = np.asarray(rows.mask), np.asarray(rows.cut), np.asarray(rows.segments)
    weight_RT, sequences = np.zeros(mask.shape), 0
    for r in range(len(mask)):
        for segment in range(1, segments[r].max() + 1):
            own = np.nonzero(segments[r] == segment)[0]
            trained = mask[r, own].sum()
            sequences += trained > 0
            for t in own:
                if mask[r, t] or (t > 0 and mask[r, t - 1] and not cut[r, t]):
                    weight_RT[r, t] = 1 / trained

    @jax.jit
    @jax.grad
    def gradient(valued_params):
        decoder = nnx.merge(graph, nnx.State({k: v for k, v in valued_params.items() if k != VALUE_HEAD}))
        hidden_RTH, _ = decoder(rows.tokens, rows.positions, attend_packed(rows.segments))
        hidden_RTH = hidden_RTH if flows else jax.lax.stop_gradient(hidden_RTH)
        head = valued_params[VALUE_HEAD]
        value_RT = hidden_RTH @ head["weight_H"][...] + head["bias"][...]
        return 0.5 * jnp.sum(weight_RT * 0.5 * (value_RT - rows.returns) ** 2) / sequences

    return gradient(valued_params)


@pytest.mark.parametrize("gradient", ["trunk", "head"])
def test_the_gradient_is_that_of_the_naive_loss(make_step, model, valued_params, ladder, examples, gradient) -> None:
    step = make_step(OBJECTIVE, value_gradient=gradient)
    [judged], _ = judge(step, valued_params, examples, ladder)
    silent = judged._replace(advantages=jnp.zeros_like(judged.advantages))  # no policy loss
    found, summary = step.gradients(valued_params, [silent], 1)
    expected = naive_gradient(model, valued_params, silent, flows=gradient == "trunk")
    assert_trees_close(found, expected, atol=2e-6)
    assert np.abs(found[VALUE_HEAD]["weight_H"][...]).max() > 1e-3 and summary["value_loss"] > 0
    assert (np.abs(found["embedding_VH"][...]).max() > 1e-4) == (gradient == "trunk")


def test_advantages_have_mean_0_and_deviation_1_over_turns(step, valued_params, ladder, examples) -> None:
    judged, said = judge(step, valued_params, examples, Ladder(((2, 32),)))
    assert len(judged) > 1
    plain, _ = judge(step, valued_params, examples, Ladder(((2, 32),)), normalise=False)

    def of_turns(batch, name):
        found = []
        for rows in batch:
            mask, array = np.asarray(rows.mask), np.asarray(getattr(rows, name))
            found += [array[r, t] for r, t in zip(*np.nonzero(mask), strict=True) if t == 0 or not mask[r, t - 1]]
        return np.array(found, np.float64)

    scaled, raw = of_turns(judged, "advantages"), of_turns(plain, "advantages")
    assert abs(raw.mean()) > 0.01 and abs(raw.std() - 1) > 0.01
    np.testing.assert_allclose(scaled, (raw - raw.mean()) / raw.std(), atol=1e-5)
    target, value = of_turns(judged, "returns"), of_turns(judged, "values")
    assert said["value_mean"] == pytest.approx(value.mean(), rel=1e-5)
    assert said["explained_variance"] == pytest.approx(1 - np.var(target - value) / np.var(target), rel=1e-4)


def test_a_weight_multiplies_what_was_normalised(step, valued_params, ladder, examples) -> None:
    plain, _ = judge(step, valued_params, examples, ladder)
    twice = [Example(e.tokens, e.mask, e.logprobs, e.versions, 2 * e.advantages, e.rewards, e.is_cut) for e in examples]
    for ours, theirs in zip(judge(step, valued_params, twice, ladder)[0], plain, strict=True):
        np.testing.assert_allclose(ours.advantages, 2 * theirs.advantages, rtol=1e-6)
        np.testing.assert_allclose(ours.returns, theirs.returns, rtol=1e-6)


def test_equal_advantages_are_not_blown_up_and_without_turns_nothing_is(step, valued_params, ladder, examples) -> None:
    level = with_value_head(valued_params, jax.tree.map(jnp.zeros_like, valued_params[VALUE_HEAD]))
    same = [
        Example(e.tokens, e.mask, e.logprobs, e.versions, e.advantages, np.full(len(e.tokens), 0.3, np.float32))
        for e in examples
    ]
    judged, said = judge(step, level, same, ladder, partial(gae, discount=1.0, decay=0.0))
    assert not any(np.asarray(rows.advantages).any() for rows in judged)
    assert said == {"value_mean": pytest.approx(0), "explained_variance": pytest.approx(0, abs=1e-6)}
    nothing = Critic(step.mesh, GAE, normalise=True)([])
    assert nothing == ([], {"value_mean": 0.0, "explained_variance": 0.0})


@pytest.mark.parametrize(
    "estimator", [GAE, partial(vtrace, discount=0.9, decay=1.0, is_weighted=False)], ids=["gae", "vtrace"]
)
def test_cutting_the_batch_differently_never_changes_the_gradient(
    make_step, valued_params, examples, estimator
) -> None:
    def train(shapes):
        step = make_step(OBJECTIVE, ladder=Ladder(shapes), value_gradient="trunk")
        judged, said = judge(step, valued_params, examples, Ladder(shapes), estimator)
        return len(judged), by_sequence(judged), said, step.gradients(valued_params, judged, 1)

    whole, told, said, (reference, summary) = train(((8, 32),))
    assert whole == 1
    for shapes in (((2, 32),), ((2, 16), (4, 32))):
        micro_batches, other_told, other_said, (other, other_summary) = train(shapes)
        assert micro_batches > 1
        assert other_said == pytest.approx(said, rel=1e-4)
        for tokens, expected in told.items():
            np.testing.assert_allclose(other_told[tokens], expected, atol=2e-5)
        assert_trees_close(other, reference, atol=2e-6, rtol=1e-5)
        for name, value in summary.items():
            np.testing.assert_allclose(other_summary[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_values_learn_the_returns(step, ladder, params, model, examples) -> None:
    state = step.initialise(with_value_head(params, read_value_head(model, NOWHERE)))
    explained = []
    for _ in range(20):
        judged, said = judge(step, state.params, examples, ladder, partial(gae, discount=1.0, decay=1.0))
        still = [rows._replace(advantages=jnp.zeros_like(rows.advantages)) for rows in judged]
        state, _ = step(state, still, 1)
        explained.append(said["explained_variance"])
    assert explained[0] == pytest.approx(0, abs=1e-5) and explained[-1] > 0.8


def test_after_warm_up_nothing_compiles(make_step, valued_params, examples) -> None:
    ladder = Ladder(((4, 16), (2, 32)))
    step, counter = make_step(OBJECTIVE, ladder=ladder, value_gradient="trunk"), CompilationCounter()
    critic = Critic(step.mesh, GAE, normalise=True)

    def anchored(rows):
        scores = step.logprobs(state.params, rows)
        return rows._replace(proximal=scores.logprob, values=scores.value)

    state = step.warm_up(step.initialise(valued_params))
    critic([anchored(step.put(rows)) for rows in pack(examples, ladder)])
    step.snapshot(state.params)
    compiled = counter.count
    for first in range(3):
        judged, _ = critic([anchored(step.put(rows)) for rows in pack(examples[first:], ladder)])
        state, metrics = step(state, judged, 1)
        jax.device_get(metrics)
    assert counter.count == compiled > 0


def test_in_bfloat16_values_stay_float32_and_near(make_step, ladder, valued_params, examples) -> None:
    [rows] = pack(examples[:3], ladder)
    exact, rounded = (
        make_step(OBJECTIVE, value_gradient="trunk", dtype=dtype).logprobs(valued_params, rows).value
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    assert rounded.dtype == jnp.float32
    assert np.abs(rounded - exact).max() < 0.05 * np.abs(exact).max()


def test_a_checkpoint_holds_the_head_and_its_moments(tmp_path, model, step, valued_params, ladder, examples) -> None:
    judged, _ = judge(step, valued_params, examples, ladder)
    state, _ = step(step.initialise(valued_params), judged, 1)
    saved = jax.device_get(jax.tree.map(np.array, state))
    assert not np.array_equal(saved.params[VALUE_HEAD]["weight_H"][...], valued_params[VALUE_HEAD]["weight_H"][...])
    checkpoints = Checkpoints(tmp_path, model, keep=1)
    checkpoints.save(1, state, version=3)
    checkpoints.close()
    again = Checkpoints(tmp_path, model, keep=1)
    restored = again.restore(1, step.abstract_state)
    again.close()
    assert_trees_close(restored.state, saved, rtol=0, atol=0)
    assert any(
        VALUE_HEAD in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(restored.state.moments)
    )


@pytest.mark.parametrize(("has_one", "what"), [(True, "holds besides"), (False, "lacks")])
def test_a_checkpoint_with_more_or_less_than_is_trained_is_refused_by_what_it_is(
    tmp_path, model, make_step, step, params, valued_params, has_one, what
) -> None:
    plain = make_step()
    written, wanted = (step, plain) if has_one else (plain, step)
    checkpoints = Checkpoints(tmp_path, model, keep=1)
    checkpoints.save(1, written.initialise(valued_params if has_one else params), version=0)
    checkpoints.close()
    other = Checkpoints(tmp_path, model, keep=1)
    with pytest.raises(ModelError, match=f"{what} params_value_head_weight_H.* and 5 more; expected what is trained"):
        other.restore(1, wanted.abstract_state)
    other.close()


def test_samplers_get_the_policy_alone(model, params, valued_params) -> None:
    published = to_hf(model, valued_params)
    for name, tensor in to_hf(model, params).items():
        np.testing.assert_array_equal(published.pop(name), tensor)
    assert not published


def test_an_exported_head_is_read_back_and_the_model_is_what_it_was_without(
    tmp_path, model, params, valued_params
) -> None:
    for name, some in (("with", valued_params), ("without", params)):
        write_model(model, some, tmp_path / name, eos_token_id=None)
        write_value_head(some, tmp_path / name)
    read = read_value_head(model, tmp_path / "with")
    assert_trees_close(read, valued_params[VALUE_HEAD], rtol=0, atol=0)
    assert not (tmp_path / "without" / VALUE_FILE).exists()
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(read_value_head(model, tmp_path / "without")))
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("with", "without"))
    assert ours.keys() == theirs.keys()
    assert_trees_close(read_model(tmp_path / "with")[1], params, rtol=0, atol=0)


def test_a_head_of_another_model_or_a_damaged_one_is_refused(tmp_path, model) -> None:
    path = tmp_path / VALUE_FILE
    path.parent.mkdir()
    save_file({"value_head.weight": np.zeros((1, 7), np.float32), "value_head.bias": np.zeros(1, np.float32)}, path)
    with pytest.raises(ModelError, match=r"holds .*\(1, 7\).*; expected .*\(1, 16\)"):
        read_value_head(model, tmp_path)
    path.write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="is damaged"):
        read_value_head(model, tmp_path)
