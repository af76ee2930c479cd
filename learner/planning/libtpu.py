"""The TPU compiler on a machine without a TPU: how it is loaded, and the devices of a slice as it describes them."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from typing import TYPE_CHECKING

from learner.planning.chips import PlanError, Topology

if TYPE_CHECKING:
    import jax


def prepare(topology: Topology) -> None:
    """Make this process compile for TPUs and compute on its CPU; call it before anything imports JAX.

    Raises:
        PlanError: libtpu is not installed, or JAX is in use already.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError(
            "headrace plan needs libtpu, the TPU compiler, which is not installed: pip install 'headrace[tpu]', or run "
            "`make plan`"
        )
    if "jax" in sys.modules and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise PlanError("JAX is loaded already; a plan is made in a process of its own")
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # no device is opened
        "TPU_ACCELERATOR_TYPE": topology.accelerator_type,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
    }


def describe_devices(topology: Topology) -> list[jax.Device]:
    """The devices of a slice; programs can be compiled for them, and nothing else.

    Raises:
        PlanError: libtpu knows no such slice.
    """
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies

    # Without its torus links a slice of cubes is compiled as a mesh, and all-gathers become all-reduces.
    wrap = (*topology.wraps, False)[:3]
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=str(topology), wrap=wrap).devices
    except JaxRuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise PlanError(f"plan.topology={topology}: the TPU compiler knows no such slice ({reason})") from error
    return list(devices)


def bytes_wanted(message: str, arguments: float) -> float | None:
    """What a program would take of a device's memory, by the compiler's message that it does not fit; else None.

    Args:
        message: of the compiler, which counts all that the program holds, or its temporaries alone.
        arguments: bytes of the program's arguments.
    """
    units = {"G": 2**30, "M": 2**20}
    if match := re.search(r"Used ([\d.]+)([GM]) of [\d.]+[GM] hbm", message):
        return float(match[1]) * units[match[2]]
    if match := re.search(r"HLO temporaries \(([\d.]+)([GM])\) exceeds available HBM", message):
        return float(match[1]) * units[match[2]] + arguments
    return None
