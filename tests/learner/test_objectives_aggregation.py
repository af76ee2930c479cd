"""Aggregation: values, and that no way of cutting a batch changes a gradient."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_cases import (
    SHAPE,
    VERSION,
    examples_of_unequal_length,
    random_case,
    sequences,
    toy_policy,
    trained_tokens,
)

from learner.objectives import (
    AGGREGATIONS,
    DIVERGENCES,
    POLICY_LOSSES,
    cross_entropy,
    geometric_rejection,
    policy_objective,
    ppo_clip,
    reinforce,
    truncated_sequence,
)
from learner.objectives.sequences import at_tokens, sequence_means, sequence_sums, trained_lengths
from learner.packing import Ladder, Rows, pack

MADE = {name: make(40) if name == "sequence_sum" else make() for name, make in AGGREGATIONS.items()}


def test_sums_over_sequences_equal_the_loop() -> None:
    scores, rows = random_case()
    x = np.asarray(scores.entropy)
    sums = np.asarray(sequence_sums(jnp.asarray(x), rows.segments))
    means = np.asarray(sequence_means(jnp.asarray(x), rows))
    spread = np.asarray(at_tokens(jnp.asarray(sums), rows.segments))
    expected, everywhere = np.zeros(SHAPE), np.zeros(SHAPE)
    for r in range(SHAPE[0]):
        for number in range(1, rows.segments[r].max() + 1):
            own = rows.segments[r] == number
            expected[r, number - 1] = everywhere[r, own] = x[r, own].sum()
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
    np.testing.assert_allclose(spread, everywhere, rtol=1e-6)
    assert trained_lengths(rows).sum() == rows.mask.sum()
    for members in sequences(rows):
        for where in members:
            np.testing.assert_allclose(means[where], np.mean([x[w] for w in members]), rtol=1e-6)


def test_aggregations_equal_the_loop() -> None:
    scores, rows = random_case()
    token_losses = {w: -float(rows.advantages[w]) * float(scores.logprob[w]) for w in trained_tokens(rows)}
    grouped = [[token_losses[w] for w in members] for members in sequences(rows)]
    expected = {
        "token_mean": np.mean(list(token_losses.values())),
        "sequence_mean_token_mean": np.mean([np.mean(losses) for losses in grouped]),
        "sequence_sum": np.mean([np.sum(losses) / 40 for losses in grouped]),
    }
    for name, aggregation in MADE.items():
        terms = policy_objective(scores, rows, jnp.int32(VERSION), loss=reinforce, aggregation=aggregation)
        assert terms.summary()["loss"] == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.parametrize("name", MADE)
def test_the_host_and_the_devices_count_the_same_divisor(name) -> None:
    _, rows = random_case()
    masks = [rows.mask[r][rows.segments[r] == n] for r in range(SHAPE[0]) for n in range(1, rows.segments[r].max() + 1)]
    assert any(not mask_S.any() for mask_S in masks)
    assert MADE[name].divisor(rows) == sum(MADE[name].divisor_of(mask_S) for mask_S in masks) > 0


def test_leaving_out_what_has_no_gradient_changes_no_loss() -> None:
    scores, rows = random_case()
    quiet = rows._replace(advantages=np.where(rows.segments == 2, 0.0, rows.advantages).astype(np.float32))
    without = quiet._replace(mask=quiet.mask & (rows.segments != 2))
    left_out = [quiet.mask[r][rows.segments[r] == 2] for r in (0, 3)]
    for name, aggregation in MADE.items():
        objective = partial(policy_objective, loss=ppo_clip, aggregation=aggregation)
        skipped = sum(map(aggregation.divisor_of, left_out))
        assert skipped > 0
        whole = objective(scores, quiet, jnp.int32(VERSION)).summary()["loss"]
        found = objective(scores, without, jnp.int32(VERSION)).summary(skipped)["loss"]
        assert found == pytest.approx(float(whole), rel=1e-5), name


def accumulate(one, batches: list[Rows]) -> dict[str, tuple]:
    """Gradient and summary under each aggregation, of a batch that is cut into ``batches``."""
    totals = one(batches[0])
    for rows in batches[1:]:
        more = one(rows)
        totals = {name: (totals[name][0] + more[name][0], totals[name][1] + more[name][1]) for name in totals}
    return {name: (gradient / terms.divisor, terms.summary()) for name, (gradient, terms) in totals.items()}


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_no_way_of_cutting_a_batch_changes_its_gradient_under_any_aggregation(loss) -> None:
    """Micro-batches of other shapes, rows without a sequence, and one sequence a row: the same to rounding."""
    rng = np.random.default_rng(0)
    logits, other = (jnp.asarray(rng.normal(0, 2.0, (99, 99)).astype(np.float32)) for _ in range(2))

    @jax.jit
    def one(rows):
        anchor = toy_policy(other, rows).logprob
        rows = rows._replace(proximal=anchor, reference=anchor)

        def total(logits, aggregation):
            terms = policy_objective(
                toy_policy(logits, rows),
                rows,
                jnp.int32(VERSION),
                loss=POLICY_LOSSES[loss],
                aggregation=aggregation,
                corrections=(partial(truncated_sequence, cap=2.0), partial(geometric_rejection, low=0.05, high=20.0)),
                divergence=DIVERGENCES["k3"],
                divergence_weight=0.1,
                entropy_bonus=0.01,
            )
            return terms.loss, terms

        return {name: jax.grad(total, has_aux=True)(logits, aggregation) for name, aggregation in MADE.items()}

    examples = examples_of_unequal_length()
    whole = pack(examples, Ladder(((16, 32),)))
    assert len(whole) == 1 and not whole[0].segments[-1].any(), "the last rows are empty"
    expected = accumulate(one, whole)
    alone = [rows for example in examples for rows in pack([example], Ladder(((2, 32),)))]
    for batches in (pack(examples[::-1], Ladder(((3, 16), (2, 32)))), alone):
        assert len(batches) > 1
        for name, (gradient, summary) in accumulate(one, batches).items():
            whole_gradient, whole_summary = expected[name]
            assert np.abs(whole_gradient).max() > 1e-4, name
            np.testing.assert_allclose(gradient, whole_gradient, rtol=1e-4, atol=1e-7, err_msg=name)
            for fact, value in whole_summary.items():
                np.testing.assert_allclose(summary[fact], value, rtol=1e-4, atol=1e-6, err_msg=f"{name} {fact}")


def test_eight_devices_give_the_gradient_of_one_for_every_loss_and_aggregation() -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("sharded_objectives.py")],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == len(POLICY_LOSSES) * len(AGGREGATIONS)


def test_the_entropy_bonus_acts_only_below_its_cap() -> None:
    scores, rows = random_case()

    def loss(entropy):
        return policy_objective(
            scores._replace(entropy=entropy),
            rows,
            jnp.int32(VERSION),
            loss=ppo_clip,
            aggregation=MADE["token_mean"],
            entropy_bonus=0.1,
            entropy_cap=0.6,
        ).loss

    expected = np.where(rows.mask & (scores.entropy < 0.6), -0.1, 0.0)
    assert 0 < np.count_nonzero(expected) < rows.mask.sum()
    np.testing.assert_allclose(jax.grad(loss)(scores.entropy), expected, rtol=1e-6)


def test_cross_entropy_is_the_mean_negative_log_likelihood() -> None:
    scores, rows = random_case()
    summary = cross_entropy(scores, rows, jnp.int32(0)).summary()
    np.testing.assert_allclose(summary["loss"], -np.asarray(scores.logprob)[rows.mask].mean(), rtol=1e-6)
    np.testing.assert_allclose(summary["accuracy"], np.asarray(scores.greedy)[rows.mask].mean(), rtol=1e-6)
