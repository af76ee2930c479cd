"""Against rlax, where it has the function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import rlax
from objective_cases import VERSION, random_case

from learner.objectives import ppo_clip, reinforce, turn_credit

DISCOUNT = 0.9


def test_discounted_returns() -> None:
    reward = np.random.default_rng(0).normal(size=8).astype(np.float32)
    expected = rlax.discounted_returns(reward, np.full(8, DISCOUNT, np.float32), np.zeros(8, np.float32))
    [[found]] = turn_credit([[reward]], advantage=lambda return_M, group_M: return_M, discount=DISCOUNT)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_clipped_surrogate() -> None:
    scores, rows = random_case()
    ratio = jnp.exp(scores.logprob - rows.logprobs)[rows.mask]
    expected = rlax.clipped_surrogate_pg_loss(ratio, jnp.asarray(rows.advantages[rows.mask]), 0.2)
    found = ppo_clip(scores, rows, jnp.int32(VERSION), clip_low=0.2, clip_high=0.2).loss
    np.testing.assert_allclose(found.sum() / rows.mask.sum(), expected, rtol=1e-5)


def test_the_policy_gradient() -> None:
    scores, rows = random_case()
    count = int(rows.mask.sum())
    logits = jax.random.normal(jax.random.key(0), (count, 5))
    actions = jax.random.randint(jax.random.key(1), (count,), 0, 5)
    advantages = jnp.asarray(rows.advantages[rows.mask])
    expected = rlax.policy_gradient_loss(logits, actions, advantages, jnp.ones(count))
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], axis=1)[:, 0]
    logprob = jnp.zeros(rows.mask.shape).at[np.nonzero(rows.mask)].set(chosen)
    found = reinforce(scores._replace(logprob=logprob), rows, jnp.int32(VERSION)).loss
    np.testing.assert_allclose(found.sum() / count, expected, rtol=1e-5)
