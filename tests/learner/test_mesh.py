"""Meshes: refused ones, and eight simulated devices against one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from learner.mesh import MeshError, make_mesh


def test_eight_devices_give_the_loss_gradient_and_three_steps_of_one() -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("sharded.py")],
        cwd=Path(__file__).parents[2],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["8x1 equal", "4x2 equal", "2x4 equal"]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 1, "fsdp": 1, "tensor": 2}, "tensor is 2; only 1 is supported"),
        ({"data": 1000, "fsdp": 1}, "mesh 1000x1x1 needs 1000 devices"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(model, axes, message) -> None:
    with pytest.raises(MeshError, match=message):
        make_mesh(model, **axes)


def test_a_hidden_size_that_cannot_be_split_is_refused(model) -> None:
    odd = dataclasses.replace(model, hidden_size=15)
    with pytest.raises(MeshError, match="hidden_size=15 cannot be split over fsdp=2"):
        make_mesh(odd, data=1, fsdp=2, devices=jax.devices()[:1] * 2)
