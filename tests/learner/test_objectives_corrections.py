"""Corrections, divergences from a reference, and diagnostics against loops over tokens and sequences."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_cases import SHAPE, VERSION, random_case, sequences, trained_tokens

from learner.objectives import (
    CORRECTIONS,
    DIVERGENCES,
    geometric_rejection,
    icepop,
    policy_objective,
    ppo_clip,
    reinforce,
    token_mean,
    truncated_sequence,
    truncated_token,
)
from learner.objectives.losses import log_ratio

SETTINGS = {
    "truncated_token": {"cap": 1.2},
    "truncated_sequence": {"cap": 1.5},
    "icepop": {"low": 0.7, "high": 1.4},
    "geometric_rejection": {"low": 0.9, "high": 1.1},
}


def log_of(scores, rows, where) -> float:
    return float(scores.logprob[where]) - float(rows.logprobs[where])


def loop(name, scores, rows) -> np.ndarray:
    settings, weight = SETTINGS[name], np.zeros(SHAPE)
    for members in sequences(rows):
        logs = [log_of(scores, rows, where) for where in members]
        for where, log in zip(members, logs, strict=True):
            weight[where] = {
                "truncated_token": lambda s, log=log: min(math.exp(log), s["cap"]),
                "truncated_sequence": lambda s, logs=logs: min(math.exp(sum(logs)), s["cap"]),
                "icepop": lambda s, log=log: float(s["low"] <= math.exp(log) <= s["high"]),
                "geometric_rejection": lambda s, logs=logs: float(s["low"] <= math.exp(np.mean(logs)) <= s["high"]),
            }[name](settings)
    return weight


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_equal_the_loop(name) -> None:
    found = set()
    for seed in range(4):
        scores, rows = random_case(seed)
        weight = CORRECTIONS[name](log_ratio(scores, rows), rows, **SETTINGS[name])
        np.testing.assert_allclose(np.where(rows.mask, weight, 0.0), loop(name, scores, rows), rtol=1e-5)
        found |= set(np.asarray(weight)[rows.mask].tolist())
    assert len(found) > 1, "the case shows nothing"


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_have_no_gradient_and_stay_finite(name) -> None:
    scores, rows = random_case()
    correct = partial(CORRECTIONS[name], **SETTINGS[name])
    assert not np.any(jax.grad(lambda x: jnp.sum(correct(x, rows)))(log_ratio(scores, rows)))
    for extreme in (-500.0, 500.0):
        assert np.isfinite(correct(jnp.full(SHAPE, extreme), rows)).all()


def test_corrections_multiply_and_weigh_the_policy_loss_alone() -> None:
    scores, rows = random_case()
    corrections = [partial(icepop, low=0.7, high=1.4), partial(truncated_token, cap=1.2)]
    terms = policy_objective(
        scores,
        rows,
        jnp.int32(VERSION),
        loss=reinforce,
        aggregation=token_mean(),
        corrections=corrections,
        divergence=DIVERGENCES["k2"],
        divergence_weight=0.3,
        entropy_bonus=0.1,
    )
    weight = loop("icepop", scores, rows) * loop("truncated_token", scores, rows)
    loss, tokens, distance = 0.0, list(trained_tokens(rows)), 0.0
    for w in tokens:
        apart = 0.5 * (float(scores.logprob[w]) - float(rows.reference[w])) ** 2
        loss -= weight[w] * float(rows.advantages[w]) * float(scores.logprob[w])
        loss += 0.3 * apart - 0.1 * float(scores.entropy[w])
        distance += apart
    summary = terms.summary()
    rejected = sum(weight[w] == 0 for w in tokens)
    assert 0 < rejected < len(tokens)
    assert summary["loss"] == pytest.approx(loss / len(tokens), rel=1e-5)
    assert summary["rejected_fraction"] == pytest.approx(rejected / len(tokens))
    assert summary["correction_mean"] == pytest.approx(weight.sum() / len(tokens))
    assert summary["kl_reference"] == pytest.approx(distance / len(tokens), rel=1e-5)


@pytest.mark.parametrize(
    ("correction", "settings"),
    [
        (truncated_token, {"cap": 1.0}),
        (truncated_sequence, {"cap": 1.0}),
        (icepop, {"low": 0.99, "high": 1.01}),
        (geometric_rejection, {"low": 0.99, "high": 1.01}),
    ],
)
def test_on_policy_corrections_do_nothing(correction, settings) -> None:
    _, rows = random_case()
    weight = correction(jnp.zeros(SHAPE), rows, **settings)
    assert (np.asarray(weight)[rows.mask] == 1).all()


def test_divergences_are_the_estimators_of_schulman() -> None:
    scores, rows = random_case()
    ours, theirs = np.float64(scores.logprob), np.float64(rows.reference)
    r = np.exp(theirs - ours)
    for name, expected in {"k1": -np.log(r), "k2": np.log(r) ** 2 / 2, "k3": r - 1 - np.log(r)}.items():
        found = DIVERGENCES[name](scores.logprob, rows.reference)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_of_divergences_are_those_of_a_divergence_between_distributions(name) -> None:
    """Under samples of the policy, and by exact expectation over a small vocabulary."""
    rng = np.random.default_rng(0)
    logits, other = jnp.asarray(rng.normal(size=7)), jax.nn.log_softmax(jnp.asarray(rng.normal(size=7)))

    def forwards(logits):  # KL(policy ‖ reference)
        ours = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(ours) * (ours - other))

    def backwards(logits):  # KL(reference ‖ policy)
        return jnp.sum(jnp.exp(other) * (other - jax.nn.log_softmax(logits)))

    def estimate(logits):
        ours = jax.nn.log_softmax(logits)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(ours)) * DIVERGENCES[name](ours, other))

    expected = jax.grad(backwards if name == "k3" else forwards)(logits)
    np.testing.assert_allclose(jax.grad(estimate)(logits), expected, atol=1e-6)


def test_diagnostics_equal_the_loop_over_tokens() -> None:
    scores, rows = random_case()
    rows.versions[0, 0] = -3  # eight versions old
    rows.mask[0, 0] = True
    loss = partial(ppo_clip, clip_low=0.2, clip_high=0.3)
    terms = policy_objective(scores, rows, jnp.int32(VERSION), loss=loss, aggregation=token_mean())
    tokens = list(trained_tokens(rows))
    logs = np.array([log_of(scores, rows, w) for w in tokens])
    ratios, ages = np.exp(logs), np.array([VERSION - int(rows.versions[w]) for w in tokens])
    k3 = ratios - 1 - logs
    positive = np.array([float(rows.advantages[w]) > 0 for w in tokens])
    expected = {
        "ratio_mean": ratios.mean(),
        "ratio_max": ratios.max(),
        "ratio_outside_fraction": np.mean((ratios < 0.9) | (ratios > 1.1)),
        "effective_sample_size": ratios.sum() ** 2 / (ratios**2).sum() / len(tokens),
        "clip_low_fraction": np.mean((ratios < 0.8) & ~positive),
        "clip_high_fraction": np.mean((ratios > 1.3) & positive),
        "kl_k1": np.mean(-logs),
        "kl_k3": np.mean(k3),
        "entropy": np.mean([float(scores.entropy[w]) for w in tokens]),
    }
    for age, name in enumerate(("0", "1", "2", "3", "4_or_more")):
        own = ages == age if age < 4 else ages >= 4
        assert own.any()
        expected[f"tokens_staleness_{name}"] = own.sum()
        expected[f"kl_k1_staleness_{name}"] = np.mean(-logs[own])
        expected[f"kl_k3_staleness_{name}"] = np.mean(k3[own])
    summary = {name: float(value) for name, value in terms.summary().items()}
    assert terms.tokens == terms.divisor == len(tokens)
    summary.pop("loss")
    assert summary == pytest.approx(expected, rel=1e-4)


def test_without_a_trained_token_every_number_is_finite() -> None:
    scores, rows = random_case()
    rows = rows._replace(mask=np.zeros(SHAPE, bool))
    terms = policy_objective(scores, rows, jnp.int32(VERSION), loss=ppo_clip, aggregation=token_mean())
    assert all(value == 0 for value in terms.summary().values())
