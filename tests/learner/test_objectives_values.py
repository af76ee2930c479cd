"""What a value head says about packed turns, against plain loops over each trajectory and against rlax."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from objective_cases import SHAPE, VERSION, random_case

from learner.objectives import gae, policy_objective, ppo_clip, sequence_sum, value_loss, vtrace
from learner.objectives.values import turn_starts, valued
from learner.packing import Example, Ladder, Rows, pack
from learner.recipe import spread

GAMMA = 0.9
TURNS = (6, 1, 3, 2, 4, 1)
"""Of each trajectory; every other one was cut off."""


@dataclass
class Told:
    """What a loop over one trajectory says: of each turn, and of its last token."""

    advantage_K: list[float]
    target_K: list[float]


def example(rng: np.random.Generator, turns: int, *, is_cut: bool) -> Example:
    """Each turn: one to three given tokens, then one to three sampled ones; the last sampled token ends it."""
    mask_S = np.concatenate([np.arange(a + b) >= a for a, b in rng.integers(1, 4, (turns, 2))])
    size = len(mask_S)
    return Example(
        tokens=rng.integers(1, 99, size, dtype=np.int32),
        mask=mask_S,
        logprobs=np.where(mask_S, rng.normal(-2, 0.3, size), 0).astype(np.float32),
        versions=np.zeros(size, np.int32),
        advantages=mask_S.astype(np.float32),
        rewards=spread(rng.normal(size=turns), mask_S),
        is_cut=is_cut,
    )


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    rng = np.random.default_rng(0)
    return [example(rng, turns, is_cut=i % 2 == 0) for i, turns in enumerate(TURNS)]


@pytest.fixture(scope="module")
def rows(examples) -> Rows:
    """Two trajectories share a row; values and log-probabilities are noise at every position, padding included."""
    [packed] = pack(examples, Ladder(((4, 48),)))
    assert packed.segments.max() > 1
    rng = np.random.default_rng(1)
    noise = rng.normal(0, 0.4, packed.mask.shape)
    return packed._replace(
        values=rng.normal(size=packed.mask.shape).astype(np.float32),
        proximal=(packed.logprobs + noise).astype(np.float32),
    )


def run(estimator, rows: Rows, **settings):
    """Compiled as a whole: done one by one, the passes of a scan take seconds."""
    return jax.jit(partial(estimator, **settings))(rows)


def segments_of(rows: Rows):
    for r in range(len(rows.segments)):
        for number in range(1, int(rows.segments[r].max()) + 1):
            yield r, np.nonzero(rows.segments[r] == number)[0]


def runs_of(mask_S: np.ndarray) -> list[list[int]]:
    """Positions of each run of true."""
    runs: list[list[int]] = []
    for t in np.nonzero(mask_S)[0]:
        if runs and runs[-1][-1] == t - 1:
            runs[-1].append(int(t))
        else:
            runs.append([int(t)])
    return runs


def expected(rows: Rows, tell) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and targets at every position; ``tell`` works out those of one trajectory's turns."""
    advantage_RT, target_RT = np.zeros(rows.mask.shape), np.zeros(rows.mask.shape)
    for r, own in segments_of(rows):
        mask_S, value_S, reward_S = (array[r, own] for array in (rows.mask, rows.values, rows.rewards))
        log_S = np.where(mask_S, rows.proximal[r, own] - rows.logprobs[r, own], 0.0)
        runs, is_cut = runs_of(mask_S), bool(rows.cut[r, own[-1]])
        told = tell(
            [float(reward_S[run[0]]) for run in runs],
            [float(value_S[run[0]]) for run in runs],
            [float(log_S[run].sum()) for run in runs],
            float(value_S[-1]) if is_cut else 0.0,
        )
        for k, run in enumerate(runs):
            advantage_RT[r, own[run]] = told.advantage_K[k]
            target_RT[r, own[run]] = told.target_K[k]
            if k + 1 < len(runs):
                target_RT[r, own[run[-1] + 1]] = told.target_K[k + 1]
    return advantage_RT, target_RT


def assert_as_told(found, rows: Rows, tell) -> None:
    advantage_RT, target_RT = expected(rows, tell)
    np.testing.assert_allclose(found.advantage, advantage_RT, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.target, target_RT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.7, 1.0])
def test_gae_is_the_discounted_sum_of_surprises(rows, decay) -> None:
    def tell(reward, value, log_ratio, last):
        turns, after = len(reward), [*value[1:], last]
        surprise = [reward[k] + GAMMA * after[k] - value[k] for k in range(turns)]
        advantage = [sum((GAMMA * decay) ** (j - k) * surprise[j] for j in range(k, turns)) for k in range(turns)]
        return Told(advantage, [advantage[k] + value[k] for k in range(turns)])

    assert_as_told(run(gae, rows, discount=GAMMA, decay=decay), rows, tell)


@pytest.mark.parametrize("is_weighted", [True, False])
def test_vtrace_is_the_sum_of_the_paper(rows, is_weighted) -> None:
    def tell(reward, value, log_ratio, last):
        turns, after, ratio = len(reward), [*value[1:], last], np.exp(log_ratio)
        weight, trace = np.minimum(ratio, 1.3), 0.95 * np.minimum(ratio, 0.9)
        target = []
        for k in range(turns):
            total = value[k]
            for j in range(k, turns):
                surprise = weight[j] * (reward[j] + GAMMA * after[j] - value[j])
                total += GAMMA ** (j - k) * np.prod(trace[k:j]) * surprise
            target.append(total)
        following = [*target[1:], last]
        factor = weight if is_weighted else np.ones(turns)
        return Told([factor[k] * (reward[k] + GAMMA * following[k] - value[k]) for k in range(turns)], target)

    settings = {"discount": GAMMA, "decay": 0.95, "is_weighted": is_weighted, "cap_weight": 1.3, "cap_trace": 0.9}
    assert_as_told(run(vtrace, rows, **settings), rows, tell)


