"""The gang: the processes that train one model together, each on its own host, all running the same program.

What they do on the devices must happen in the same order in each, so agreement is made in one thread only, and every
process takes part. The first process leads: it alone talks to samplers and decides for the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

_MOST_NUMBERS = 64
"""That are gathered at a time."""


@dataclass(frozen=True, slots=True)
class Gang:
    """This process's place among all.

    Attributes:
        index: of this process, from 0.
        count: of processes.
    """

    index: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that decides."""
        return self.index == 0

    def gather(self, numbers: Sequence[int]) -> np.ndarray:
        """int64[count, len(numbers)]: what each process says; all must pass equally many."""
        said = np.asarray(numbers, np.int64)
        if self.count == 1:
            return said[None]
        # 64-bit numbers would be cut to 32 on the devices.
        halves = np.concatenate([_wide(said >> 32), _wide(said & 0xFFFFFFFF)]).astype(np.uint32)
        high, low = np.split(multihost_utils.process_allgather(halves).astype(np.int64), 2, axis=1)
        whole: np.ndarray = (high.astype(np.int32).astype(np.int64) << 32) | low
        return whole[:, : len(said)]

    def gather_floats(self, numbers: Sequence[float]) -> np.ndarray:
        """float32[count, len(numbers)]: what each process says; all must pass equally many."""
        said = np.asarray(numbers, np.float32)
        if self.count == 1:
            return said[None]
        gathered: np.ndarray = multihost_utils.process_allgather(_wide(said))
        return gathered[:, : len(said)]

    def follow(self, numbers: Sequence[int]) -> list[int]:
        """What the process that leads says."""
        return [int(number) for number in self.gather(numbers)[0]]


def join_gang(coordinator: str, index: int, count: int) -> Gang:
    """Join the gang; returns when every process has.

    Must come before anything else that uses devices.

    Args:
        coordinator: ``host:port`` on which the process of index 0 listens.
        index: of this process.
        count: of processes.

    Returns:
        The place of this process. On TPUs it is that of its host in the slice, whatever ``index`` is.
    """
    if count == 1:
        return Gang()
    jax.distributed.initialize(coordinator, num_processes=count, process_id=index)
    return Gang(jax.process_index(), jax.process_count())


def _wide(numbers: np.ndarray) -> np.ndarray:
    """Always of the same length, so that it is compiled once."""
    return np.pad(numbers, (0, _MOST_NUMBERS - len(numbers)))


def digest(text: str) -> int:
    """A number by which processes compare texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
