"""Who may enter an engine, and who waits for room."""

from __future__ import annotations

import pytest

from actors.samplers.admission import Admission, checked_tokens_in_flight


def _admission(*tokens: int, most: int = 100) -> Admission[str]:
    admission: Admission[str] = Admission(most)
    for name, held in zip("abcdefgh", tokens, strict=False):
        admission.join(name, held, deadline=10.0)
    return admission


def test_requests_enter_in_turn_until_the_next_does_not_fit() -> None:
    admission = _admission(60, 40, 1)
    assert list(admission.enter()) == ["a", "b"]
    assert (admission.tokens, len(admission)) == (100, 1)
    admission.leave(40)
    assert list(admission.enter()) == ["c"]
    assert (admission.tokens, len(admission)) == (61, 0)


def test_nobody_small_overtakes_somebody_large() -> None:
    admission = _admission(60, 50, 1)
    assert list(admission.enter()) == ["a"]
    assert list(admission.enter()) == []
    admission.leave(60)
    assert list(admission.enter()) == ["b", "c"]


def test_the_longest_request_enters_when_everybody_has_left() -> None:
    admission = _admission(1, 100)
    assert list(admission.enter()) == ["a"]
    admission.leave(1)
    assert list(admission.enter()) == ["b"]


def test_who_waited_too_long_or_went_away_is_no_longer_in_line() -> None:
    admission = _admission(100, 50, 50, 50)
    assert list(admission.enter()) == ["a"]
    admission.join("z", 1, deadline=5.0)
    assert admission.late(4.0) == []
    assert admission.late(6.0) == ["z"]
    admission.withdraw("b")
    admission.withdraw("b")
    assert admission.clear() == ["c", "d"]
    assert (admission.tokens, len(admission)) == (100, 0)


def test_the_bound_is_what_the_cache_holds_and_no_less_than_one_request() -> None:
    assert checked_tokens_in_flight(None, slots=3, context_length=50) == 150
    assert checked_tokens_in_flight(50, slots=3, context_length=50) == 50
    with pytest.raises(ValueError, match="tokens_in_flight is 49; expected at least the context length of 50"):
        checked_tokens_in_flight(49, slots=3, context_length=50)
