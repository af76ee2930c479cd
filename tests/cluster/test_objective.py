"""What the ``objective`` section becomes."""

import inspect
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from cluster.combinations import READ_BY
from cluster.loading import load_config
from cluster.objective import make_anchors, make_critic, make_objective, make_recipe, make_value_gradient
from cluster.objective_config import ObjectiveConfig
from learner.objectives import (
    ADVANTAGES,
    AGGREGATIONS,
    DIVERGENCES,
    ESTIMATORS,
    POLICY_LOSSES,
    deferred_credit,
    gspo,
    ppo_clip,
)

QUICKSTART = Path(__file__).parent.parent.parent / "configs" / "quickstart.yaml"


def load(*overrides: str):
    return load_config(QUICKSTART, overrides)


def bound(function) -> dict:
    """All arguments that a partial function was given, with the defaults of what it calls."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(function.func).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return defaults | function.keywords


@pytest.mark.parametrize(
    ("field", "registry"),
    [("name", POLICY_LOSSES), ("advantage", ADVANTAGES | ESTIMATORS), ("aggregation", AGGREGATIONS)],
)
def test_the_schema_offers_what_the_registries_hold(field, registry):
    assert set(ObjectiveConfig.model_fields[field].annotation.__args__) == set(registry)


def test_each_setting_goes_with_the_losses_that_take_it():
    for setting, losses in READ_BY.items():
        takers = {name for name, loss in POLICY_LOSSES.items() if setting in inspect.signature(loss).parameters}
        assert takers == set(losses), setting


def test_the_quickstart_trains_as_it_says():
    config = load()
    objective = make_objective(config.objective)
    assert objective.keywords["loss"].func is ppo_clip
    assert bound(objective.keywords["loss"])["clip_low"] == 0.2
    assert bound(objective.keywords["loss"])["clip_high"] == 0.28
    assert objective.keywords["aggregation"].unit == "token"
    assert (objective.keywords["entropy_bonus"], objective.keywords["entropy_cap"]) == (0.2, 0.5)
    assert objective.keywords["corrections"] == () and objective.keywords["divergence"] is None
    assert make_anchors(config.objective) == ()
    recipe = make_recipe(config)
    assert recipe.uninformative == "train", "its entropy bonus is a gradient"
    assert recipe.length_penalty is None and not recipe.mask_truncated


def test_a_loss_has_the_defaults_of_its_paper_until_it_is_told_otherwise():
    loss = make_objective(load("objective.name=gspo").objective).keywords["loss"]
    assert (loss.func, bound(loss)["clip_low"], bound(loss)["clip_high"]) == (gspo, 3e-4, 4e-4)
    loss = make_objective(load("objective.name=gspo", "objective.clip_low=0.1").objective).keywords["loss"]
    assert bound(loss)["clip_low"] == 0.1


def test_corrections_are_those_that_are_set():
    overrides = ("objective.icepop={low: 0.5, high: 5}", "objective.geometric={low: 0.9, high: 1.1}")
    names = [c.func.__name__ for c in make_objective(load(*overrides).objective).keywords["corrections"]]
    assert names == ["icepop", "geometric_rejection"]
    truncated = (*overrides, "objective.truncation={level: sequence, cap: 3}")
    corrections = make_objective(load(*truncated, "objective.name=reinforce").objective).keywords["corrections"]
    assert [c.func.__name__ for c in corrections] == [*names, "truncated_sequence"]
    assert corrections[-1].keywords == {"cap": 3.0}
    decoupled = make_objective(load(*truncated, "objective.name=decoupled_ppo").objective)
    assert len(decoupled.keywords["corrections"]) == 2
    assert decoupled.keywords["loss"].keywords["behaviour_weight"].func.__name__ == "truncated_sequence"


@pytest.mark.parametrize(
    ("overrides", "anchors"),
    [
        (["objective.name=decoupled_ppo"], ()),
        (["objective.name=decoupled_ppo", "objective.proximal=recomputed"], ("proximal",)),
        (
            ["objective.reference.weight=0.1", "objective.name=decoupled_ppo", "objective.proximal=recomputed"],
            ("proximal", "reference"),
        ),
        (["objective.advantage=gae"], ("proximal",)),
    ],
)
def test_only_what_is_read_is_scored(overrides, anchors):
    assert make_anchors(load(*overrides).objective) == anchors


MESH = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))


@pytest.mark.parametrize("advantage", ["gae", "vtrace"])
def test_values_bring_a_head_a_critic_and_a_loss_and_need_no_groups(advantage):
    config = load(f"objective.advantage={advantage}", "buffer.group_size=1", "objective.discount=0.9")
    assert make_objective(config.objective).keywords["value_weight"] == 0.5
    assert make_value_gradient(config.objective) == "trunk"
    critic, recipe = make_critic(config.objective, MESH), make_recipe(config)
    assert critic.estimator.func is ESTIMATORS[advantage]
    assert (critic.estimator.keywords["discount"], critic.estimator.keywords["decay"]) == (0.9, 0.95)
    assert recipe.credit is deferred_credit and not recipe.compares_batch
    settings = "objective.value={decay: 0.5, loss_weight: 2, gradient: head, normalise: false}"
    told = load(f"objective.advantage={advantage}", settings)
    assert make_objective(told.objective).keywords["value_weight"] == 2
    assert make_value_gradient(told.objective) == "head"
    assert make_critic(told.objective, MESH).estimator.keywords["decay"] == 0.5


def test_without_values_there_is_no_head():
    objective = load().objective
    assert make_objective(objective).keywords["value_weight"] == 0
    assert make_value_gradient(objective) is None and make_critic(objective, MESH) is None


@pytest.mark.parametrize(("name", "is_weighted"), [("reinforce", True), ("ppo_clip", False), ("decoupled_ppo", False)])
def test_importance_weighs_once(name, is_weighted):
    critic = make_critic(load("objective.advantage=vtrace", f"objective.name={name}").objective, MESH)
    assert critic.estimator.keywords["is_weighted"] == is_weighted


def test_a_reference_brings_its_divergence():
    objective = make_objective(load("objective.reference={weight: 0.1, divergence: k2}").objective)
    assert objective.keywords["divergence"] is DIVERGENCES["k2"]
    assert objective.keywords["divergence_weight"] == 0.1


@pytest.mark.parametrize(
    ("overrides", "uninformative", "extra"),
    [
        (["objective.entropy_bonus=0", "objective.entropy_cap=null"], "skip", 0),
        (["objective.entropy_bonus=0", "objective.entropy_cap=null", "objective.reference.weight=1"], "train", 0),
        (["objective.zero_variance=drop"], "drop", 0),
        (["objective.zero_variance=refill"], "refill", 2),
        (["objective.zero_variance=refill", "objective.refill_leases=1"], "refill", 1),
    ],
)
def test_groups_without_an_advantage_are_treated_as_told(overrides, uninformative, extra):
    recipe = make_recipe(load(*overrides))
    assert (recipe.uninformative, recipe.extra_leases) == (uninformative, extra)


def test_only_the_mean_of_the_batch_needs_the_whole_batch():
    assert make_recipe(load("objective.advantage=reinforce", "buffer.group_size=1")).compares_batch
    assert not make_recipe(load()).compares_batch


def test_overlong_trajectories_are_treated_as_told():
    assert make_recipe(load("objective.overlong.treatment=mask")).mask_truncated
    penalty = make_recipe(load("objective.overlong={treatment: penalty, buffer: 16}")).length_penalty
    assert [penalty(tokens) for tokens in (200, 208, 216)] == [0.0, 0.5, 1.0]
