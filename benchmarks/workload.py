"""What is moved: the same trajectories, as many at a time, for every contender."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from buffer import NOT_SAMPLED, Status, Trajectory, encode

GROUP_SIZE = 8
"""Trajectories in one write call: a group of headrace, a pipeline of the other contenders."""

BATCH_GROUPS = 8
"""Groups in one lease."""

MAX_GROUPS = 32
"""Bound on the groups that are written and not yet consumed: the same back-pressure for every contender."""

_BYTES_PER_TOKEN = 13
_TURNS = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """Trajectories of one size.

    Attributes:
        kilobytes: size of one encoded trajectory; 1 KB is 1000 bytes.
        writers: processes that write.
        seed: of everything drawn.
    """

    kilobytes: int
    writers: int
    seed: int

    def examples(self, writer: int) -> list[Trajectory]:
        """Return a group of this size for ``writer``, to be ``stamped`` as often as it writes one."""
        rng = np.random.default_rng([self.seed, writer])
        return [random_trajectory(1000 * self.kilobytes, rng) for _ in range(GROUP_SIZE)]


def random_trajectory(size: int, rng: np.random.Generator) -> Trajectory:
    """Return a trajectory that takes ``size`` bytes when it is encoded, or a few less. Half of it is sampled."""
    overhead = len(encode(_trajectory(0, rng)))
    return _trajectory(max(2, (size - overhead) // _BYTES_PER_TOKEN), rng)


def stamped(examples: list[Trajectory], group: str, task: int, version: int) -> list[Trajectory]:
    """Return ``examples`` as the members of ``group``, all of them sampled by policy ``version``."""
    return [
        replace(
            of_example,
            versions=np.where(of_example.loss_mask, np.int32(version), np.int32(NOT_SAMPLED)),
            task=task,
            group=group,
            index=index,
        )
        for index, of_example in enumerate(examples)
    ]


def _trajectory(tokens: int, rng: np.random.Generator) -> Trajectory:
    mask_T = np.arange(tokens) % 2 == 1
    return Trajectory(
        tokens=rng.integers(0, 150_000, tokens, dtype=np.int32),
        loss_mask=mask_T,
        logprobs=np.where(mask_T, -rng.random(tokens, dtype=np.float32), np.float32(0)),
        versions=np.where(mask_T, np.int32(0), np.int32(NOT_SAMPLED)),
        rewards=np.zeros(_TURNS, np.float32),
        reward=1.0,
        status=Status.COMPLETED,
        task=0,
        group="0" * 32,
        index=0,
        sampler="benchmark",
        timings={"sampler": 1.25, "environment": 0.25},
    )
