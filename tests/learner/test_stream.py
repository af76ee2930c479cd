"""How advantages of turns reach the tokens."""

import numpy as np
import pytest

from learner.stream import spread

MASK = np.array([0, 1, 1, 0, 0, 1, 0, 1, 1], bool)


def test_every_sampled_token_gets_the_advantage_of_its_turn() -> None:
    spread_T = spread(np.float32([0.5, -1.0, 2.0]), MASK)
    np.testing.assert_array_equal(spread_T, np.float32([0, 0.5, 0.5, 0, 0, -1, 0, 2, 2]))


@pytest.mark.parametrize("turns", [2, 4])
def test_rewards_that_do_not_match_the_turns_are_refused(turns) -> None:
    with pytest.raises(ValueError, match=f"3 runs of sampled tokens, but there are rewards of {turns} turns"):
        spread(np.zeros(turns, np.float32), MASK)
