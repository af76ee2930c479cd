"""Publication to the sampler pool: how weights travel, and who has acknowledged them.

The pool may change at any time. A sampler that is admitted gets the current version, and every later one; nobody waits
any longer for one that is dismissed.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from actors.samplers.checkpoints import PublishedCheckpoints
from actors.samplers.publication import ALIGNMENT, Publication, SegmentParts
from cluster.sampler_config import SHARED_MEMORY, SamplerConfig
from cluster.waiting import reason
from learner.publisher import BroadcastError


class Transport(Protocol):
    """Brings publications to where samplers can read them."""

    def ship(self, version: int, weights: Mapping[str, np.ndarray]) -> Any:
        """What to hand to every sampler's ``update``: a publication, or a Ray reference to one.

        What an earlier call returned stays readable until every sampler has acknowledged a later version.

        Raises:
            UpdateError: the weights are not finite.
            OSError: there is no room for them.
        """
        ...

    def close(self) -> None:
        """Let go of what is held outside of this process."""
        ...


class ObjectStore:
    """Ray's object store: one copy for each node, fetched by nodes from each other."""

    def ship(self, version: int, weights: Mapping[str, np.ndarray]) -> Any:
        """As ``Transport.ship``."""
        return ray.put(Publication.of(version, weights))

    def close(self) -> None:
        """Nothing is held."""


class SharedFolder:
    """A folder that every node sees; also how servers other than ours get weights."""

    def __init__(self, folder: Path, model: Path) -> None:
        """Publish under ``folder``, as checkpoints like the one in ``model``."""
        self._checkpoints = PublishedCheckpoints(folder, model)

    def ship(self, version: int, weights: Mapping[str, np.ndarray]) -> Any:
        """As ``Transport.ship``."""
        return self._checkpoints.write(version, weights)

    def close(self) -> None:
        """Remove what was published: who has acknowledged it reads it no more."""
        self._checkpoints.remove()


class SharedMemory:
    """Memory of this host, for samplers that all run on it; those of one process serve from it without a copy.

    Two segments take turns: while one is read, the next version is written to the other, so that the operating system
    has no new pages to clear.
    """

    def __init__(self, run: str, folder: Path = SHARED_MEMORY) -> None:
        """Make segments in ``folder``, whose names begin with that of the run; those that an earlier start left go."""
        self._prefix = folder / f"headrace-{run}"
        for left in folder.glob(f"{self._prefix.name}-*"):
            left.unlink()
        self._numbers = itertools.count()
        self._segments: list[tuple[Path, np.ndarray]] = []

    def ship(self, version: int, weights: Mapping[str, np.ndarray]) -> Any:
        """As ``Transport.ship``."""
        spans, end = {}, 0
        for name, value in weights.items():
            spans[name] = slice(end, end + value.nbytes)
            end += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        path, memory = self._segment(end)
        publication = Publication.of(version, weights, {name: memory[span] for name, span in spans.items()})
        self._segments.append(self._segments.pop(0))  # what fails before here is still the next one's turn
        return Publication(publication.manifest, SegmentParts(path, spans))

    def close(self) -> None:
        """Remove the segments; a sampler that serves from one keeps it in memory."""
        for path, _ in self._segments:
            with suppress(FileNotFoundError):
                path.unlink()
        self._segments.clear()

    def _segment(self, size: int) -> tuple[Path, np.ndarray]:
        """The first of the segments, the one before the last shipped if it is as large: nobody reads it any more."""
        if len(self._segments) == 2:
            path, memory = self._segments[0]
            if memory.nbytes == size:
                return path, memory
            path.unlink()
            del self._segments[0]
        path = self._prefix.with_name(f"{self._prefix.name}-{next(self._numbers)}")
        with path.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)  # a write where there is no room would kill the process
            except OSError as error:
                path.unlink()
                raise OSError(
                    error.errno, f"{path.parent} has no room for {size} bytes of weights; make room"
                ) from error
        memory = np.memmap(path, np.uint8, mode="r+", shape=(size,)).view(np.ndarray)
        self._segments.insert(0, (path, memory))
        return path, memory


