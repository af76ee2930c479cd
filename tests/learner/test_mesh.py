"""Meshes: refused ones, and eight simulated devices against one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from sharded import NAMES

from learner.mesh import MeshError, check_processes, make_mesh


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["2x2x2"], id="2x2x2"),
        # It compiles a dozen programs for eight devices.
        pytest.param(list(NAMES), id="all", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_eight_devices_give_the_loss_gradient_and_five_steps_of_one(names: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("sharded.py"), *names],
        cwd=Path(__file__).parents[2],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == [f"{name} equal" for name in names]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 1000, "fsdp": 1}, "mesh 1000x1x1 needs 1000 devices"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(model, axes, message) -> None:
    with pytest.raises(MeshError, match=message):
        make_mesh(model, **axes)


@pytest.mark.parametrize(
    ("change", "axes", "message"),
    [
        ({"hidden_size": 15}, {"fsdp": 2}, "hidden_size=15 cannot be split over fsdp=2"),
        ({}, {"fsdp": 1, "tensor": 4}, "num_key_value_heads=2 cannot be split over tensor=4"),
        ({"vocab_size": 23}, {"fsdp": 1, "tensor": 2}, "vocab_size=23 cannot be split over tensor=2"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(model, change, axes, message) -> None:
    odd = dataclasses.replace(model, **change)
    with pytest.raises(MeshError, match=message):
        make_mesh(odd, data=1, **axes, devices=jax.devices()[:1] * 4)


def held_by(*processes) -> np.ndarray:
    """Devices, told by the process that holds each: [D, F, T]."""
    return np.vectorize(lambda index: SimpleNamespace(process_index=index), otypes=[object])(np.array([processes]))


def test_processes_bring_rows_of_their_own() -> None:
    check_processes(held_by([0, 0], [1, 1]), 2)
    check_processes(held_by([0], [1], [1], [0]), 2)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        # As JAX arranges a v5p slice of 4x4x4 chips for fsdp=16 and tensor=4, with hosts of 2x2x1 chips.
        (held_by([0, 0, 1, 1], [0, 0, 1, 1]), "tensor=4: processes 0, 1 hold devices of one tensor axis"),
        (held_by([0], [0]), r"mesh 1x2x1 has 2 \+ 0 devices of 2 processes"),
        (held_by([0], [0], [1]), r"mesh 1x3x1 has 2 \+ 1 devices of 2 processes"),
    ],
)
def test_a_mesh_whose_rows_processes_would_share_is_refused(devices, message) -> None:
    with pytest.raises(MeshError, match=message):
        check_processes(devices, 2)
