"""The learning rate's course, weight decay and clipping."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.models.tensors import parameter_path
from learner.optimizer import make_optimizer

SETTINGS = {
    "learning_rate": 1.0,
    "warmup_steps": 4,
    "total_steps": 14,
    "decay": "linear",
    "final_fraction": 0.1,
    "weight_decay": 0.0,
    "beta1": 0.9,
    "beta2": 0.99,
    "max_grad_norm": 1.0,
}


@pytest.mark.parametrize(
    ("decay", "course"),
    [
        ("constant", {0: 0.25, 3: 1.0, 4: 1.0, 9: 1.0, 30: 1.0}),
        ("linear", {0: 0.25, 3: 1.0, 4: 1.0, 9: 0.55, 14: 0.1, 30: 0.1}),
        ("cosine", {0: 0.25, 3: 1.0, 4: 1.0, 9: 0.55, 14: 0.1, 30: 0.1}),
    ],
)
def test_the_rate_rises_and_falls_to_its_floor(decay, course) -> None:
    schedule = make_optimizer(**SETTINGS | {"decay": decay}).schedule
    assert {step: float(schedule(step)) for step in course} == pytest.approx(course, rel=1e-5)


def test_without_warm_up_the_first_step_has_the_peak_rate() -> None:
    assert make_optimizer(**SETTINGS | {"warmup_steps": 0}).schedule(0) == 1.0


def test_an_unknown_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="decay is 'exponential'; expected"):
        make_optimizer(**SETTINGS | {"decay": "exponential"})


def test_weight_decay_spares_the_norms(params) -> None:
    rule = make_optimizer(**SETTINGS | {"weight_decay": 0.5}).rule
    change, _ = rule.update(jax.tree.map(jnp.zeros_like, params), rule.init(params), params)
    moved = {parameter_path(path): bool(np.any(leaf)) for path, leaf in jax.tree.leaves_with_path(change)}
    assert {path for path, any_change in moved.items() if not any_change} == {
        path for path in moved if path[-1] == "weight"
    }
    assert len(moved) == 13


def test_a_huge_gradient_moves_no_further_than_its_direction(params) -> None:
    rule = make_optimizer(**SETTINGS).rule
    gradient = jax.tree.map(jnp.ones_like, params)
    small, _ = rule.update(gradient, rule.init(params), params)
    huge, _ = rule.update(jax.tree.map(lambda g: 1e6 * g, gradient), rule.init(params), params)
    for a, b in zip(jax.tree.leaves(small), jax.tree.leaves(huge), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)
