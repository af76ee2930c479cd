"""The learner's actor, called as any object: what it keeps for those who ask."""

from pathlib import Path

import pytest

from cluster import learner_actor
from cluster.learner_actor import LearnerActor
from cluster.loading import load_config
from cluster.publication import Broadcaster, ObjectStore
from learner.gang import Gang

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


class TwoSteps:
    """Stands for a learner that has started."""

    step = 2

    def run(self, total_steps, stop, on_step):
        for number in (1, 2):
            on_step({"step": number})

    def close(self):
        pass


@pytest.mark.parametrize(("index", "kept"), [(0, [{"step": 1}, {"step": 2}]), (1, [])])
def test_records_are_kept_by_the_process_that_is_polled_alone(monkeypatch, index, kept):
    monkeypatch.setattr(learner_actor, "join_gang", lambda coordinator, index, count: Gang(index, count))
    actor = LearnerActor(load_config(QUICKSTART))
    actor.join("nowhere:1", index, 2)
    actor._learner = TwoSteps()
    actor._broadcaster = Broadcaster(ObjectStore(), {}, timeout_seconds=1.0)
    assert actor.train() == 2
    assert actor.poll() == kept
