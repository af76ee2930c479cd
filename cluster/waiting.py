"""Waiting for actors: every wait has a deadline, and says for whom it waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

START_SECONDS = 600.0
"""Longest that an actor may take from its creation to its first answer: a node may have to start for it."""


class StartError(RuntimeError):
    """A service did not come up in time; the message names it."""


def wait_until_up(services: Mapping[str, Any], watch: Callable[[], None]) -> None:
    """Wait until every sampler or worker answers.

    Args:
        services: handles by name.
        watch: called every half second; whatever it raises ends the wait.

    Raises:
        StartError: one did not answer within ``START_SECONDS``.
    """
    answers = {handle.status.remote(): name for name, handle in services.items()}
    wait_for(list(answers), watch, seconds=START_SECONDS, whom=", ".join(services))


def wait_for(calls: Sequence[Any], watch: Callable[[], None], *, seconds: float, whom: str) -> list[Any]:
    """The answers of actor calls; the first failure is raised as soon as it happens.

    Raises:
        StartError: not all of ``whom`` answered within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    pending = list(calls)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=0.5)
        ray.get(done)
        watch()
        if pending and time.monotonic() > deadline:
            raise StartError(
                f"{whom} did not answer within {seconds:.0f} s; `ray status` says whether resources are missing"
            )
    answers: list[Any] = ray.get(list(calls))
    return answers


def answered(call: Any) -> bool:
    """Whether the answer to a call is there, be it an error."""
    return bool(ray.wait([call], timeout=0)[0])


def reason(error: RayError) -> str:
    """A failure in one line."""
    if isinstance(error, RayTaskError):
        return " ".join(str(error.cause).split()) or type(error.cause).__name__
    text = str(error)
    if isinstance(error, ActorDiedError) and "creation task" not in text:
        return "its process was killed, ran out of memory or crashed"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
