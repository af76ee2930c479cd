"""The buffer: the only way from actors to the learner.

Redis holds it; a small set of Lua scripts makes each transition atomic. It admits work, forms groups, enforces
staleness, leases batches, and accounts for every group, whatever crashes.

``AsyncBuffer`` is the side of the rollout workers, ``Buffer`` that of the learner, and ``EmbeddedRedis`` a server
for machines that have none.
"""

from buffer.async_client import AsyncBuffer
from buffer.client import Buffer
from buffer.codec import decode, encode
from buffer.errors import (
    BufferError,
    BufferFull,
    BufferUnavailable,
    Fenced,
    FormatError,
    NotOpen,
    PortInUse,
    ServerError,
    WaitTimeout,
)
from buffer.lease import Lease
from buffer.protocol import OUTCOMES, Commit, Limits, Slot, Stats
from buffer.server import EmbeddedRedis
from buffer.trajectory import NOT_SAMPLED, Status, Trajectory

__all__ = [
    "NOT_SAMPLED",
    "OUTCOMES",
    "AsyncBuffer",
    "Buffer",
    "BufferError",
    "BufferFull",
    "BufferUnavailable",
    "Commit",
    "EmbeddedRedis",
    "Fenced",
    "FormatError",
    "Lease",
    "Limits",
    "NotOpen",
    "PortInUse",
    "ServerError",
    "Slot",
    "Stats",
    "Status",
    "Trajectory",
    "WaitTimeout",
    "decode",
    "encode",
]
