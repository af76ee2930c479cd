"""The buffer: the only way from actors to the learner.

Redis holds it; a small set of Lua scripts makes each transition atomic. It admits work, forms groups, enforces
staleness, leases batches, and accounts for every group, whatever crashes.

``AsyncBuffer`` is the client of the rollout workers, ``Buffer`` that of everybody who may block, such as the learner,
and ``EmbeddedRedis`` a server for machines that have none.
"""

from buffer.async_client import AsyncBuffer
from buffer.client import Buffer, runs_in
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
from buffer.limits import Limits, Order
from buffer.protocol import OUTCOMES, Commit, Failure, GroupInfo, Slot, State, Stats
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
    "Failure",
    "Fenced",
    "FormatError",
    "GroupInfo",
    "Lease",
    "Limits",
    "NotOpen",
    "Order",
    "PortInUse",
    "ServerError",
    "Slot",
    "State",
    "Stats",
    "Status",
    "Trajectory",
    "WaitTimeout",
    "decode",
    "encode",
    "runs_in",
]
