"""From leased groups to examples."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from buffer import NOT_SAMPLED, Lease, Status, Trajectory
from learner.objectives import (
    deferred_credit,
    dr_grpo,
    overlong_penalty,
    sequence_mean_token_mean,
    token_mean,
    trajectory_credit,
)
from learner.recipe import Recipe, combine_facts, spread

MASK = np.array([0, 1, 1, 0, 0, 1, 0, 1, 1], bool)
CREDIT = partial(trajectory_credit, advantage=dr_grpo)


def trajectory(
    reward: float, *, size: int = 6, group: str = "a", index: int = 0, status=Status.COMPLETED
) -> Trajectory:
    mask = np.arange(size) >= 2
    return Trajectory(
        tokens=np.arange(size, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=np.where(mask, 3, NOT_SAMPLED).astype(np.int32),
        rewards=np.array([reward], np.float32),
        reward=reward,
        status=status,
        task=0,
        group=group,
        index=index,
    )


def lease(*groups: list[Trajectory], version: int = 4) -> Lease:
    return Lease(
        epoch=1,
        version=version,
        id=str(version),
        shard=0,
        shards=1,
        batch={str(i): 0 for i in range(len(groups))},
        groups=list(groups),
        corrections=np.ones(len(groups)),
    )


def recipe(**settings) -> Recipe:
    return Recipe(**{"credit": CREDIT, "divisor_of": token_mean().divisor_of} | settings)


def advantages(prepared) -> list[float]:
    return [float(example.advantages[-1]) for example in prepared.examples]


USEFUL = [trajectory(0.0), trajectory(1.0)]
EQUAL = [trajectory(1.0, size=5), trajectory(1.0, size=8)]


def test_every_sampled_token_gets_the_advantage_of_its_turn() -> None:
    spread_T = spread(np.float32([0.5, -1.0, 2.0]), MASK)
    np.testing.assert_array_equal(spread_T, np.float32([0, 0.5, 0.5, 0, 0, -1, 0, 2, 2]))


@pytest.mark.parametrize("turns", [2, 4])
def test_rewards_that_do_not_match_the_turns_are_refused(turns) -> None:
    with pytest.raises(ValueError, match=f"3 runs of sampled tokens, but there are rewards of {turns} turns"):
        spread(np.zeros(turns, np.float32), MASK)


@pytest.mark.parametrize(
    ("uninformative", "aggregation", "examples", "skipped"),
    [
        ("train", token_mean(), 4, 0),
        ("skip", token_mean(), 2, 3 + 6),
        ("skip", sequence_mean_token_mean(), 2, 2),
        ("drop", token_mean(), 2, 0),
        ("refill", token_mean(), 2, 0),
    ],
)
def test_what_becomes_of_a_group_of_equal_rewards(uninformative, aggregation, examples, skipped) -> None:
    prepared = recipe(uninformative=uninformative, divisor_of=aggregation.divisor_of).prepare([lease(USEFUL, EQUAL)])
    assert advantages(prepared)[:2] == [-0.5, 0.5]
    assert (len(prepared.examples), prepared.skipped_divisor) == (examples, skipped)
    assert prepared.informative_groups == prepared.facts["zero_variance_groups"] == 1
    assert prepared.facts["skipped_tokens"] == (0 if uninformative == "train" else 9)


def test_a_refill_ends_when_the_batch_is_full_or_the_leases_are_spent() -> None:
    refill = recipe(uninformative="refill", extra_leases=2)

    def wants_more(*leases: Lease) -> bool:
        return refill.wants_more(leases, refill.prepare(leases))

    poor, rich = lease(USEFUL, EQUAL), lease(USEFUL, USEFUL, version=5)
    assert not wants_more(rich)
    assert wants_more(poor)
    assert not wants_more(poor, rich)
    assert wants_more(lease(EQUAL, EQUAL), poor)
    assert not wants_more(lease(EQUAL, EQUAL), lease(EQUAL, EQUAL), lease(EQUAL, EQUAL))
    drop = recipe(uninformative="drop", extra_leases=2)
    assert not drop.wants_more([poor], drop.prepare([poor]))


def test_a_batch_of_several_leases_is_judged_by_the_version_that_trains_it() -> None:
    facts = recipe().prepare([lease(USEFUL, EQUAL), lease(USEFUL, version=5)]).facts
    assert (facts["leases"], facts["trajectories"]) == (2, 6)
    assert facts["staleness_mean"] == facts["staleness_max"] == 1


def test_a_truncated_trajectory_is_left_out_and_still_sets_the_baseline() -> None:
    group = [trajectory(0.0, status=Status.TRUNCATED), trajectory(1.0), trajectory(2.0)]
    prepared = recipe(mask_truncated=True).prepare([lease(group)])
    assert advantages(prepared) == [0.0, 1.0]
    assert prepared.facts["masked_trajectories"] == 1
    assert advantages(recipe().prepare([lease(group)])) == [-1.0, 0.0, 1.0]


def test_a_group_whose_only_advantage_is_left_out_says_nothing() -> None:
    group = [trajectory(0.0, status=Status.TRUNCATED), trajectory(1.0, status=Status.TRUNCATED)]
    prepared = recipe(mask_truncated=True).prepare([lease(group)])
    assert (prepared.examples, prepared.informative_groups, prepared.skipped_divisor) == ([], 0, 0.0)


def test_the_length_penalty_is_taken_from_the_reward_and_not_from_the_facts() -> None:
    group = [trajectory(1.0, size=6), trajectory(1.0, size=9), trajectory(1.0, size=10)]
    penalty = partial(overlong_penalty, limit=10, buffer=2)
    prepared = recipe(length_penalty=penalty).prepare([lease(group)])
    np.testing.assert_allclose(advantages(prepared), [0.5, 0.0, -0.5])
    assert prepared.facts["reward_mean"] == 1.0


def test_with_a_value_head_examples_carry_rewards_and_weights_and_none_is_uninformative() -> None:
    group = [trajectory(1.0, size=6), trajectory(1.0, size=9, status=Status.TRUNCATED)]
    drawn = replace(lease(group), corrections=np.array([3.0]), mean_correction=2.0)
    penalty = partial(overlong_penalty, limit=10, buffer=2)
    prepared = recipe(credit=deferred_credit, length_penalty=penalty).prepare([drawn])
    assert (prepared.informative_groups, prepared.facts["zero_variance_groups"]) == (1, 0)
    whole, cut = prepared.examples
    assert (whole.is_cut, cut.is_cut) == (False, True)
    np.testing.assert_array_equal(whole.rewards, [0, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(cut.rewards, [0, 0, *[0.5] * 7])
    np.testing.assert_array_equal(whole.advantages, [0, 0, *[1.5] * 4])


def test_a_group_that_was_drawn_against_the_odds_weighs_its_correction() -> None:
    drawn = replace(lease(USEFUL, USEFUL), corrections=np.array([1.0, 3.0]), mean_correction=2.0)
    assert advantages(recipe().prepare([drawn])) == [-0.25, 0.25, -0.75, 0.75]


def test_the_order_in_which_groups_come_changes_nothing() -> None:
    groups = [[replace(member, task=task) for member in group] for task, group in enumerate((USEFUL, USEFUL[::-1]))]
    there, back = (recipe().prepare([lease(*order)]) for order in (groups, groups[::-1]))
    assert [e.tokens.tobytes() for e in there.examples] == [e.tokens.tobytes() for e in back.examples]
    assert advantages(there) == advantages(back)


def test_facts_about_shards_make_those_about_the_batch() -> None:
    shards = [recipe().prepare([lease(USEFUL)]).facts, recipe().prepare([lease(USEFUL, USEFUL)]).facts]
    whole = recipe().prepare([lease(USEFUL, USEFUL, USEFUL)]).facts
    assert combine_facts(shards) == pytest.approx(whole)
    empty = recipe().prepare([lease()]).facts
    assert combine_facts([*shards, empty]) == pytest.approx(whole)
