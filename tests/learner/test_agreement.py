"""What the agreement monitor measures, and of which tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from learner.agreement import ENOUGH_TOKENS, EXACT, ROUNDED, AgreementMonitor, comparable, measure
from learner.models.compilations import CompilationCounter
from learner.packing import empty_rows, pack


def test_the_statistics_equal_the_loop_over_tokens() -> None:
    log_ratio_N = np.random.default_rng(0).standard_t(2, 400).astype(np.float32) * 0.1
    total, outside, k3, differences = 0.0, 0, 0.0, []
    for log_ratio in map(float, log_ratio_N):
        differences.append(abs(log_ratio))
        total += abs(log_ratio)
        outside += not 0.9 <= math.exp(log_ratio) <= 1.1
        k3 += math.exp(log_ratio) - 1.0 - log_ratio
    p95 = next(d for d in sorted(differences) if sum(other <= d for other in differences) >= 0.95 * 400)
    expected = (400, total / 400, p95, max(differences), outside / 400, k3 / 400)
    assert tuple(measure(log_ratio_N)) == pytest.approx(expected, rel=1e-9)
    assert measure(log_ratio_N[:0]) == (0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_tiny_differences_keep_their_divergence() -> None:
    assert measure(np.full(10, 1e-8)).k3 == pytest.approx(5e-17, rel=1e-3, abs=0)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_exceeds_every_limit(wrong) -> None:
    assert measure(np.array([wrong] + 99 * [0.0])).excess(ROUNDED)


def test_a_few_wrong_tokens_exceed_the_limit_of_ratios_where_the_mean_does_not() -> None:
    found = measure(np.where(np.arange(1000) < 3, 0.2, 0.0))
    assert found.mean < EXACT.mean
    assert found.excess(EXACT) == (
        "0.3% of the ratios are outside [0.9, 1.1], more than 0.1% (learner.agreement.max_outside_fraction)"
    )
    assert found.excess(ROUNDED) is None


def test_tokens_after_an_update_within_a_turn_are_of_no_version_alone_where_keys_are_kept() -> None:
    rows = empty_rows((1, 12))
    rows.segments[0, :11] = [1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]
    rows.mask[0, :11] = [1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0]
    rows.versions[0, :11] = [4, 5, 0, 5, 5, 0, 5, 6, 6, 5, 0]
    expected = {False: [1, 3, 4, 6, 9], True: [3, 4, 6]}
    for keeps_keys, places in expected.items():
        assert np.flatnonzero(comparable(rows, 5, keeps_keys=keeps_keys)).tolist() == places


@pytest.fixture
def case(make_step, make_example, params):
    """A step, its state, and rows that the state's policy sampled at version 0, by three samplers."""
    step, rng = make_step(), np.random.default_rng(0)
    state = step.initialise(params)
    [*batch] = pack([make_example(rng, 32) for _ in range(48)], step._ladder)
    for number, rows in enumerate(batch):
        rows.samplers[:] = number % 3
        rows.versions[:] = 0
        rows.logprobs[:] = step.logprobs(params, step.put(rows)).logprob
    return step, state, batch


def test_the_weights_that_sampled_are_kept_through_steps_that_overwrite_them(case) -> None:
    step, state, batch = case
    monitor = AgreementMonitor(step, EXACT, every_steps=4, max_staleness=2)
    on_device = [step.put(rows) for rows in batch]
    state = step.warm_up(state)
    monitor.warm_up(state.params, [step.put(empty_rows((4, 32)))])
    counter = CompilationCounter()
    assert monitor(state.params, [], 0, 1) == {}
    for version in (0, 1):
        state, _ = step(state, on_device, version)
    moved = np.asarray(step.logprobs(state.params, on_device[0]).logprob) - batch[0].logprobs
    assert np.abs(np.where(batch[0].mask, moved, 0)).max() > 0.01, "the steps changed nothing: the test shows nothing"
    report = monitor(state.params, on_device, 2, 3)
    assert (report["agreement_version"], report["agreement_tokens"]) == (0, sum(rows.mask.sum() for rows in batch))
    assert report["agreement_max"] < 1e-5
    reports = [monitor(state.params, on_device, 0, 1) for _ in range(6)]
    assert [bool(each) for each in reports] == [False, False, True, False, False, False], "it checks every four steps"
    assert counter.count == 0


def test_a_check_that_finds_no_token_until_none_can_come_says_so(case) -> None:
    step, state, batch = case
    monitor = AgreementMonitor(step, EXACT, every_steps=1, max_staleness=1)
    on_device = [step.put(rows) for rows in batch]
    assert monitor(state.params, on_device, 5, 6) == {}
    assert monitor(state.params, on_device, 6, 7) == {"agreement_version": 5, "agreement_tokens": 0}
    assert monitor(state.params, on_device, 7, 8) == {}


def test_one_bad_sampler_of_many_is_an_alarm_that_names_it(case) -> None:
    step, state, batch = case
    for rows in batch[1::3]:
        rows.logprobs[:] -= 0.05
    tokens = sum(rows.mask.sum() for rows in batch[1::3])
    assert tokens >= ENOUGH_TOKENS
    lenient = EXACT._replace(mean=0.03)
    monitor = AgreementMonitor(step, lenient, every_steps=1, max_staleness=0, sampler_name="sampler-{}".format)
    report = monitor(state.params, [step.put(rows) for rows in batch], 0, 1)
    assert report["agreement_mean"] < 0.03, "as a whole they agree well enough"
    assert (
        "disagree about version 0: the mean difference is 0.05 nats, more than 0.03 (learner.agreement.max_mean), over "
        f"{tokens} tokens; it is sampler-1 (0.05 nats); others that agree: 2. Check" in report["agreement_alarm"]
    )


def test_a_sampler_of_few_tokens_is_not_said_to_agree(case) -> None:
    step, state, [rows, *_] = case
    rows.samplers[:] = 0
    where = tuple(axis[0] for axis in np.nonzero(rows.mask))
    rows.samplers[where] = 1
    rows.logprobs[rows.samplers == 0] -= 0.05
    monitor = AgreementMonitor(step, EXACT, every_steps=1, max_staleness=0, sampler_name="sampler-{}".format)
    alarm = monitor(state.params, [step.put(rows)], 0, 1)["agreement_alarm"]
    assert "; sampled by sampler-0 (0.05 nats). Check" in alarm
