"""The lease: one batch, or one shard of it, in the hands of the learner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from buffer.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class Lease:
    """A batch of complete groups, in the order of the run, that is the learner's until it acks or releases it.

    Each process of a gang holds one shard of the same lease; the one with shard 0 acks the whole.

    Attributes:
        epoch: epoch of the learner gang that holds it.
        version: policy version that the batch is to be trained with; staleness was judged by it.
        id: identifier of the lease, the same for all shards.
        shard: which shard this is, from 0.
        shards: into how many the batch is cut; no group is in two of them.
        batch: the groups of the whole batch and the shard of each.
        groups: the trajectories of each group of this shard, ordered by index.
        corrections: float64[G], for each of these groups the importance-sampling weight that makes a weighted mean over
            the batch an unbiased estimate of the plain mean over what was ready; 1 unless the order is ``priority``.
        mean_correction: mean of those of the whole batch, all shards.
    """

    epoch: int
    version: int
    id: str
    shard: int
    shards: int
    batch: dict[str, int]
    groups: list[list[Trajectory]]
    corrections: np.ndarray
    mean_correction: float = 1.0

    @property
    def group_ids(self) -> list[str]:
        """Identifier of each group of this shard."""
        return [group[0].group for group in self.groups]

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories of this shard, group by group."""
        return [trajectory for group in self.groups for trajectory in group]

    @cached_property
    def staleness(self) -> np.ndarray:
        """int64[N], versions between the oldest sampled token of each trajectory and ``version``."""
        return np.array([self.version - trajectory.oldest_version for trajectory in self.trajectories], np.int64)

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of the shard, in versions; 0 if it is empty."""
        return float(self.staleness.mean()) if len(self.staleness) else 0.0

    @property
    def staleness_max(self) -> int:
        """Largest staleness in the shard, in versions; 0 if it is empty."""
        return int(self.staleness.max(initial=0))
