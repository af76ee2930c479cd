"""The lease: one batch in the hands of the learner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from buffer.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class Lease:
    """A batch of complete groups, oldest first, that is the learner's until it acks or releases it.

    Attributes:
        epoch: epoch of the learner gang that holds it.
        version: policy version that the batch is to be trained with; staleness was judged by it.
        groups: the trajectories of each group, ordered by index.
    """

    epoch: int
    version: int
    groups: list[list[Trajectory]]

    @property
    def group_ids(self) -> list[str]:
        """Identifier of each group."""
        return [group[0].group for group in self.groups]

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories, group by group."""
        return [trajectory for group in self.groups for trajectory in group]

    @cached_property
    def staleness(self) -> np.ndarray:
        """int64[N], versions between the oldest sampled token of each trajectory and ``version``."""
        return np.array([self.version - trajectory.oldest_version for trajectory in self.trajectories])

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of the batch, in versions."""
        return float(self.staleness.mean())

    @property
    def staleness_max(self) -> int:
        """Largest staleness in the batch, in versions."""
        return int(self.staleness.max())
