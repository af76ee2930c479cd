"""The wire format of a trajectory: a fixed header, raw little-endian arrays, and a little JSON at the end.

Nothing in it is ever executed, every size is checked before it is used, and a checksum covers
every byte. Decoding copies nothing: the arrays are views of the bytes that were received.

Layout (T = tokens, K = turns, M = bytes of JSON)::

    header     32 bytes   magic, format number, 0, T, K, M, 0, XXH3 (64 bits) of all other bytes
    tokens      4*T       int32     four-byte arrays first, so that all of them are aligned
    logprobs    4*T       float32
    versions    4*T       int32
    rewards     4*K       float32
    loss_mask     T       one byte each, 0 or 1
    JSON          M       everything else

The checksum is XXH3: it is against accidents, not against forgery, and reads memory at the speed of memory.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
from xxhash import xxh3_64

from buffer.errors import FormatError
from buffer.trajectory import Status, Trajectory

FORMAT = 2
"""Number of the format that this module writes, and the only one it reads."""

MAX_METADATA_BYTES = 1 << 20
"""Most bytes of JSON in one trajectory: metadata is for people and metrics, not for data."""

MAX_PAYLOAD_BYTES = 256 << 20
"""Most bytes of one trajectory: Redis drops a connection that sends twice as much in one value."""

_MAGIC = b"HDRT"
_HEADER = struct.Struct("<4sHHIIIIQ")
_CHECKSUM_AT = _HEADER.size - 8


def encode(trajectory: Trajectory) -> bytes:
    """Return the bytes of ``trajectory``.

    Raises:
        ValueError: the metadata is not JSON or is larger than ``MAX_METADATA_BYTES``.
    """
    metadata = _encode_metadata(trajectory)
    parts: list[Any] = [
        np.ascontiguousarray(trajectory.tokens, "<i4"),
        np.ascontiguousarray(trajectory.logprobs, "<f4"),
        np.ascontiguousarray(trajectory.versions, "<i4"),
        np.ascontiguousarray(trajectory.rewards, "<f4"),
        np.ascontiguousarray(trajectory.loss_mask, np.bool_),
        metadata,
    ]
    header = _HEADER.pack(_MAGIC, FORMAT, 0, len(trajectory.tokens), len(trajectory.rewards), len(metadata), 0, 0)
    header = header[:_CHECKSUM_AT]
    checksum = xxh3_64(header)
    for part in parts:
        checksum.update(part)
    return b"".join([header, struct.pack("<Q", checksum.intdigest()), *parts])


def decode(payload: bytes | bytearray | memoryview) -> Trajectory:
    """Return the trajectory in ``payload``, its arrays being read-only views of it.

    Raises:
        FormatError: ``payload`` is of another format, truncated, damaged, or no trajectory at all.
    """
    view = memoryview(payload).toreadonly().cast("B")
    tokens, turns, json_bytes = _read_header(view)
    at = _HEADER.size

    def array(count: int, dtype: str) -> np.ndarray:
        nonlocal at
        values = np.frombuffer(view, dtype, count, at)
        at += values.nbytes
        return values

    tokens_T = array(tokens, "<i4")
    logprobs_T = array(tokens, "<f4")
    versions_T = array(tokens, "<i4")
    rewards_K = array(turns, "<f4")
    mask_T = array(tokens, "u1")
    if mask_T.max(initial=0) > 1:
        raise FormatError(f"a loss mask holds the byte {mask_T.max()}, expected 0 or 1: discard this payload")
    metadata = bytes(view[at : at + json_bytes])
    try:
        fields = json.loads(metadata)
        return Trajectory(
            tokens=tokens_T,
            loss_mask=mask_T.view(np.bool_),
            logprobs=logprobs_T,
            versions=versions_T,
            rewards=rewards_K,
            reward=float(fields["reward"]),
            status=Status(fields["status"]),
            task=int(fields["task"]),
            group=str(fields["group"]),
            index=int(fields["index"]),
            sampler=str(fields["sampler"]),
            timings=dict(fields["timings"]),
            metadata=dict(fields["metadata"]),
        )
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise FormatError(
            f"a payload of {len(view)} bytes with a valid checksum is no trajectory ({type(error).__name__}: {error}): "
            "it was not written by buffer.codec.encode; discard it"
        ) from error


def _encode_metadata(trajectory: Trajectory) -> bytes:
    fields: dict[str, Any] = {
        "reward": float(trajectory.reward),
        "status": str(trajectory.status),
        "task": int(trajectory.task),
        "group": trajectory.group,
        "index": int(trajectory.index),
        "sampler": trajectory.sampler,
        "timings": trajectory.timings,
        "metadata": trajectory.metadata,
    }
    try:
        encoded = json.dumps(fields, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"the metadata or timings of trajectory {trajectory.index} of group {trajectory.group} are not JSON "
            f"({error}): use only str, int, float, bool, None, list and dict (float(x) for a NumPy scalar)"
        ) from error
    if len(encoded) > MAX_METADATA_BYTES:
        raise ValueError(
            f"the metadata of trajectory {trajectory.index} of group {trajectory.group} takes {len(encoded)} bytes; "
            f"at most {MAX_METADATA_BYTES} are allowed: keep large data out of metadata"
        )
    return encoded


def _read_header(view: memoryview) -> tuple[int, int, int]:
    """Check everything that can be checked before the body is read; return (T, K, M)."""
    if len(view) < _HEADER.size:
        raise FormatError(
            f"a payload has {len(view)} bytes, a trajectory at least {_HEADER.size}: it is truncated; discard it"
        )
    magic, number, reserved, tokens, turns, json_bytes, more, checksum = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        raise FormatError(f"a payload starts with {magic!r}, a trajectory with {_MAGIC!r}: discard it")
    if number != FORMAT:
        raise FormatError(
            f"a payload has format number {number}, this version of headrace reads {FORMAT}: "
            "use one version of headrace for all workers and the learner of a run"
        )
    expected = _HEADER.size + 13 * tokens + 4 * turns + json_bytes
    if len(view) != expected or reserved or more or json_bytes > MAX_METADATA_BYTES:
        raise FormatError(
            f"a payload has {len(view)} bytes, its header announces {expected} ({tokens} tokens, {turns} turns, "
            f"{json_bytes} bytes of metadata): it is truncated or damaged; discard it"
        )
    actual = xxh3_64(view[:_CHECKSUM_AT])
    actual.update(view[_HEADER.size :])
    if actual.intdigest() != checksum:
        raise FormatError(
            f"a payload of {len(view)} bytes has checksum {actual.intdigest():016x}, its header says {checksum:016x}: "
            "it is damaged; discard it"
        )
    return tokens, turns, json_bytes
