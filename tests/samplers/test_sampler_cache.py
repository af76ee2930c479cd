"""Where a prompt goes in the slotted cache."""

from __future__ import annotations

import numpy as np
import pytest
from sampler_examples import CONFIG

from actors.samplers.local.cache import Placement, SlotCache

SYSTEM = list(range(20))


@pytest.fixture
def cache() -> SlotCache:
    return SlotCache(CONFIG, slots=3, context_length=64, padding=1)


def _run(cache: SlotCache, tokens: list[int], *, cached: int | None = None, finished: bool = True) -> int:
    """A request with these tokens in the end, all but the last of which have keys."""
    prompt = np.array(tokens, np.int32)
    placement = cache.place(prompt)
    assert placement is not None
    cache.take(placement, prompt)
    cache.cached_S[placement.slot] = len(tokens) - 1 if cached is None else cached
    if finished:
        cache.release(placement.slot)
    return placement.slot


def test_the_next_turn_continues_in_its_own_slot(cache: SlotCache) -> None:
    _run(cache, [1, 2, 3, 9, 9])
    slot = _run(cache, [1, 2, 3, 4, 5])
    _run(cache, [7, 7])
    assert cache.place(np.array([1, 2, 3, 4, 5, 6, 7])) == Placement(slot, reused=4, donor=None)


def test_the_last_token_of_a_prompt_is_always_run(cache: SlotCache) -> None:
    slot = _run(cache, [1, 2, 3, 4], cached=4)
    placement = cache.place(np.array([1, 2, 3, 4]))
    assert placement is not None and placement.reused <= 3
    assert cache.place(np.array([1, 2, 3, 4, 5])) == Placement(slot, reused=4, donor=None)


def test_a_sibling_starts_from_a_copy_and_leaves_the_donor_alone(cache: SlotCache) -> None:
    donor = _run(cache, [*SYSTEM, 30, 31, 32])
    placement = cache.place(np.array([*SYSTEM, 35, 36]))
    assert placement is not None
    assert placement.slot != donor
    assert (placement.reused, placement.donor) == (len(SYSTEM), donor)


def test_a_running_request_can_be_a_donor(cache: SlotCache) -> None:
    donor = _run(cache, [*SYSTEM, 30], finished=False)
    placement = cache.place(np.array([*SYSTEM, 35]))
    assert placement is not None and placement.donor == donor and placement.slot != donor


def test_members_of_a_group_wait_for_the_first_to_prefill_their_prompt(cache: SlotCache) -> None:
    slot = _run(cache, [*SYSTEM, 30], cached=0, finished=False)
    sibling = np.array([*SYSTEM, 30], np.int32)
    assert cache.place(sibling) is None
    assert cache.place(np.array([5, 4, 3])) is not None
    cache.cached_S[slot] = len(SYSTEM) + 1
    placement = cache.place(sibling)
    assert placement is not None and (placement.reused, placement.donor) == (len(SYSTEM), slot)


def test_without_an_empty_slot_the_one_free_for_longest_goes(cache: SlotCache) -> None:
    slots = [_run(cache, [token] * 6) for token in (1, 2, 3)]
    assert sorted(slots) == [0, 1, 2]
    placement = cache.place(np.array([5, 5, 5]))
    assert placement == Placement(slots[0], reused=0, donor=None)


def test_no_slot_is_given_twice(cache: SlotCache) -> None:
    slots = {_run(cache, [token] * 6, finished=False) for token in (1, 2, 3)}
    assert slots == {0, 1, 2}
    assert cache.place(np.array([9])) is None


def test_forgotten_keys_are_reused_by_their_owner_alone(cache: SlotCache) -> None:
    _run(cache, [*SYSTEM, 30])
    running = _run(cache, [*SYSTEM, 31], finished=False)
    cache.forget()
    assert (cache.length_S[running], cache.cached_S[running]) == (21, 20)
    prompt = np.array([*SYSTEM, 31, 32])
    placement = cache.place(prompt)
    assert placement is not None and (placement.reused, placement.donor) == (0, None)
    cache.release(running)
    placement = cache.place(prompt)
    assert placement is not None and (placement.reused, placement.donor) == (0, None)


def test_a_slot_is_of_use_again_once_new_weights_filled_it(cache: SlotCache) -> None:
    unstarted = _run(cache, [*SYSTEM, 31], cached=0, finished=False)
    outdated = _run(cache, [7, 8, 9], finished=False)
    _run(cache, [5, 6], finished=False)
    cache.forget()
    cache.release(outdated)
    assert cache.place(np.array([*SYSTEM, 32])) is None, "a prefill that has not begun is worth waiting for"
    cache.cached_S[unstarted] = 21
    placement = cache.place(np.array([*SYSTEM, 32]))
    assert placement is not None and (placement.reused, placement.donor) == (20, unstarted)
    assert _run(cache, [7, 8, 9, 10]) == outdated
    assert cache.place(np.array([7, 8, 9, 10, 11])) == Placement(outdated, reused=3, donor=None)
