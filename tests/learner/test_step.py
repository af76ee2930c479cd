"""The training step on one device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from learner.models.attention import attend_packed
from learner.models.compilations import CompilationCounter
from learner.models.weights import abstract_model
from learner.objectives import AGGREGATIONS, cross_entropy, policy_objective, ppo_clip
from learner.packing import Ladder, pack

LENGTHS = (31, 16, 15, 12, 9, 7, 5, 3, 2)


@pytest.fixture(scope="module")
def examples(make_example):
    rng = np.random.default_rng(1)
    return [make_example(rng, size) for size in LENGTHS]


def assert_trees_close(ours, theirs, **tolerance) -> None:
    for (path, mine), other in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, other, err_msg=jax.tree_util.keystr(path), **tolerance)


@pytest.fixture(scope="module")
def naive_logprobs(model, examples):
    """Log-probability of each token but the first: one sequence a row, every logit, no packing."""
    longest = max(LENGTHS)
    tokens_NS = np.stack([np.pad(e.tokens, (0, longest - len(e.tokens))) for e in examples])
    positions_NS = np.broadcast_to(np.arange(longest), tokens_NS.shape)

    @jax.jit
    def naive(params, temperature):
        decoder = nnx.merge(abstract_model(model)[0], params)
        attend = attend_packed(jnp.ones_like(tokens_NS))  # causal, so what pads the end is not seen
        hidden_NSH, _ = decoder(tokens_NS, positions_NS, attend)
        all_NSV = jax.nn.log_softmax(hidden_NSH[:, :-1] @ decoder.output_VH.T / temperature)
        return jnp.take_along_axis(all_NSV, tokens_NS[:, 1:, None], axis=-1)[..., 0]

    return naive


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_equal_those_of_each_sequence_alone(
    make_step, ladder, examples, params, naive_logprobs, temperature
) -> None:
    step = make_step(temperature=temperature)
    found = {}
    for rows in pack(examples, ladder):
        logprob_RT = np.asarray(step.logprobs(params, step.put(rows)).logprob)
        for tokens_T, segments_T, logprob_T in zip(rows.tokens, rows.segments, logprob_RT, strict=True):
            for segment in range(1, segments_T.max() + 1):
                found[tokens_T[segments_T == segment].tobytes()] = logprob_T[segments_T == segment][:-1]
    assert len(found) == len(examples)
    for e, expected_S in zip(examples, naive_logprobs(params, temperature), strict=True):
        np.testing.assert_allclose(found[e.tokens.tobytes()], expected_S[: len(e.tokens) - 1], atol=3e-6)


def test_the_gradient_is_that_of_the_naive_loss(make_step, ladder, examples, params, naive_logprobs) -> None:
    longest = max(LENGTHS)
    mask_NS = np.stack([np.pad(e.mask, (0, longest - len(e.mask)))[1:] for e in examples])

    def naive(params):
        return -jnp.sum(naive_logprobs(params, 1.0), where=mask_NS) / mask_NS.sum()

    step = make_step(cross_entropy, remat="full")
    gradient, summary = step.gradients(params, [step.put(rows) for rows in pack(examples, ladder)], 0)
    loss, expected = jax.jit(jax.value_and_grad(naive))(params)
    np.testing.assert_allclose(summary["loss"], loss, rtol=1e-6)
    assert_trees_close(gradient, expected, atol=2e-6)


@pytest.mark.parametrize("remat", ["none", "dots", "full", "offload"])
def test_what_the_backward_pass_computes_again_changes_nothing(make_step, ladder, examples, params, remat) -> None:
    batch = [make_step().put(rows) for rows in pack(examples, ladder)]
    expected, _ = make_step().gradients(params, batch, 1)
    found, _ = make_step(remat=remat).gradients(params, batch, 1)
    assert_trees_close(found, expected, atol=1e-7)


def test_in_bfloat16_the_gradient_stays_float32_and_near(make_step, ladder, examples, params) -> None:
    batch = [make_step().put(rows) for rows in pack(examples, ladder)]
    expected, summary = make_step().gradients(params, batch, 1)
    found, rounded = make_step(dtype=jnp.bfloat16).gradients(params, batch, 1)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"float32"}
    np.testing.assert_allclose(rounded["loss"], summary["loss"], rtol=0.05)
    ours, theirs = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (found, expected))
    assert ours @ theirs > 0.999 * np.linalg.norm(ours) * np.linalg.norm(theirs)


def test_cutting_the_batch_differently_never_changes_the_gradient(make_step, examples, params) -> None:
    def gradient(shapes):
        step = make_step(ladder=Ladder(shapes))
        batch = pack(examples, Ladder(shapes))
        return len(batch), step.gradients(params, [step.put(rows) for rows in batch], 1)

    whole, (reference, summary) = gradient(((8, 32),))
    assert whole == 1
    for shapes in (((2, 32),), ((2, 16), (4, 32))):
        micro_batches, (other, other_summary) = gradient(shapes)
        assert micro_batches > 1
        assert_trees_close(other, reference, atol=1e-6)
        for name, value in summary.items():
            np.testing.assert_allclose(other_summary[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
@pytest.mark.parametrize("useful_lengths", [LENGTHS, ()])
def test_leaving_out_what_has_no_gradient_changes_nothing(
    make_step, ladder, make_example, params, useful_lengths, aggregation
) -> None:
    rng = np.random.default_rng(2)
    useful, equal = ([make_example(rng, size) for size in lengths] for lengths in (useful_lengths, LENGTHS))
    for e in equal:
        e.advantages[:] = 0.0
    before = [make_example(rng, size) for size in LENGTHS]
    aggregate = AGGREGATIONS[aggregation]()
    step = make_step(partial(policy_objective, loss=ppo_clip, aggregation=aggregate))

    def train(examples, **skipped):
        batch = [step.put(rows) for rows in pack(examples, ladder)]
        with_momentum, _ = step(step.initialise(params), [step.put(rows) for rows in pack(before, ladder)], 1)
        state, metrics = step(with_momentum, batch, 1, **skipped)
        return state, metrics

    reference, all_metrics = train(useful + equal)
    found, metrics = train(useful, skipped=sum(aggregate.divisor_of(e.mask) for e in equal))
    assert_trees_close(found, reference, atol=1e-6)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], all_metrics[name], rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_policy_the_importance_ratio_is_one(
    make_step, ladder, examples, params, naive_logprobs, temperature
) -> None:
    step = make_step(temperature=temperature)
    for e, logprob_S in zip(examples, naive_logprobs(params, temperature), strict=True):
        e.logprobs[1:] = np.where(e.mask[1:], logprob_S[: len(e.tokens) - 1], 0.0)
    _, summary = step.gradients(params, [step.put(rows) for rows in pack(examples, ladder)], 1)
    assert summary["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert summary["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert summary["clip_low_fraction"] == summary["clip_high_fraction"] == summary["ratio_outside_fraction"] == 0
    assert summary["effective_sample_size"] == pytest.approx(1.0, abs=1e-6)
    assert abs(summary["kl_k3"]) < 1e-7
    assert 0 < summary["tokens_staleness_0"] < sum(e.mask.sum() for e in examples)


def test_after_warm_up_nothing_compiles_and_the_state_is_as_it_was(make_step, examples, params) -> None:
    ladder = Ladder(((4, 16), (2, 32)))
    counter, step = CompilationCounter(), make_step(ladder=ladder)
    state = step.initialise(params)
    state, _ = step(state, [step.put(rows) for rows in pack(examples, Ladder(((4, 32),)))], 0)  # with momentum
    before = jax.tree.map(np.array, state)  # copies: the state is consumed
    state = step.warm_up(state)
    assert_trees_close(state, before, atol=0)
    compiled = counter.count
    assert compiled > 0
    for version in range(3):
        batch = [step.put(rows) for rows in pack(examples[version:], ladder)]
        state, metrics = step(state, batch, version)
        jax.device_get(metrics)
        jax.block_until_ready(step.snapshot(state.params))
    assert counter.count == compiled


def test_a_step_without_data_has_no_gradient(make_step, params) -> None:
    step = make_step()
    state, metrics = step(step.initialise(params), [], 0)
    assert metrics["loss"] == metrics["grad_norm"] == metrics["trained_tokens"] == 0
    assert state.step == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_training_leaves_the_callers_parameters_and_snapshots_alone(make_step, ladder, examples, params) -> None:
    step = make_step(cross_entropy)
    before = jax.device_get(jax.tree.map(jnp.copy, params))
    state = step.initialise(params)
    snapshot = step.snapshot(state.params)
    batch = [step.put(rows) for rows in pack(examples, ladder)]
    losses = []
    for _ in range(8):
        state, metrics = step(state, batch, 0)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5
    assert_trees_close(params, before, atol=0)
    assert_trees_close(snapshot, before, atol=0)
