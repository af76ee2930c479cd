"""From the ``objective`` section to the functions it names."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from cluster.config import Config
from cluster.objective_config import BandConfig, ObjectiveConfig, ValueConfig
from cluster.sampler_names import sampler_number
from learner.critic import Critic
from learner.learner import Anchor
from learner.models.value_head import ValueGradient
from learner.objectives import (
    ADVANTAGES,
    AGGREGATIONS,
    DIVERGENCES,
    ESTIMATORS,
    POLICY_LOSSES,
    Aggregation,
    Correction,
    Credit,
    Objective,
    deferred_credit,
    geometric_rejection,
    icepop,
    overlong_penalty,
    policy_objective,
    trajectory_credit,
    truncated_sequence,
    truncated_token,
    turn_credit,
)
from learner.recipe import Recipe, Uninformative


def make_objective(config: ObjectiveConfig) -> Objective:
    """What the training step minimises."""
    settings: dict[str, Any] = {
        "clip_low": config.clip_low,
        "clip_high": config.clip_high,
        "dual_clip": config.dual_clip,
        "divergence": config.divergence,
        "proximal": config.proximal,
    }
    corrections: list[Correction] = [partial(reject, low=band.low, high=band.high) for reject, band in _bands(config)]
    if config.truncation is not None:
        truncate = truncated_token if config.truncation.level == "token" else truncated_sequence
        weight: Correction = partial(truncate, cap=config.truncation.cap)
        if config.name == "decoupled_ppo":  # it holds a weight already, of its proximal policy
            settings["behaviour_weight"] = weight
        else:
            corrections.append(weight)
    # What is null is left to the loss, whose defaults are those of its paper.
    loss = partial(POLICY_LOSSES[config.name], **{k: v for k, v in settings.items() if v is not None})
    reference = config.reference
    return partial(
        policy_objective,
        loss=loss,
        aggregation=_aggregation(config),
        corrections=tuple(corrections),
        divergence=None if reference is None else DIVERGENCES[reference.divergence],
        divergence_weight=0.0 if reference is None else reference.weight,
        entropy_bonus=config.entropy_bonus,
        entropy_cap=math.inf if config.entropy_cap is None else config.entropy_cap,
        value_weight=_value(config).loss_weight if has_value_head(config) else 0.0,
    )


def make_recipe(config: Config) -> Recipe:
    """What becomes of leased groups."""
    objective = config.objective
    extra = objective.refill_leases or config.buffer.max_staleness
    return Recipe(
        credit=_credit(objective),
        divisor_of=_aggregation(objective).divisor_of,
        compares_batch=objective.advantage == "reinforce",
        uninformative=_uninformative(objective),
        extra_leases=extra if objective.zero_variance == "refill" else 0,
        mask_truncated=objective.overlong.treatment == "mask",
        length_penalty=_length_penalty(config),
        sampler_number=sampler_number,
    )


def make_anchors(config: ObjectiveConfig) -> tuple[Anchor, ...]:
    """Policies whose log-probabilities the objective reads."""
    anchors: list[Anchor] = []
    if has_value_head(config) or (config.name == "decoupled_ppo" and config.proximal == "recomputed"):
        anchors.append("proximal")
    if config.reference is not None:
        anchors.append("reference")
    return tuple(anchors)


def has_value_head(config: ObjectiveConfig) -> bool:
    """Whether advantages come from the values of states."""
    return config.advantage in ESTIMATORS


def make_value_gradient(config: ObjectiveConfig) -> ValueGradient | None:
    """How far the gradient of the value loss flows; None for a model without a value head."""
    return _value(config).gradient if has_value_head(config) else None


def make_critic(config: ObjectiveConfig, mesh: Mesh) -> Critic | None:
    """What finds advantages by values; None where the recipe finds them by groups."""
    if not has_value_head(config):
        return None
    settings: dict[str, Any] = {"discount": config.discount, "decay": _value(config).decay}
    if config.advantage == "vtrace":
        settings["is_weighted"] = config.name == "reinforce"  # the others hold an importance ratio themselves
    return Critic(mesh, partial(ESTIMATORS[config.advantage], **settings), normalise=_value(config).normalise)


def _value(config: ObjectiveConfig) -> ValueConfig:
    return config.value or ValueConfig()


def _bands(config: ObjectiveConfig) -> list[tuple[Callable[..., jax.Array], BandConfig]]:
    bands = ((icepop, config.icepop), (geometric_rejection, config.geometric))
    return [(reject, band) for reject, band in bands if band is not None]


def _aggregation(config: ObjectiveConfig) -> Aggregation:
    aggregation = AGGREGATIONS[config.aggregation]
    return aggregation() if config.sequence_tokens is None else aggregation(config.sequence_tokens)


def _credit(config: ObjectiveConfig) -> Credit:
    if has_value_head(config):
        return deferred_credit
    advantage = ADVANTAGES[config.advantage]
    if config.credit == "turn":
        return partial(turn_credit, advantage=advantage, discount=config.discount)
    return partial(trajectory_credit, advantage=advantage)


def _uninformative(config: ObjectiveConfig) -> Uninformative:
    if config.zero_variance != "keep":
        return config.zero_variance
    # By its entropy or its distance from the reference, a group without advantage still has a gradient.
    return "train" if config.entropy_bonus or config.reference is not None else "skip"


def _length_penalty(config: Config) -> Callable[[int], float] | None:
    overlong = config.objective.overlong
    if overlong.treatment != "penalty" or overlong.buffer is None:  # combinations see to it that it has one
        return None
    limit = config.sampler.context_length if overlong.limit is None else overlong.limit
    return partial(overlong_penalty, limit=limit, buffer=overlong.buffer)
