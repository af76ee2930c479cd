"""Advantages and credit, against values worked out by hand or by plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from learner.objectives import (
    ADVANTAGES,
    batch_mean,
    deferred_credit,
    dr_grpo,
    grpo,
    overlong_penalty,
    rloo,
    trajectory_credit,
    turn_credit,
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


def test_deferred_credit_is_the_weight_of_what_is_found_later() -> None:
    [[one, other]] = deferred_credit([[np.float32([0, 0, 1]), np.float32([0])]])
    assert (one.tolist(), other.tolist()) == ([1, 1, 1], [1])


def test_the_length_penalty_rises_linearly_over_its_buffer() -> None:
    found = [overlong_penalty(tokens, limit=100, buffer=20) for tokens in (10, 80, 81, 90, 99, 100, 150)]
    np.testing.assert_allclose(found, [0, 0, 0.05, 0.5, 0.95, 1, 1])