def make_transport(config: SamplerConfig, run: str, model_folder: Path) -> Transport:
    """The transport that ``sampler.transport`` names, for the run of that name."""
    if config.weights_folder is not None:
        return SharedFolder(config.weights_folder / run, model_folder)  # versions of other runs are none of ours
    return SharedMemory(run) if config.transport == "shared_memory" else ObjectStore()


class _Shipment(NamedTuple):
    version: int
    contents: Any


class Broadcaster:
    """Publishes to every living sampler of the pool; see ``learner.publisher.Broadcast``."""

    def __init__(self, transport: Transport, samplers: Mapping[str, Any], *, timeout_seconds: float) -> None:
        """Make a broadcaster.

        Args:
            transport: how weights travel.
            samplers: Ray handles of those in the pool, by name.
            timeout_seconds: longest wait for the acknowledgements of one version.
        """
        self._transport, self._timeout = transport, timeout_seconds
        self._lock = threading.Lock()
        self._samplers = dict(samplers)
        self._shipment: _Shipment | None = None

    def __call__(self, version: int, weights: Mapping[str, np.ndarray]) -> None:
        """Hand ``weights`` to every sampler and wait until all that live serve ``version``; safe to repeat.

        Raises:
            BroadcastError: a sampler refused or did not acknowledge in time; the message names it.
        """
        shipment = self._shipment
        if shipment is None or shipment.version != version:
            shipment = _Shipment(version, self._transport.ship(version, weights))
        with self._lock:  # whom it does not reach from here, admit brings it to
            self._shipment, samplers = shipment, dict(self._samplers)
        sent = {name: sampler.update.remote(shipment.contents) for name, sampler in samplers.items()}
        ray.wait(list(sent.values()), num_returns=len(sent), timeout=self._timeout)
        for name, acknowledgement in sent.items():
            try:
                self._acknowledged(name, version, acknowledgement)
            except BroadcastError as error:
                # The dead never come back; who takes their place is admitted with the version current then.
                if self._has(name, samplers[name]) and not isinstance(error.__cause__, ActorDiedError):
                    raise

    def admit(self, name: str, sampler: Any) -> int:
        """Take a sampler into the pool; returns the version that it serves then, -1 before the first publication.

        Raises:
            BroadcastError: it refused the current version or did not acknowledge it in time; it is not in the pool.
        """
        with self._lock:
            self._samplers[name], shipment = sampler, self._shipment
        while shipment is not None:
            acknowledgement = sampler.update.remote(shipment.contents)
            ray.wait([acknowledgement], timeout=self._timeout)
            try:
                return self._acknowledged(name, shipment.version, acknowledgement)
            except BroadcastError:
                # What was superseded in the meantime may have been overwritten while it was read.
                with self._lock:
                    superseded, shipment = self._shipment is not shipment, self._shipment
                    if not superseded:
                        self._samplers.pop(name, None)
                        raise
        return -1

    def dismiss(self, name: str) -> None:
        """Take a sampler out of the pool; no publication waits for it from now on."""
        with self._lock:
            self._samplers.pop(name, None)

    def close(self) -> None:
        """Let go of what was published."""
        self._transport.close()

    def _has(self, name: str, sampler: Any) -> bool:
        with self._lock:
            return self._samplers.get(name) is sampler

    def _acknowledged(self, name: str, version: int, acknowledgement: Any) -> int:
        try:
            return int(ray.get(acknowledgement, timeout=0))
        except GetTimeoutError as error:
            raise BroadcastError(
                f"sampler {name} did not acknowledge version {version} within {self._timeout:g} s; raise "
                "learner.publish_timeout_seconds if it needs longer"
            ) from error
        except RayError as error:  # the sampler refused, died, or its node did
            raise BroadcastError(f"sampler {name} did not take version {version}: {reason(error)}") from error
