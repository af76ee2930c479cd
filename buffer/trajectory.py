"""The trajectory: the record of one episode, and the only thing actors send to the learner.

One flat token stream per trajectory. Text is never tokenised again (token-in,
token-out), so what the learner trains on is exactly what the policy sampled.

Axes: T = tokens of the trajectory, K = turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

NOT_SAMPLED = -1
"""The entry of ``versions`` where the policy did not sample the token."""


class Status(StrEnum):
    """How an episode ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    TIMEOUT = "timeout"
    ENV_ERROR = "env_error"
    TOOL_ERROR = "tool_error"
    SAMPLER_ERROR = "sampler_error"
    CANCELLED = "cancelled"

    @property
    def trainable(self) -> bool:
        """Whether the policy caused this ending: then it is data, otherwise it is discarded."""
        return self in (Status.COMPLETED, Status.TRUNCATED, Status.TOOL_ERROR)


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One episode as a flat token stream.

    Attributes:
        tokens: int32[T], everything the policy read or wrote, in order.
        loss_mask: bool[T], true where the policy sampled the token.
        logprobs: float32[T], behaviour log-probability; 0 where not sampled.
        versions: int32[T], policy version that sampled the token; ``NOT_SAMPLED`` elsewhere.
        rewards: float32[K], reward of each turn.
        reward: total reward of the episode.
        status: how the episode ended.
        task: position of the task in its task set.
        group: identifier of the slot (and so of the group) this trajectory belongs to.
        index: position within the group, 0 ≤ index < group size.
        sampler: name of the sampler that served the episode, or the names of those that did in turn.
        timings: seconds spent per phase, e.g. ``{"sampler": 1.2, "environment": 0.1}``.
        metadata: small JSON object for people and metrics; the learner does not train on it.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    rewards: np.ndarray
    reward: float
    status: Status
    task: int
    group: str
    index: int
    sampler: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name, dtype in _ARRAYS.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                raise ValueError(
                    f"Trajectory.{name} is {array.dtype}{list(array.shape)}; "
                    f"expected a 1-D {np.dtype(dtype)} array: convert it with np.asarray(x, {np.dtype(dtype)})"
                )
            if name != "rewards" and len(array) != length:
                raise ValueError(
                    f"Trajectory.{name} has {len(array)} entries but tokens has {length}; "
                    "every per-token array needs one entry per token"
                )
        if np.any((self.versions != NOT_SAMPLED) != self.loss_mask):
            raise ValueError(
                "Trajectory.versions must be -1 exactly where loss_mask is false; "
                "set the version of every sampled token"
            )

    @property
    def oldest_version(self) -> int:
        """Oldest policy version among the sampled tokens; ``NOT_SAMPLED`` if there is none."""
        sampled = self.versions[self.loss_mask]
        return int(sampled.min()) if len(sampled) else NOT_SAMPLED


_ARRAYS = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "rewards": np.float32,
}
