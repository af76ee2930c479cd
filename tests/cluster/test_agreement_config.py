"""The agreement monitor as it is configured, and what is told of it."""

from pathlib import Path

import pytest

from buffer import OUTCOMES, Limits, Stats
from cluster.agreement import limits
from cluster.loading import load_config
from cluster.summary import outcome_rows, summarise_run

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SERVERS = (
    "sampler.kind=sglang",
    "sampler.urls=[http://gpu-0:30000]",
    "sampler.transport=folder",
    "sampler.weights_folder=/w",
)


@pytest.mark.parametrize(
    ("overrides", "backend", "expected"),
    [
        ([], "cpu", (1e-3, 1e-3)),
        ([], "tpu", (0.03, 0.1)),
        (["learner.precision=bfloat16"], "cpu", (0.03, 0.1)),
        (SERVERS, "cpu", (0.03, 0.1)),
        (["learner.agreement.max_mean=0.01"], "cpu", (0.01, 1e-3)),
        (["learner.agreement.max_outside_fraction=0.2"], "tpu", (0.03, 0.2)),
    ],
)
def test_limits_go_with_how_both_sides_compute_unless_they_are_given(overrides, backend, expected):
    assert limits(load_config(QUICKSTART, list(overrides)), backend) == expected


def step(number: int, **agreement: float | str) -> dict:
    facts = {"trajectories": 8, "staleness_max": 1, "compilations_after_warmup": 0, "learner_idle_fraction": 0.0}
    facts["step_seconds"] = float(number)
    return {"kind": "step", "step": number, **facts, **{f"agreement_{name}": x for name, x in agreement.items()}}


def found(scale: float) -> dict[str, float]:
    return {"mean": scale, "p95": 2 * scale, "max": 3 * scale, "outside_fraction": scale / 10, "k3": scale / 100}


def summary(*records: dict) -> dict:
    bounds = Limits(
        max_staleness=1, max_age_seconds=1.0, groups_per_batch=1, group_size=2, max_bytes=1, slot_seconds=1.0,
        max_attempts=1,
    )  # fmt: skip
    stats = Stats(4, 1, "", bounds, 0, 0, 0, 0, 0, 0, counters=dict.fromkeys(("reserved", *OUTCOMES), 0))
    totals = {"compilations_after_warmup": 0.0, "swaps": 4.0, "swap_seconds": 0.2}
    return summarise_run(
        records, stats, sampler_kind="local", staleness_limit=1, sampler_totals=totals, sampler_restarts=0, seconds=1.0
    )  # fmt: skip


def test_the_summary_has_the_worst_and_the_last_check_and_counts_alarms():
    told = summary(
        step(1, version=0, tokens=200, **found(0.5), alarm="they disagree"),
        step(2),
        step(3, version=1, tokens=0),
        step(4, version=2, tokens=150, **found(0.25)),
    )
    assert told["agreement"] == {
        "checks": 2, "no_tokens": 1, "alarms": 1, "worst": found(0.5),
        "last": {"version": 2, "tokens": 150, **found(0.25)},
    }  # fmt: skip
    rows = outcome_rows(told)
    assert rows["sampler and learner differ by"] == "1.5e+00 nats at most"
    assert rows["alarms"] == "1 of 2 checks of sampler and learner"


def test_a_run_that_compared_nothing_says_nothing_of_it():
    told = summary(step(1), step(2, version=0, tokens=0))
    assert told["agreement"] == {"checks": 0, "no_tokens": 1, "alarms": 0, "worst": None, "last": None}
    assert not {"alarms", "sampler and learner differ by"} & set(outcome_rows(told))


def test_the_summary_says_how_long_new_weights_held_up_a_sampler():
    told = summary(step(1), step(2), step(3))
    assert told["swaps"] == {"count": 4, "seconds_mean": 0.05, "step_share": 0.025}
    assert outcome_rows(told)["new weights held up a sampler"] == "50.00 ms, 2.50% of a step"
    assert summary()["swaps"]["step_share"] is None
