"""Ray for the length of one run: the cluster we were given, or one of our own that nobody else can reach.

Ray reads most of its settings when it is imported, so they are set first and Ray is imported late.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import RayUnavailable

CONNECT_TIMEOUT_SECONDS = 10.0
"""Longest that the head of an existing cluster may take to accept a connection."""

OBJECT_STORE_BYTES = 16 << 30
"""Bound on the shared memory of a local Ray, which holds up to three versions of the weights, taken as they need it."""
OBJECT_STORE_SHARE = 0.3
"""The same, as a share of this machine's memory."""

HEAD_PORT = 6379
"""Port of a Ray head unless its address says otherwise."""


@dataclass(frozen=True, slots=True)
class RayRuntime:
    """The Ray that a run uses.

    Attributes:
        address: ``host:port`` of the cluster's control store.
        local: whether it was started here and ends with the run.
        cpus: CPUs of the cluster.
        session_folder: where its logs are, on the machine of the head.
    """

    address: str
    local: bool
    cpus: int
    session_folder: str


@contextmanager
def ray_runtime(*, cpus: float, dashboard: bool, metrics_port: int) -> Iterator[RayRuntime]:
    """Connect to the cluster named by ``RAY_ADDRESS`` (set inside a submitted job), or start a local Ray.

    A local Ray listens on loopback only, asks for a token that only this process and its children
    know, and is shut down at the end of the block, whatever ends it.

    Args:
        cpus: CPUs that the run asks for; a local Ray hands out that many even where there are fewer, since its
            CPUs are tickets and the actors of one run share the machine as well as any processes do.
        dashboard: whether a local Ray runs its dashboard.
        metrics_port: Prometheus port of a local Ray; 0 takes a free one.

    Raises:
        RayUnavailable: nobody answers at ``RAY_ADDRESS``.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    local = local_ray()
    set_ray_environment()
    if not local and address != "auto":
        _probe(address)

    import ray

    try:
        if local:
            _start(max(os.cpu_count() or 1, math.ceil(cpus)), dashboard, metrics_port)
        else:
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except ConnectionError as error:
                raise RayUnavailable(_unanswered(address, " ".join(str(error).split()))) from error
        context = ray.get_runtime_context()
        yield RayRuntime(
            address=context.gcs_address,
            local=local,
            cpus=int(ray.cluster_resources().get("CPU", 1)),
            session_folder=ray.nodes()[0]["ObjectStoreSocketName"].rpartition("/sockets/")[0],
        )
    finally:
        ray.shutdown()


def _object_store_bytes() -> int:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = min(OBJECT_STORE_BYTES, int(OBJECT_STORE_SHARE * memory))
    # Containers often have little of it, and Ray would take a disk instead.
    return min(most, max(shutil.disk_usage("/dev/shm").free, 1 << 27)) if os.path.isdir("/dev/shm") else most


def _start(cpus: int, dashboard: bool, metrics_port: int) -> None:
    """Start a local Ray, if need be twice: it gives itself 30 seconds, which a busy machine can miss."""
    import ray

    for attempt in (1, 2):
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=dashboard,
                object_store_memory=_object_store_bytes(),
                log_to_driver=False,
                logging_level=logging.ERROR,
                _metrics_export_port=metrics_port or None,
            )
            return
        except Exception as error:  # Ray raises no narrower one
            if attempt == 2 or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


def actor_environment(cpus: float, *, devices: int = 1) -> dict[str, Any]:
    """Runtime environment of an actor that runs JAX on so many CPUs, at least one; see :func:`jax_environment`."""
    return {"env_vars": jax_environment(max(1, round(cpus)), devices=devices)}


def jax_environment(threads: int, *, devices: int = 1) -> dict[str, str]:
    """Environment of a process that runs JAX on ``threads`` threads of a CPU, where it sees so many devices.

    XLA sizes its pools by the machine, and two processes that each use every core slow each other down. Memory stays
    at its peak (with glibc's allocator), and what is compiled is kept for the next run, unless the user's environment
    says otherwise.
    """
    # XLA allocates its scratch anew on every call. glibc would map and unmap it each time, and much of a small model's
    # time would go into page faults: let it keep what it once had, in one arena for all threads.
    allocator = {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_TOP_PAD_": str(64 << 20),  # what is asked of the system at once
    }
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # A CPU is one device unless one asks for more; accelerators are as many as there are.
    simulated = f"--xla_force_host_platform_device_count={devices}" if devices > 1 else ""
    compiled = {"JAX_COMPILATION_CACHE_DIR": str(cache / "headrace" / "compiled")}
    return {
        **{name: os.environ.get(name, value) for name, value in (allocator | compiled).items()},
        "NPROC": str(threads),  # XLA's thread pools
        "OMP_NUM_THREADS": str(threads),
        "XLA_FLAGS": " ".join(
            [os.environ.get("XLA_FLAGS", ""), f"--xla_cpu_multi_thread_eigen={str(threads > 1).lower()}", simulated]
        ).strip(),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def set_ray_environment() -> None:
    """Set what Ray reads when it is imported: call this before anything imports it. What is set already stays.

    A Ray that we start belongs to this process alone; one at ``RAY_ADDRESS`` brings its own settings.
    """
    if not local_ray():
        return
    settings = {
        "RAY_AUTH_MODE": "token",
        # In the environment and not in Ray's token file, which would turn authentication on for clusters of others.
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Despite its name: with clusters disabled, Ray takes 127.0.0.1 for the address of this node on any system.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def local_ray() -> bool:
    """Whether a run starts a Ray of its own, rather than joining the one at ``RAY_ADDRESS``."""
    return os.environ.get("RAY_ADDRESS", "") in ("", "local")


def _probe(address: str) -> None:
    """Ray retries a dead address for minutes; a plain connection tells at once."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        host, port = port, str(HEAD_PORT)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise RayUnavailable(_unanswered(address, str(error))) from error


def _unanswered(address: str, why: str) -> str:
    return (
        f"RAY_ADDRESS={address}: no Ray head answers ({why}); start one with `ray start --head`, "
        "or unset RAY_ADDRESS to use a Ray of our own"
    )