@pytest.mark.parametrize("decay", [0.0, 0.7, 1.0])
def test_gae_is_that_of_rlax(rows, decay) -> None:
    def tell(reward, value, log_ratio, last):
        advantage = rlax.truncated_generalized_advantage_estimation(
            jnp.asarray(reward), jnp.full(len(reward), GAMMA), decay, jnp.asarray([*value, last])
        )
        return Told(advantage.tolist(), (advantage + jnp.asarray(value)).tolist())

    assert_as_told(run(gae, rows, discount=GAMMA, decay=decay), rows, tell)


def test_vtrace_is_that_of_rlax(rows) -> None:
    def tell(reward, value, log_ratio, last):
        value, after = jnp.asarray(value), jnp.asarray([*value[1:], last])
        theirs = rlax.vtrace_td_error_and_advantage(
            value, after, jnp.asarray(reward), jnp.full(len(reward), GAMMA), jnp.exp(jnp.asarray(log_ratio)), 1.0,
            clip_rho_threshold=1.4, clip_pg_rho_threshold=1.4,
        )  # fmt: skip
        return Told(theirs.pg_advantage.tolist(), (theirs.errors + value).tolist())

    found = run(vtrace, rows, discount=GAMMA, decay=1.0, is_weighted=True, cap_weight=1.4)
    assert_as_told(found, rows, tell)


def test_on_policy_both_targets_are_the_returns_and_the_same(rows) -> None:
    on_policy = rows._replace(proximal=rows.logprobs)
    found = run(vtrace, on_policy, discount=GAMMA, decay=1.0, is_weighted=True)
    for ours, theirs in zip(found, run(gae, on_policy, discount=GAMMA, decay=1.0), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_how_trajectories_are_packed_changes_nothing(rows, examples) -> None:
    estimate = jax.jit(partial(gae, discount=GAMMA, decay=0.8))

    def by_tokens(rows: Rows) -> dict[bytes, np.ndarray]:
        found = estimate(rows)
        return {
            rows.tokens[r, own].tobytes(): np.stack([np.asarray(array)[r, own] for array in found])
            for r, own in segments_of(rows)
        }

    together = by_tokens(rows)
    values = {rows.tokens[r, own].tobytes(): rows.values[r, own] for r, own in segments_of(rows)}
    for e in examples:
        [alone] = pack([e], Ladder(((1, 64),)))
        alone.values[0, : len(e.tokens)] = values[e.tokens.tobytes()]
        np.testing.assert_allclose(by_tokens(alone)[e.tokens.tobytes()], together[e.tokens.tobytes()], atol=1e-6)


def test_values_are_trained_at_sampled_tokens_and_after_turns_but_not_where_a_trajectory_was_cut_off(rows) -> None:
    is_valued_RT, starts_RT = np.asarray(valued(rows)), np.asarray(turn_starts(rows))
    for r, own in segments_of(rows):
        runs, is_cut = runs_of(rows.mask[r, own]), rows.cut[r, own[-1]]
        places = {t for run in runs for t in [*run, run[-1] + 1]} - ({len(own) - 1} if is_cut else set())
        assert set(np.nonzero(is_valued_RT[r, own])[0]) == places
        assert set(np.nonzero(starts_RT[r, own])[0]) == {run[0] for run in runs}
    assert not is_valued_RT[rows.segments == 0].any()


def test_the_value_loss_is_half_the_squared_error_where_values_are_trained() -> None:
    _, rows = random_case()
    rows = rows._replace(cut=np.random.default_rng(2).random(SHAPE) < 0.2)
    value = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    target, is_valued = rows.returns, np.asarray(valued(rows))
    assert (is_valued & ~rows.mask).any()
    found = np.asarray(value_loss(value, rows))
    for r in range(SHAPE[0]):
        for t in range(SHAPE[1]):
            error = float(value[r, t]) - float(target[r, t])
            assert found[r, t] == pytest.approx(0.5 * error**2 if is_valued[r, t] else 0.0, rel=1e-5)
    slope = np.asarray(jax.grad(lambda value: value_loss(value, rows).sum())(value))
    np.testing.assert_allclose(slope, np.where(is_valued, value - target, 0.0), rtol=1e-5, atol=1e-6)


def test_the_value_loss_is_weighed_and_aggregated_whatever_corrects_the_policy_loss() -> None:
    scores, rows = random_case()
    value = jnp.asarray(np.random.default_rng(1).normal(size=SHAPE).astype(np.float32))

    def loss(**settings):
        given = {"loss": ppo_clip, "aggregation": sequence_sum(8), "value_weight": 0.7} | settings
        return policy_objective(scores._replace(value=value), rows, jnp.int32(VERSION), **given)

    rejected = loss(corrections=[lambda log_ratio_RT, rows: jnp.zeros_like(log_ratio_RT)])
    own = float(value_loss(value, rows).sum())
    assert float(rejected.loss) == pytest.approx(0.7 / 8 * own, rel=1e-5)
    assert float(loss().loss - loss(value_weight=0).loss) == pytest.approx(0.7 / 8 * own, rel=1e-4)
    assert rejected.summary()["value_loss"] == pytest.approx(own / np.asarray(valued(rows)).sum(), rel=1e-5)
    assert "value_loss" not in loss(value_weight=0).summary()
