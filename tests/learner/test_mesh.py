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


@pytest.mark.timeout(900)  # it compiles a dozen programs for eight devices
def test_eight_devices_give_the_loss_gradient_and_five_steps_of_one() -> None:
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
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == 10, done.stdout


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
