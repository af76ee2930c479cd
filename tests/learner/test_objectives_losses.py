"""Policy losses against loops over tokens, and their gradients against the formulas of the papers."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_cases import SHAPE, VERSION, random_case, sequences, trained_tokens

from learner.objectives import (
    POLICY_LOSSES,
    cispo,
    decoupled_ppo,
    dppo,
    gspo,
    ppo_clip,
    reinforce,
    truncated_token,
)

LOW, HIGH = 0.2, 0.3


def sums(loss, scores, rows) -> tuple[float, float, float]:
    found = loss(scores, rows, jnp.int32(VERSION))
    assert not np.any(np.asarray(found.loss)[~rows.mask])
    return float(found.loss.sum()), float(found.clipped_low.sum()), float(found.clipped_high.sum())


def gradient(loss, scores, rows) -> np.ndarray:
    """Of the summed loss, by the log-probabilities."""

    def total(logprob):
        return loss(scores._replace(logprob=logprob), rows, jnp.int32(VERSION)).loss.sum()

    return np.asarray(jax.grad(total)(scores.logprob))


def at(rows, scores, where) -> tuple[float, float]:
    """ρ and A of a token."""
    return math.exp(float(scores.logprob[where]) - float(rows.logprobs[where])), float(rows.advantages[where])


def clip(x: float, low: float = LOW, high: float = HIGH) -> float:
    return min(max(x, 1 - low), 1 + high)


def test_ppo_clip_equals_the_loop_over_tokens() -> None:
    scores, rows = random_case()
    loss, low, high = 0.0, 0, 0
    for where in trained_tokens(rows):
        ratio, a = at(rows, scores, where)
        loss -= min(ratio * a, clip(ratio) * a)
        low += ratio < 1 - LOW and a < 0
        high += ratio > 1 + HIGH and a > 0
    assert low > 0 and high > 0
    assert sums(partial(ppo_clip, clip_low=LOW, clip_high=HIGH), scores, rows) == pytest.approx((loss, low, high))


def test_ppo_clip_has_a_gradient_only_where_it_is_not_cut() -> None:
    scores, rows = random_case()
    ratio = np.exp(np.asarray(scores.logprob) - rows.logprobs)
    cut = ((ratio > 1 + HIGH) & (rows.advantages > 0)) | ((ratio < 1 - LOW) & (rows.advantages < 0))
    expected = np.where(rows.mask & ~cut, -ratio * rows.advantages, 0.0)
    found = gradient(partial(ppo_clip, clip_low=LOW, clip_high=HIGH), scores, rows)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_a_dual_clip_bounds_what_a_bad_token_costs() -> None:
    scores, rows = random_case()
    dual, loss, cut = 1.5, 0.0, 0
    for where in trained_tokens(rows):
        ratio, a = at(rows, scores, where)
        gain = min(ratio * a, clip(ratio) * a)
        loss -= max(gain, dual * a) if a < 0 else gain
        cut += (ratio > 1 + HIGH and a > 0) or (ratio > dual and a < 0)
    bounded = partial(ppo_clip, clip_low=LOW, clip_high=HIGH, dual_clip=dual)
    found, _, high = sums(bounded, scores, rows)
    assert (found, high) == pytest.approx((loss, cut))
    assert found < sums(partial(ppo_clip, clip_low=LOW, clip_high=HIGH), scores, rows)[0]
    ratio = np.exp(np.asarray(scores.logprob) - rows.logprobs)
    beyond = rows.mask & (rows.advantages < 0) & (ratio > dual)
    assert beyond.any() and not gradient(bounded, scores, rows)[beyond].any()


def test_gspo_has_one_ratio_per_sequence() -> None:
    scores, rows = random_case()
    low, high = 0.05, 0.1
    loss, cut_low, cut_high, slope = 0.0, 0, 0, np.zeros(SHAPE)
    for members in sequences(rows):
        ratio = math.exp(np.mean([float(scores.logprob[w]) - float(rows.logprobs[w]) for w in members]))
        for where in members:
            a = float(rows.advantages[where])
            loss -= min(ratio * a, clip(ratio, low, high) * a)
            cut = (ratio < 1 - low and a < 0, ratio > 1 + high and a > 0)
            cut_low, cut_high = cut_low + cut[0], cut_high + cut[1]
            slope[where] = 0.0 if any(cut) else -ratio * a  # GSPO-token: each token's own advantage
    assert cut_low > 0 and cut_high > 0
    bounded = partial(gspo, clip_low=low, clip_high=high)
    assert sums(bounded, scores, rows) == pytest.approx((loss, cut_low, cut_high))
    np.testing.assert_allclose(gradient(bounded, scores, rows), slope, rtol=1e-5, atol=1e-7)


def test_gspo_with_one_advantage_per_sequence_has_the_gradient_of_the_sequence_ratio() -> None:
    scores, rows = random_case()
    rows = rows._replace(advantages=np.where(rows.segments % 2, 0.7, -1.3).astype(np.float32))
    members_of = list(sequences(rows))

    def paper(logprob):  # eq. 5 without the mean over sequences, 1/|o| undone as our aggregation is not applied
        total = 0.0
        for members in members_of:
            index = tuple(np.array(members).T)
            ratio = jnp.exp(jnp.mean(logprob[index] - rows.logprobs[index]))
            total -= len(members) * ratio * rows.advantages[members[0]]
        return total

    found = gradient(partial(gspo, clip_low=0.99, clip_high=99.0), scores, rows)
    np.testing.assert_allclose(found, jax.grad(paper)(scores.logprob), rtol=1e-5, atol=1e-6)


def test_cispo_clips_the_weight_and_never_the_update() -> None:
    scores, rows = random_case()
    loss, low, high, slope = 0.0, 0, 0, np.zeros(SHAPE)
    for where in trained_tokens(rows):
        ratio, a = at(rows, scores, where)
        loss -= clip(ratio) * a * float(scores.logprob[where])
        slope[where] = -clip(ratio) * a
        low, high = low + (ratio < 1 - LOW), high + (ratio > 1 + HIGH)
    clipped = partial(cispo, clip_low=LOW, clip_high=HIGH)
    assert sums(clipped, scores, rows) == pytest.approx((loss, low, high))
    np.testing.assert_allclose(gradient(clipped, scores, rows), slope, rtol=1e-5)
    assert sums(partial(cispo, clip_high=HIGH), scores, rows)[1] == 0, "the default sets no lower bound"


def test_dppo_masks_what_would_move_a_probability_further_than_its_bound() -> None:
    scores, rows = random_case()
    bound = 0.05
    loss, low, high, slope = 0.0, 0, 0, np.zeros(SHAPE)
    for where in trained_tokens(rows):
        ratio, a = at(rows, scores, where)
        distance = abs(math.exp(float(scores.logprob[where])) - math.exp(float(rows.logprobs[where])))
        further = (a > 0 and ratio > 1) or (a < 0 and ratio < 1)
        if distance > bound and further:
            low, high = low + (ratio < 1), high + (ratio > 1)
        else:
            loss -= ratio * a
            slope[where] = -ratio * a
    assert low > 0 and high > 0
    masked = partial(dppo, divergence=bound)
    assert sums(masked, scores, rows) == pytest.approx((loss, low, high))
    np.testing.assert_allclose(gradient(masked, scores, rows), slope, rtol=1e-5)


def interpolated(rows, scores, where) -> float:
    """Log-probability of A-3PO's proximal policy."""
    age = VERSION - int(rows.versions[where])
    alpha = 1 / age if age >= 1 else 0.0
    return alpha * float(rows.logprobs[where]) + (1 - alpha) * float(scores.logprob[where])


