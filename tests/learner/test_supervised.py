"""Supervised fine-tuning."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest

from learner.objectives import cross_entropy
from learner.supervised import supervised_example, train_supervised


def _counting(sizes) -> list:
    """Sequences that count upwards; what is to be learned is the successor."""
    made = []
    for size in sizes:
        tokens = (np.arange(size) % 23).astype(np.int32)
        made.append(supervised_example(tokens, np.arange(size) >= 2))
    return made


@pytest.fixture
def settings(make_step, params, ladder):
    return {"step": make_step(cross_entropy), "params": params, "ladder": ladder, "seed": 0}


def test_it_learns_what_is_shown(settings) -> None:
    records: list[dict[str, float]] = []
    before = jax.device_get(settings["params"])
    params = train_supervised(
        examples=_counting(range(8, 28, 2)),
        steps=40,
        batch_size=4,
        stop=threading.Event(),
        on_step=records.append,
        **settings,
    )
    assert [record["step"] for record in records] == list(range(1, 41))
    assert records[0]["accuracy"] < 0.5 < 0.9 < records[-1]["accuracy"]
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
    assert records[-1]["tokens_per_second"] > 0
    for old, kept, new in zip(*map(jax.tree.leaves, (before, settings["params"], params)), strict=True):
        np.testing.assert_array_equal(old, kept)
        assert np.any(np.asarray(new) != old)


def test_a_stop_ends_it_after_the_step_in_hand(settings) -> None:
    stop, records = threading.Event(), []

    def on_step(record: dict[str, float]) -> None:
        records.append(record)
        stop.set()

    made = train_supervised(examples=_counting([8] * 4), steps=9, batch_size=2, stop=stop, on_step=on_step, **settings)
    assert len(records) == 1
    assert made is None


def test_too_few_examples_are_refused(settings) -> None:
    with pytest.raises(ValueError, match="3 examples are fewer than batch_size=4"):
        train_supervised(
            examples=_counting([8] * 3), steps=1, batch_size=4, stop=threading.Event(), on_step=print, **settings
        )
