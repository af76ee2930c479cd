"""Advantages, credit, and what a value head would give, against values worked out by hand or by plain loops."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from objective_cases import SHAPE, random_case

from learner.objectives import (
    ADVANTAGES,
    batch_mean,
    dr_grpo,
    gae,
    grpo,
    overlong_penalty,
    rloo,
    trajectory_credit,
    turn_credit,
    value_loss,
    vtrace,
)

RETURNS = np.array([0.0, 1.0, 1.0, 2.0, 5.0, 9.0, 4.0])
GROUPS = np.array([0, 0, 0, 0, 1, 1, 2])


def test_grpo_standardises_within_each_group() -> None:
    groups = [[0.0, 1.0, 1.0, 2.0], [5.0, 9.0]]
    expected = [(r - np.mean(group)) / np.std(group) for group in groups for r in group]
    np.testing.assert_allclose(grpo(RETURNS, GROUPS), [*expected, 0.0], rtol=1e-6)


def test_dr_grpo_only_centres() -> None:
    np.testing.assert_allclose(dr_grpo(RETURNS, GROUPS), [-1, 0, 0, 1, -2, 2, 0])


def test_rloo_compares_each_with_the_others_of_its_group() -> None:
    expected = []
    for i, g in enumerate(GROUPS):
        others = [RETURNS[j] for j in range(len(RETURNS)) if GROUPS[j] == g and j != i]
        expected.append(RETURNS[i] - np.mean(others) if others else 0.0)
    np.testing.assert_allclose(rloo(RETURNS, GROUPS), expected, rtol=1e-6)


def test_reinforce_compares_with_the_whole_batch() -> None:
    np.testing.assert_allclose(batch_mean(RETURNS, GROUPS), RETURNS - np.mean(RETURNS), rtol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_returns_say_exactly_nothing(name) -> None:
    assert not ADVANTAGES[name](np.full(3, 0.1), np.zeros(3, np.int64)).any()
    assert not ADVANTAGES[name](np.array([0.7]), np.zeros(1, np.int64)).any()
    assert len(ADVANTAGES[name](np.zeros(0), np.zeros(0, np.int64))) == 0


def test_trajectory_credit_gives_every_turn_the_advantage_of_the_total() -> None:
    group = [np.float32([0, 0, 1]), np.float32([0]), np.float32([0.5, 0.5]), np.float32([0, 0])]
    pair = [np.float32([3]), np.float32([1, 1])]
    credited, other = trajectory_credit([group, pair], advantage=dr_grpo)
    for advantage_K, expected in zip(credited, ([0.5] * 3, [-0.5], [0.5] * 2, [-0.5] * 2), strict=True):
        np.testing.assert_allclose(advantage_K, expected)
    np.testing.assert_allclose(np.concatenate(other), [0.5, -0.5, -0.5])
    credited, other = trajectory_credit([group, pair], advantage=batch_mean)
    np.testing.assert_allclose(credited[1], [0 - 7 / 6], rtol=1e-6)
    np.testing.assert_allclose(other[0], [3 - 7 / 6], rtol=1e-6)


@pytest.mark.parametrize("discount", [1.0, 0.6])
def test_turn_credit_is_the_standardised_discounted_return_of_each_turn(discount) -> None:
    rng = np.random.default_rng(0)
    rewards = [[rng.normal(size=turns).astype(np.float32) for turns in group] for group in ((3, 1, 5, 2), (2, 2))]
    credited = turn_credit(rewards, advantage=grpo, discount=discount)
    for group, advantages in zip(rewards, credited, strict=True):
        returns = [[sum(discount ** (j - k) * r[j] for j in range(k, len(r))) for k in range(len(r))] for r in group]
        everything = np.concatenate(returns)
        for advantage_K, return_K in zip(advantages, returns, strict=True):
            expected = (return_K - everything.mean()) / everything.std()
            np.testing.assert_allclose(advantage_K, expected, rtol=1e-4, atol=1e-6)


def test_with_a_reward_at_the_end_only_and_no_discount_all_turns_of_a_trajectory_are_credited_alike() -> None:
    rewards = [[np.float32([0, 0, 1]), np.float32([0, -1])]]
    assert all(np.ptp(advantage_K) == 0 for advantage_K in turn_credit(rewards, advantage=grpo, discount=1.0)[0])


def test_the_length_penalty_rises_linearly_over_its_buffer() -> None:
    found = [overlong_penalty(tokens, limit=100, buffer=20) for tokens in (10, 80, 81, 90, 99, 100, 150)]
    np.testing.assert_allclose(found, [0, 0, 0.05, 0.5, 0.95, 1, 1])


def turns(seed: int = 0, count: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=count), rng.normal(size=count), rng.normal(0, 0.8, size=count)


@pytest.mark.parametrize("decay", [0.0, 0.7, 1.0])
def test_gae_is_the_discounted_sum_of_surprises(decay) -> None:
    reward, value, _ = turns()
    after = [*value[1:], 0.4]
    surprise = [reward[k] + 0.9 * after[k] - value[k] for k in range(6)]
    expected = [sum((0.9 * decay) ** (j - k) * surprise[j] for j in range(k, 6)) for k in range(6)]
    np.testing.assert_allclose(gae(reward, value, bootstrap=0.4, discount=0.9, decay=decay), expected, rtol=1e-5)


def test_vtrace_is_the_sum_of_the_paper() -> None:
    reward, value, log_ratio = turns()
    after, ratio = [*value[1:], 0.4], np.exp(log_ratio)
    weight, trace = np.minimum(ratio, 1.3), 0.95 * np.minimum(ratio, 0.9)
    target = []
    for k in range(6):
        total = value[k]
        for j in range(k, 6):
            total += 0.9 ** (j - k) * np.prod(trace[k:j]) * weight[j] * (reward[j] + 0.9 * after[j] - value[j])
        target.append(total)
    following = [*target[1:], 0.4]
    advantage = [weight[k] * (reward[k] + 0.9 * following[k] - value[k]) for k in range(6)]
    found = vtrace(reward, value, log_ratio, bootstrap=0.4, discount=0.9, decay=0.95, cap_weight=1.3, cap_trace=0.9)
    np.testing.assert_allclose(found.target, target, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.advantage, advantage, rtol=1e-5, atol=1e-6)


def test_on_policy_vtrace_targets_are_the_returns() -> None:
    reward, value, _ = turns()
    found = vtrace(reward, value, np.zeros(6), discount=0.9)
    returns = [sum(0.9 ** (j - k) * reward[j] for j in range(k, 6)) for k in range(6)]
    np.testing.assert_allclose(found.target, returns, rtol=1e-5)


def test_the_value_loss_is_the_worse_of_the_clipped_and_the_plain_error() -> None:
    _, rows = random_case()
    rng = np.random.default_rng(1)
    value, before, target = (rng.normal(size=SHAPE).astype(np.float32) for _ in range(3))
    found = np.asarray(value_loss(value, before, target, rows, clip=0.3))
    moved = 0
    for r in range(SHAPE[0]):
        for t in range(SHAPE[1]):
            near = min(max(value[r, t], before[r, t] - 0.3), before[r, t] + 0.3)
            plain, clipped = (value[r, t] - target[r, t]) ** 2, (near - target[r, t]) ** 2
            expected = 0.5 * max(plain, clipped) if rows.mask[r, t] else 0.0
            moved += rows.mask[r, t] and clipped > plain
            assert found[r, t] == pytest.approx(expected, rel=1e-5)
    assert moved > 0

    def total(value):
        return value_loss(value, before, target, rows, clip=0.3).sum()

    slope = np.asarray(jax.grad(total)(value))
    ahead = np.abs(value - before) > 0.3  # moved as far as it may, towards its target: no more gradient
    near = np.clip(value, before - 0.3, before + 0.3)
    held = rows.mask & ahead & ((near - target) ** 2 > (value - target) ** 2)
    assert held.any() and not slope[held].any()
    assert slope[rows.mask & ~ahead].all()
