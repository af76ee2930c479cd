"""Objectives against values written independently in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.models.logprobs import TokenScores
from learner.objectives import cross_entropy, dr_grpo, grpo, ppo_clip, trajectory_credit, turn_credit
from learner.packing import Rows

SHAPE = (3, 17)
SETTINGS = {"clip_low": 0.2, "clip_high": 0.3, "entropy_bonus": 0.1, "entropy_cap": 0.6}
LOW, HIGH, BONUS, CAP = SETTINGS.values()


def _case() -> tuple[TokenScores, Rows]:
    rng = np.random.default_rng(0)
    logprob = rng.normal(-1.5, 0.5, SHAPE).astype(np.float32)
    whole = np.zeros(SHAPE, np.int32)
    rows = Rows(
        tokens=whole,
        positions=whole,
        segments=whole + 1,
        targets=whole,
        mask=rng.random(SHAPE) < 0.6,
        logprobs=(logprob + rng.normal(0, 0.6, SHAPE)).astype(np.float32),
        versions=rng.integers(3, 6, SHAPE).astype(np.int32),
        advantages=rng.normal(size=SHAPE).astype(np.float32),
    )
    entropy = rng.random(SHAPE).astype(np.float32)
    return TokenScores(jnp.asarray(logprob), jnp.asarray(entropy), jnp.asarray(rng.random(SHAPE) < 0.5)), rows


def test_ppo_clip_equals_the_loop_over_tokens() -> None:
    scores, rows = _case()
    terms = ppo_clip(scores, rows, jnp.int32(5), **SETTINGS)
    loss, ratios, cut, k3, entropy, differences = 0.0, [], 0, 0.0, 0.0, []
    for index in zip(*np.nonzero(rows.mask), strict=True):
        log_ratio = float(scores.logprob[index]) - float(rows.logprobs[index])
        ratio, advantage = np.exp(log_ratio), float(rows.advantages[index])
        bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
        loss -= min(ratio * advantage, bounded * advantage) + BONUS * min(float(scores.entropy[index]), CAP)
        cut += bounded * advantage < ratio * advantage
        ratios.append(ratio)
        k3 += ratio - 1 - log_ratio
        entropy += float(scores.entropy[index])
        if rows.versions[index] == 5:
            differences.append(abs(log_ratio))
    assert 0 < cut < len(ratios) and 0 < len(differences) < len(ratios)
    assert terms.tokens == len(ratios)
    expected = {
        "loss": loss / len(ratios),
        "ratio_mean": np.mean(ratios),
        "clip_fraction": cut / len(ratios),
        "kl_k3": k3 / len(ratios),
        "entropy": entropy / len(ratios),
        "logprob_difference_tokens": len(differences),
        "ratio_max": max(ratios),
        "logprob_difference_max": max(differences),
    }
    summary = {name: float(value) for name, value in terms.summary().items()}
    assert summary == pytest.approx(expected, rel=1e-5)


def test_ppo_clip_has_a_gradient_only_where_it_is_not_cut() -> None:
    scores, rows = _case()

    def loss(logprob):
        return ppo_clip(scores._replace(logprob=logprob), rows, jnp.int32(5), **SETTINGS).loss

    ratio = np.exp(np.asarray(scores.logprob) - rows.logprobs)
    cut = ((ratio > 1 + HIGH) & (rows.advantages > 0)) | ((ratio < 1 - LOW) & (rows.advantages < 0))
    expected = np.where(rows.mask & ~cut, -ratio * rows.advantages, 0.0)
    np.testing.assert_allclose(jax.grad(loss)(scores.logprob), expected, rtol=1e-5, atol=1e-7)


def test_the_entropy_bonus_acts_only_below_its_cap() -> None:
    scores, rows = _case()

    def loss(entropy):
        return ppo_clip(scores._replace(entropy=entropy), rows, jnp.int32(5), **SETTINGS).loss

    expected = np.where(rows.mask & (scores.entropy < CAP), -BONUS, 0.0)
    assert 0 < np.count_nonzero(expected) < rows.mask.sum()
    np.testing.assert_allclose(jax.grad(loss)(scores.entropy), expected, rtol=1e-6)


def test_ppo_clip_stays_finite_for_an_impossible_token() -> None:
    scores, rows = _case()
    rows = rows._replace(mask=np.ones(SHAPE, bool), logprobs=np.full(SHAPE, -500.0, np.float32))
    terms = ppo_clip(scores, rows, jnp.int32(5), **SETTINGS)
    assert all(np.isfinite(value) for value in terms.summary().values())


def test_terms_add_up_over_parts_of_the_rows() -> None:
    scores, rows = _case()

    def terms(part: slice):
        cut = jax.tree.map(lambda x: x[part], (scores, rows))
        return ppo_clip(*cut, jnp.int32(5), **SETTINGS)

    parts = terms(slice(0, 1)) + terms(slice(1, 3))
    for ours, whole in zip(jax.tree.leaves(parts), jax.tree.leaves(terms(slice(0, 3))), strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-5)


def test_cross_entropy_is_the_mean_negative_log_likelihood() -> None:
    scores, rows = _case()
    summary = cross_entropy(scores, rows, jnp.int32(0)).summary()
    np.testing.assert_allclose(summary["loss"], -np.asarray(scores.logprob)[rows.mask].mean(), rtol=1e-6)
    np.testing.assert_allclose(summary["accuracy"], np.asarray(scores.greedy)[rows.mask].mean(), rtol=1e-6)


def test_grpo_standardises_within_each_group() -> None:
    reward_NG = np.array([[0.0, 1.0, 1.0, 2.0], [5.0, 5.0, 5.0, 9.0]])
    expected = [[(r - np.mean(group)) / np.std(group) for r in group] for group in reward_NG.tolist()]
    np.testing.assert_allclose(grpo(reward_NG), expected, rtol=1e-6)


def test_dr_grpo_only_centres() -> None:
    np.testing.assert_allclose(dr_grpo(np.array([[0.0, 1.0, 1.0, 2.0]])), [[-1.0, 0.0, 0.0, 1.0]])


@pytest.mark.parametrize("advantage", [grpo, dr_grpo])
def test_a_group_of_equal_rewards_says_exactly_nothing(advantage) -> None:
    assert not advantage(np.full((1, 3), 0.1)).any()
    assert not advantage(np.array([[0.7]])).any()


def test_trajectory_credit_gives_every_turn_the_advantage_of_the_total() -> None:
    rewards = [np.float32([0, 0, 1]), np.float32([0]), np.float32([0.5, 0.5]), np.float32([0, 0])]
    credited = trajectory_credit(rewards, advantage=dr_grpo)
    for advantage_K, expected in zip(credited, ([0.5] * 3, [-0.5], [0.5] * 2, [-0.5] * 2), strict=True):
        np.testing.assert_allclose(advantage_K, expected)


@pytest.mark.parametrize("discount", [1.0, 0.6])
def test_turn_credit_is_the_standardised_discounted_return_of_each_turn(discount) -> None:
    rng = np.random.default_rng(0)
    rewards = [rng.normal(size=turns).astype(np.float32) for turns in (3, 1, 5, 2)]
    returns = [[sum(discount ** (j - k) * r[j] for j in range(k, len(r))) for k in range(len(r))] for r in rewards]
    everything = np.concatenate(returns)
    credited = turn_credit(rewards, advantage=grpo, discount=discount)
    for advantage_K, return_K in zip(credited, returns, strict=True):
        np.testing.assert_allclose(advantage_K, (return_K - everything.mean()) / everything.std(), rtol=1e-4, atol=1e-6)


def test_with_a_reward_at_the_end_only_and_no_discount_all_turns_of_a_trajectory_are_credited_alike() -> None:
    rewards = [np.float32([0, 0, 1]), np.float32([0, -1])]
    assert all(np.ptp(advantage_K) == 0 for advantage_K in turn_credit(rewards, advantage=grpo, discount=1.0))
