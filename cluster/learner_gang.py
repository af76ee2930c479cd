"""The learner gang: the processes that train one policy, one per host, as Ray actors.

JAX runs one program on all of them, so whatever works on the devices is asked of every one, in the same order. What
only looks or makes files is asked of the first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from cluster.config import ArchitectureConfig, Config
from cluster.learner_actor import CONCURRENT_CALLS, LearnerActor
from cluster.ray_runtime import actor_environment, local_ray
from cluster.waiting import START_SECONDS, wait_for
from learner.learner import Record

CLOSE_SECONDS = 5.0
"""Longest that the processes may take to let go of what they hold."""


class LearnerGang:
    """Handles of the actors, and the calls that a run makes. A call returns Ray references to what they answer."""

    def __init__(self, config: Config, run: str, *, role: str = "learner", every_core: bool = False) -> None:
        """Create ``learner.processes`` actors, spread over the nodes; :meth:`join` waits for them.

        Args:
            config: of the run.
            run: its name, with which the names of the actors begin.
            role: the rest of their names; followed by a number if there are several.
            every_core: nothing else runs meanwhile, so that on a Ray of our own they may use every core.
        """
        settings = config.learner
        count = settings.processes
        share = (os.cpu_count() or 1) / count if every_core and local_ray() else settings.cpus
        self._names = [f"{run}/{role}" if count == 1 else f"{run}/{role}-{i}" for i in range(count)]
        options: dict[str, Any] = {
            "num_cpus": settings.cpus,
            "resources": settings.resources,
            "max_concurrency": CONCURRENT_CALLS,
            "scheduling_strategy": "DEFAULT" if count == 1 else "SPREAD",
            "runtime_env": actor_environment(share, devices=settings.mesh.size // count),
        }
        self._actors: list[Any] = [
            ray.remote(LearnerActor).options(name=name, **options).remote(config) for name in self._names
        ]

    def join(self, watch: Callable[[], None]) -> None:
        """Wait until the processes have found each other; comes before every other call.

        Raises:
            StartError: a process did not come up within ``START_SECONDS``.
        """
        [coordinator] = wait_for([self._actors[0].address.remote()], watch, seconds=START_SECONDS, whom=self._names[0])
        count = len(self._actors)
        joining = [actor.join.remote(coordinator, index, count) for index, actor in enumerate(self._actors)]
        # On TPUs the hardware says which process is the first.
        places = wait_for(joining, watch, seconds=START_SECONDS, whom=", ".join(self._names))
        self._actors = [actor for _, actor in sorted(zip(places, self._actors, strict=True), key=lambda pair: pair[0])]

    def make_model(self, architecture: ArchitectureConfig, folder: Path) -> Any:
        """See :meth:`LearnerActor.make_model`; done by the first."""
        return self._actors[0].make_model.remote(architecture, folder)

    def imitate(self, *arguments: Any) -> list[Any]:
        """See :meth:`LearnerActor.imitate`."""
        return [actor.imitate.remote(*arguments) for actor in self._actors]

    def start(self, *arguments: Any, **named: Any) -> list[Any]:
        """See :meth:`LearnerActor.start`; all give the same step."""
        return [actor.start.remote(*arguments, **named) for actor in self._actors]

    def train(self) -> list[Any]:
        """See :meth:`LearnerActor.train`."""
        return [actor.train.remote() for actor in self._actors]

    def outcome(self, training: list[Any], timeout_seconds: float) -> int:
        """The steps made, of a training that has ended in at least one of the processes.

        Raises:
            ActorDiedError: a process died, even if another failed before for want of it.
            RayError: a process failed, even if another waits for it; or one goes on for longer than
                ``timeout_seconds``.
        """
        ray.wait(training, num_returns=len(training), timeout=timeout_seconds)
        errors: list[RayError] = []
        steps: list[int] = []
        for ending in training:
            try:
                steps.append(ray.get(ending, timeout=0))
            except RayError as error:
                errors.append(error)
        if errors:
            raise min(errors, key=_distance)
        return steps[0]

    def lacks_one(self, training: list[Any]) -> bool:
        """Whether one of several processes failed by itself: the others can neither finish the step in hand nor save.

        That is known of one that died, and of one that failed while others, given time, did not end.
        """
        ended, going_on = ray.wait(training, num_returns=len(training), timeout=0)
        for ending in ended:
            try:
                ray.get(ending)
            except ActorDiedError:
                return len(training) > 1
            except RayError:
                if going_on:
                    return True
        return False

    def write_model(self, folder: Path) -> list[Any]:
        """See :meth:`LearnerActor.write_model`."""
        return [actor.write_model.remote(folder) for actor in self._actors]

    def write_adapter(self, folder: Path) -> list[Any]:
        """See :meth:`LearnerActor.write_adapter`."""
        return [actor.write_adapter.remote(folder) for actor in self._actors]

    def admit_sampler(self, name: str, sampler: Any) -> Any:
        """See :meth:`LearnerActor.admit_sampler`; done by the first, which publishes."""
        return self._actors[0].admit_sampler.remote(name, sampler)

    def dismiss_sampler(self, name: str) -> Any:
        """See :meth:`LearnerActor.dismiss_sampler`."""
        return self._actors[0].dismiss_sampler.remote(name)

    def stop(self) -> None:
        """Have them end what they do after the step in hand."""
        for actor in self._actors:
            actor.stop.remote()

    def poll(self, timeout_seconds: float) -> list[Record]:
        """The records of the steps made since the last call.

        Raises:
            RayError: the first process does not answer, or is dead.
        """
        records: list[Record] = ray.get(self._actors[0].poll.remote(), timeout=timeout_seconds)
        return records

    def close(self) -> None:
        """Have them let go of what they hold outside of their processes; who is dead or stuck leaves it."""
        closing = [actor.close.remote() for actor in self._actors]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)

    def kill(self) -> None:
        """End the processes at once."""
        for actor in self._actors:
            ray.kill(actor)


def _distance(error: RayError) -> int:
    """From the cause: a death is one, a failure may come of a death, and who does not answer waits for either."""
    return 0 if isinstance(error, ActorDiedError) else 2 if isinstance(error, GetTimeoutError) else 1
