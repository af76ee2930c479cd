"""What a gang of learners says of how its training ended."""

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from cluster.learner_gang import LearnerGang

GOES_ON, FAILED, DIED = GetTimeoutError("not ready"), RayError("its shard is damaged"), ActorDiedError()


@pytest.fixture
def gang(monkeypatch):
    """A gang without processes; endings stand for Ray's references to them."""

    def get(ending, timeout):
        if isinstance(ending, Exception):
            raise ending
        return ending

    monkeypatch.setattr(ray, "wait", lambda endings, num_returns, timeout: (endings, []))
    monkeypatch.setattr(ray, "get", get)
    return object.__new__(LearnerGang)


def test_all_make_the_same_steps(gang):
    assert gang.outcome([7, 7], 1.0) == 7


@pytest.mark.parametrize(
    ("endings", "told"),
    [
        ([GOES_ON, FAILED], FAILED),
        ([FAILED, GOES_ON], FAILED),
        ([FAILED, DIED], DIED),
        ([GOES_ON, DIED], DIED),
        ([7, GOES_ON], GOES_ON),
    ],
)
def test_the_cause_is_told_and_not_that_others_wait_for_it(gang, endings, told):
    with pytest.raises(RayError) as caught:
        gang.outcome(endings, 1.0)
    assert caught.value is told
