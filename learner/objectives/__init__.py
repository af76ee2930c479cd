"""Objectives: small pure functions, each an idea with a name and a source.

What happens to a batch, in this order:

* on the host, ``credit`` turns the rewards of turns into advantages by one of ``ADVANTAGES``; or, of a model with a
  value head, one of ``ESTIMATORS`` does so on the devices, by the values at the start of the step (``values``);
* on the devices, one of ``POLICY_LOSSES`` gives every sampled token a loss, some of ``CORRECTIONS`` weigh or reject it,
  one of ``DIVERGENCES`` and the entropy are added, and one of ``AGGREGATIONS`` weighs tokens against each other
  (``policy``); ``diagnostics`` are measured on the way;
* after micro-batches and devices have been added up, ``Terms`` are divided, once.
"""

from collections.abc import Callable

from learner.objectives.advantages import ADVANTAGES, Advantage, batch_mean, dr_grpo, grpo, rloo
from learner.objectives.aggregation import Aggregation, sequence_mean_token_mean, sequence_sum, token_mean
from learner.objectives.corrections import (
    CORRECTIONS,
    Correction,
    geometric_rejection,
    icepop,
    truncated_sequence,
    truncated_token,
)
from learner.objectives.credit import Credit, deferred_credit, overlong_penalty, trajectory_credit, turn_credit
from learner.objectives.divergences import DIVERGENCES, Divergence, k1, k2, k3
from learner.objectives.imitation import cross_entropy
from learner.objectives.losses import (
    POLICY_LOSSES,
    PolicyLoss,
    Surrogate,
    cispo,
    decoupled_ppo,
    dppo,
    gspo,
    ppo_clip,
    reinforce,
)
from learner.objectives.policy import policy_objective
from learner.objectives.terms import Objective, Terms
from learner.objectives.values import ESTIMATORS, Estimate, Estimator, gae, value_loss, vtrace

AGGREGATIONS: dict[str, Callable[..., Aggregation]] = {
    "token_mean": token_mean,
    "sequence_mean_token_mean": sequence_mean_token_mean,
    "sequence_sum": sequence_sum,
}

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "DIVERGENCES",
    "ESTIMATORS",
    "POLICY_LOSSES",
    "Advantage",
    "Aggregation",
    "Correction",
    "Credit",
    "Divergence",
    "Estimate",
    "Estimator",
    "Objective",
    "PolicyLoss",
    "Surrogate",
    "Terms",
    "batch_mean",
    "cispo",
    "cross_entropy",
    "decoupled_ppo",
    "deferred_credit",
    "dppo",
    "dr_grpo",
    "gae",
    "geometric_rejection",
    "grpo",
    "gspo",
    "icepop",
    "k1",
    "k2",
    "k3",
    "overlong_penalty",
    "policy_objective",
    "ppo_clip",
    "reinforce",
    "rloo",
    "sequence_mean_token_mean",
    "sequence_sum",
    "token_mean",
    "trajectory_credit",
    "truncated_sequence",
    "truncated_token",
    "turn_credit",
    "value_loss",
    "vtrace",
]