@pytest.mark.parametrize("proximal", ["recomputed", "interpolated"])
@pytest.mark.parametrize("cap", [None, 1.1])
def test_decoupled_ppo_clips_around_the_proximal_policy_and_weighs_by_the_behaviour_policy(proximal, cap) -> None:
    scores, rows = random_case()
    loss, low, high, slope = 0.0, 0, 0, np.zeros(SHAPE)
    for where in trained_tokens(rows):
        _, a = at(rows, scores, where)
        anchor = float(rows.proximal[where]) if proximal == "recomputed" else interpolated(rows, scores, where)
        weight = math.exp(anchor - float(rows.logprobs[where]))
        weight = weight if cap is None else min(weight, cap)
        ratio = math.exp(float(scores.logprob[where]) - anchor)
        loss -= weight * min(ratio * a, clip(ratio) * a)
        cut = (ratio < 1 - LOW and a < 0, ratio > 1 + HIGH and a > 0)
        low, high = low + cut[0], high + cut[1]
        slope[where] = 0.0 if any(cut) else -weight * ratio * a
    assert low > 0 and high > 0
    more = {} if cap is None else {"behaviour_weight": partial(truncated_token, cap=cap)}
    decoupled = partial(decoupled_ppo, proximal=proximal, clip_low=LOW, clip_high=HIGH, **more)
    assert sums(decoupled, scores, rows) == pytest.approx((loss, low, high))
    np.testing.assert_allclose(gradient(decoupled, scores, rows), slope, rtol=1e-5, atol=1e-7)


def test_reinforce_is_the_weighted_log_likelihood() -> None:
    scores, rows = random_case()
    loss = -sum(float(rows.advantages[w]) * float(scores.logprob[w]) for w in trained_tokens(rows))
    assert sums(reinforce, scores, rows) == pytest.approx((loss, 0, 0))
    np.testing.assert_allclose(gradient(reinforce, scores, rows), np.where(rows.mask, -rows.advantages, 0.0))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name) -> None:
    scores, rows = random_case()
    same = np.asarray(scores.logprob)
    rows = rows._replace(logprobs=same, proximal=same)
    found = gradient(POLICY_LOSSES[name], scores, rows)
    np.testing.assert_allclose(found, np.where(rows.mask, -rows.advantages, 0.0), rtol=1e-6)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_stays_finite_for_an_impossible_token(name) -> None:
    scores, rows = random_case()
    absurd = np.full(SHAPE, -500.0, np.float32)
    for impossible in (rows._replace(logprobs=absurd), rows._replace(proximal=absurd)):
        assert all(np.isfinite(sums(POLICY_LOSSES[name], scores, impossible)))
        assert np.isfinite(gradient(POLICY_LOSSES[name], scores, impossible)).all()
