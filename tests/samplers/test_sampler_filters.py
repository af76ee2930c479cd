"""Top-k, top-p and min-p against an independent reference that sorts."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from sampler_examples import filtered_reference
from scipy import special

from actors.samplers.contract import SamplingParams
from actors.samplers.filters import EVERY_TOKEN, bounds, filtered, filtering
from actors.samplers.local.program import Rows, sample

ROWS, VOCABULARY = 200, 37


@pytest.fixture
def logits_RV(random: np.random.Generator) -> np.ndarray:
    return random.standard_normal((ROWS, VOCABULARY), np.float32) * 3


def _rows(top_k_R: np.ndarray, top_p_R: np.ndarray, min_p_R: np.ndarray) -> Rows:
    count = len(top_k_R)
    return Rows(
        tokens_RT=None,
        slots_R=None,
        starts_R=None,
        counts_R=None,
        seeds_R2=np.arange(2 * count, dtype=np.uint32).reshape(count, 2),
        temperatures_R=np.tile(np.array([1.0, 0.7, 0.0, 1.5], np.float32), count // 4),
        top_ks_R=top_k_R,
        top_ps_R=top_p_R,
        min_ps_R=min_p_R,
    )


def test_any_combination_keeps_what_sorting_keeps(logits_RV: np.ndarray, random: np.random.Generator) -> None:
    top_k_R = np.where(random.random(ROWS) < 0.3, EVERY_TOKEN, random.integers(1, 45, ROWS)).astype(np.int32)
    top_p_R = np.where(random.random(ROWS) < 0.3, 1.0, random.uniform(0.05, 1.0, ROWS)).astype(np.float32)
    min_p_R = np.where(random.random(ROWS) < 0.5, 0.0, random.uniform(0.0, 0.5, ROWS)).astype(np.float32)
    kept_RV = np.asarray(jax.jit(filtered)(logits_RV, top_k_R, top_p_R, min_p_R))
    for row in range(ROWS):
        expected_V = filtered_reference(
            special.log_softmax(logits_RV[row].astype(np.float64)),
            top_k=int(top_k_R[row]),
            top_p=float(top_p_R[row]),
            min_p=float(min_p_R[row]),
        )
        np.testing.assert_array_equal(np.isfinite(kept_RV[row]), np.isfinite(expected_V), str(row))
        np.testing.assert_allclose(special.log_softmax(kept_RV[row]), expected_V, atol=1e-5)
    active_R = np.asarray(filtering(VOCABULARY, top_k_R, top_p_R, min_p_R))
    assert 0 < (~active_R).sum() < ROWS
    np.testing.assert_array_equal(kept_RV[~active_R], logits_RV[~active_R])


def test_top_p_is_measured_on_what_top_k_left() -> None:
    logits_RV = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    both = filtered(logits_RV, np.array([2], np.int32), np.array([0.55], np.float32), np.array([0.0], np.float32))
    alone = filtered(
        logits_RV, np.array([EVERY_TOKEN], np.int32), np.array([0.55], np.float32), np.array([0.0], np.float32)
    )
    assert np.isfinite(np.asarray(both)).tolist() == [[True, False, False, False]]  # 0.4 / 0.7 > 0.55
    assert np.isfinite(np.asarray(alone)).tolist() == [[True, True, False, False]]


def test_equally_likely_tokens_are_kept_or_dropped_together() -> None:
    logits_RV = np.array([[1.0, 0.0, 0.0, 0.0, -1.0]] * 3, np.float32)
    kept = filtered(
        logits_RV,
        np.array([2, EVERY_TOKEN, EVERY_TOKEN], np.int32),
        np.array([1.0, 0.6, 1.0], np.float32),
        np.array([0.0, 0.0, 0.3], np.float32),
    )
    assert np.isfinite(np.asarray(kept)).tolist() == [[True, True, True, True, False]] * 3


def test_a_call_that_filters_nothing_is_the_program_without_filters_to_the_last_bit(logits_RV: np.ndarray) -> None:
    rows = _rows(np.full(ROWS, EVERY_TOKEN, np.int32), np.ones(ROWS, np.float32), np.zeros(ROWS, np.float32))
    positions_R = np.arange(ROWS)
    without = jax.jit(partial(sample, filters=False))(logits_RV, positions_R, rows)
    able = jax.jit(partial(sample, filters=True))(logits_RV, positions_R, rows)
    for expected, value in zip(without, able, strict=True):
        np.testing.assert_array_equal(np.asarray(value), np.asarray(expected))


def test_rows_beside_one_that_filters_draw_as_they_would_alone(logits_RV: np.ndarray) -> None:
    off = (np.full(ROWS, EVERY_TOKEN, np.int32), np.ones(ROWS, np.float32), np.zeros(ROWS, np.float32))
    top_k_R = off[0].copy()
    top_k_R[::3] = 1
    draw, positions_R = jax.jit(partial(sample, filters=True)), np.arange(ROWS)
    (alone_R, alone_logprob_R), (token_R, logprob_R) = (
        map(np.asarray, draw(logits_RV, positions_R, _rows(top_k, *off[1:]))) for top_k in (off[0], top_k_R)
    )
    others_R = top_k_R == EVERY_TOKEN
    np.testing.assert_array_equal(token_R[others_R], alone_R[others_R])
    np.testing.assert_allclose(logprob_R[others_R], alone_logprob_R[others_R], atol=2e-6)
    np.testing.assert_array_equal(token_R[::3], logits_RV[::3].argmax(axis=-1))
    np.testing.assert_allclose(logprob_R[::3], 0.0, atol=1e-6)


def test_a_greedy_request_has_no_use_for_filters() -> None:
    assert bounds(SamplingParams(max_tokens=1, temperature=0.0, top_k=3, top_p=0.5, min_p=0.1)) == (EVERY_TOKEN, 1, 0)
    assert bounds(SamplingParams(max_tokens=1, top_k=2**40)) == (EVERY_TOKEN, 1, 0)
    assert bounds(SamplingParams(max_tokens=1, top_k=3, top_p=0.5, min_p=0.1)) == (3, 0.5, 0.1)
