"""Weights on their way to samplers: what was published, and how a sampler knows that this is what arrived.

A publication is a manifest and the bytes that it describes, a part for each tensor. How the parts travel (Ray's object
store, shared memory, a folder) is the business of whoever carries them: a sampler sees a mapping, checks every part
against the manifest, and only then takes it. The digests are against accidents, not against forgery.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from xxhash import xxh3_64

from actors.samplers.contract import UpdateError

ALIGNMENT = 64
"""Bytes; what lies at multiples of it can become an array of a CPU device without a copy."""

_BFLOAT16_EXPONENT = np.uint16(0x7F80)
_CHUNK = 1 << 20
_THREADS = min(4, os.cpu_count() or 1)
"""NumPy and XXH3 let go of Python's lock."""


class Entry(NamedTuple):
    """One tensor of a manifest.

    Attributes:
        shape: of the tensor, in a Hugging Face checkpoint.
        dtype: its name, such as ``bfloat16``.
        order: whether its last (``C``) or its first (``F``) axis is the one that lies together in the bytes.
        digest: XXH3 of the bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    order: Literal["C", "F"]
    digest: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a publication holds.

    Attributes:
        version: the policy version.
        tensors: by Hugging Face name.
    """

    version: int
    tensors: Mapping[str, Entry]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())


@dataclass(frozen=True, slots=True, eq=False)
class Publication:
    """One version of the weights.

    Attributes:
        manifest: what they are.
        parts: uint8[N], the bytes of each tensor by name, as its entry describes them.
    """

    manifest: Manifest
    parts: Mapping[str, np.ndarray]

    @classmethod
    def of(
        cls, version: int, weights: Mapping[str, np.ndarray], into: Mapping[str, np.ndarray] | None = None
    ) -> Publication:
        """Publish arrays under their Hugging Face names; they are not copied if they lie together, in either order.

        Args:
            version: the policy version.
            weights: tensors by name.
            into: uint8[N] for each tensor, where its bytes are copied to on the way: those are then the parts.

        Raises:
            UpdateError: a value is not finite.
        """
        parts, entries = {}, {}
        for name, value in weights.items():
            order: Literal["C", "F"] = "F" if value.flags.f_contiguous and value.ndim > 1 else "C"
            parts[name] = np.asarray(value, order=order).reshape(-1, order=order).view(np.uint8)
            entries[name] = (value.shape, value.dtype.name, order)
        with ThreadPoolExecutor(_THREADS) as threads:
            digests = threads.map(partial(_checked_digest, weights, into), parts, parts.values())
            tensors = {name: Entry(*entries[name], digest) for name, digest in zip(parts, digests, strict=True)}
        return cls(Manifest(version, tensors), parts if into is None else into)


def verified(publication: Publication) -> dict[str, np.ndarray]:
    """The weights by name, over the memory of their parts, after all of these were compared with the manifest.

    Raises:
        UpdateError: a part is missing, unknown, of another size or another digest, or cannot be read; or this is no
            publication.
    """
    if not isinstance(publication, Publication):
        raise UpdateError(f"the weights come as {type(publication).__name__}; expected a Publication: make one of them")
    version, tensors, parts = publication.manifest.version, publication.manifest.tensors, publication.parts
    remedy = f"version {version} did not arrive as it was sent: publish it again"
    for problem, names in (
        ("is missing", tensors.keys() - parts.keys()),
        ("is not in the manifest", parts.keys() - tensors.keys()),
    ):
        if names:
            raise UpdateError(f"tensor {min(names)} {problem} ({len(names)} in all); {remedy}")
    arrived = {}
    for name, entry in tensors.items():
        try:
            part = arrived[name] = parts[name]
        except (OSError, SafetensorError) as error:
            raise UpdateError(
                f"version {version} cannot be read here ({error}): is this on the machine, or does it see the folder, "
                "that it was published to?"
            ) from error
        if part.nbytes != entry.nbytes:
            raise UpdateError(f"tensor {name} has {part.nbytes} bytes; expected {entry.nbytes}: {remedy}")
    arrays = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = threads.map(_digest, arrived.values())
        for (name, entry), digest in zip(tensors.items(), digests, strict=True):
            if digest != entry.digest:
                raise UpdateError(f"tensor {name} has digest {digest:016x}; expected {entry.digest:016x}: {remedy}")
            arrays[name] = arrived[name].view(jnp.dtype(entry.dtype)).reshape(entry.shape, order=entry.order)
    return arrays


class SegmentParts(Mapping[str, np.ndarray]):
    """Parts in a file of shared memory, mapped when they are first read. Pickled, it is the file's path."""

    def __init__(self, path: Path, spans: Mapping[str, slice]) -> None:
        """Parts in ``path``, each at its span of bytes."""
        self._path, self._spans = path, spans
        self._memory: np.ndarray | None = None

    def __reduce__(self) -> tuple[type[SegmentParts], tuple[Path, Mapping[str, slice]]]:
        return SegmentParts, (self._path, self._spans)

    def __getitem__(self, name: str) -> np.ndarray:
        if self._memory is None:
            file = self._path.stat()
            self._memory = _mapped(self._path, file.st_ino, file.st_size)
        return self._memory[self._spans[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


@lru_cache(maxsize=2)  # segments take turns, and a new mapping has the kernel look up every page again
def _mapped(path: Path, inode: int, size: int) -> np.ndarray:
    return np.memmap(path, np.uint8, mode="r", shape=(size,)).view(np.ndarray)


class FolderParts(Mapping[str, np.ndarray]):
    """Parts in the safetensors file of a checkpoint folder, which servers other than ours load by themselves.

    Attributes:
        folder: the checkpoint folder.
    """

    def __init__(self, folder: Path, file: str, names: frozenset[str]) -> None:
        """Parts ``names`` in ``file`` of ``folder``."""
        self.folder, self._file, self._names = folder, file, names

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        with safe_open(self.folder / self._file, "np") as file:
            value: np.ndarray = file.get_tensor(name)
        return value.reshape(-1).view(np.uint8)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _digest(part: np.ndarray) -> int:
    return xxh3_64(part.data).intdigest()


def _checked_digest(
    weights: Mapping[str, np.ndarray], into: Mapping[str, np.ndarray] | None, name: str, part: np.ndarray
) -> int:
    """XXH3 of a part whose values are finite, and its copy, in pieces that stay in a core's cache for all three."""
    digest, dtype = xxh3_64(), weights[name].dtype
    for start in range(0, len(part), _CHUNK):
        chunk = part[start : start + _CHUNK]
        digest.update(chunk.data)
        if into is not None:
            into[name][start : start + _CHUNK] = chunk
        if jnp.issubdtype(dtype, jnp.floating) and not _is_finite(chunk.view(dtype)):
            raise UpdateError(f"tensor {name} holds values that are not finite; expected finite weights")
    return digest.intdigest()


def _is_finite(chunk: np.ndarray) -> bool:
    if chunk.dtype == jnp.bfloat16:  # whose own isfinite takes twenty times as long
        exponents = chunk.view(np.uint16) & _BFLOAT16_EXPONENT
        return bool((exponents != _BFLOAT16_EXPONENT).all())
    return bool(np.isfinite(chunk).all())
