"""Publication in order, with bounded retries."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

from learner.models.weights import to_hf
from learner.publisher import BroadcastError, PublicationError, Publisher


class Samplers:
    """Stands where the samplers are; fails as often as told, and waits at a gate."""

    def __init__(self, failures: int = 0) -> None:
        self.gate, self.failures = threading.Event(), failures
        self.gate.set()
        self.events: list[tuple[str, int]] = []
        self.weights: dict[str, np.ndarray] = {}

    def __call__(self, version: int, weights) -> None:
        assert self.gate.wait(30)
        if self.failures:
            self.failures -= 1
            self.events.append(("failed", version))
            raise BroadcastError("sampler left-0 did not acknowledge in 5 s")
        self.events.append(("sent", version))
        self.weights = weights

    def announce(self, version: int):
        return lambda: self.events.append(("announced", version))

    def acknowledge(self, version: int):
        return lambda: self.events.append(("acknowledged", version))


@pytest.fixture
def weights(model, params):
    return partial(to_hf, model, params)


def make_publisher(samplers, *, attempts: int = 3, timeout_seconds: float = 30.0) -> Publisher:
    return Publisher(samplers, attempts=attempts, backoff_seconds=0.001, timeout_seconds=timeout_seconds)


def test_the_buffer_learns_of_a_version_after_the_samplers_and_in_order(weights) -> None:
    samplers = Samplers()
    publisher = make_publisher(samplers)
    for version in range(4):
        publisher.publish(
            version,
            weights,
            announce=samplers.announce(version),
            acknowledge=samplers.acknowledge(version),
        )
    publisher.flush()
    assert samplers.events == [
        (what, version) for version in range(4) for what in ("announced", "sent", "acknowledged")
    ]
    for name, tensor in weights().items():
        np.testing.assert_array_equal(samplers.weights[name], tensor)
    publisher.close()


def test_publication_runs_beside_its_caller_but_never_more_than_two(weights) -> None:
    samplers = Samplers()
    samplers.gate.clear()
    publisher = make_publisher(samplers, timeout_seconds=0.05)
    publisher.publish(1, weights, announce=samplers.announce(1), acknowledge=samplers.acknowledge(1))
    publisher.publish(2, weights, announce=samplers.announce(2), acknowledge=samplers.acknowledge(2))
    assert ("sent", 1) not in samplers.events
    with pytest.raises(PublicationError, match=r"version 1 is not published after 0\.05 s"):
        publisher.publish(3, weights, announce=samplers.announce(3), acknowledge=samplers.acknowledge(3))
    samplers.gate.set()
    publisher.close()


def test_a_sampler_that_fails_once_is_tried_again(weights) -> None:
    samplers = Samplers(failures=1)
    publisher = make_publisher(samplers)
    publisher.publish(1, weights, announce=samplers.announce(1), acknowledge=samplers.acknowledge(1))
    publisher.flush()
    assert samplers.events == [("announced", 1), ("failed", 1), ("sent", 1), ("acknowledged", 1)]
    publisher.close()


def test_a_sampler_that_keeps_failing_is_named_and_the_buffer_is_not_told(weights) -> None:
    samplers = Samplers(failures=9)
    publisher = make_publisher(samplers, attempts=2)
    publisher.publish(1, weights, announce=samplers.announce(1), acknowledge=samplers.acknowledge(1))
    with pytest.raises(PublicationError, match=r"version 1 could not be published in 2 attempts: sampler left-0"):
        publisher.flush()
    assert samplers.events == [("announced", 1), ("failed", 1), ("failed", 1)]
    publisher.close()


def test_an_error_of_the_buffer_reaches_the_learner(weights) -> None:
    def refuse() -> None:
        raise ValueError("fenced")

    publisher = make_publisher(Samplers())
    publisher.publish(1, weights, announce=lambda: None, acknowledge=refuse)
    with pytest.raises(ValueError, match="fenced"):
        publisher.flush()
    publisher.close()
