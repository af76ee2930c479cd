"""Processes that train together are as good as one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from learner.models.value_head import VALUE_FILE

_HERE = Path(__file__).parent


def run_gang(folder: Path, count: int, devices: int) -> None:
    """Train with so many processes of so many devices each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(_HERE.parents[1]), str(_HERE)]),
    }
    folder.mkdir()
    processes = []
    for index in range(count):
        arguments = [str(_HERE / "gang_step.py"), str(port), str(index), str(count), str(folder)]
        with (folder / f"{index}.log").open("w") as log:
            processes.append(subprocess.Popen([sys.executable, *arguments], env=environment, stderr=log))
    try:
        for index, process in enumerate(processes):
            assert process.wait(300) == 0, (folder / f"{index}.log").read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gang") / "alone"
    run_gang(folder, 1, 1)
    return folder


@pytest.mark.parametrize(("count", "devices"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_a_gang_trains_as_one_process_does(tmp_path, alone, count, devices) -> None:
    run_gang(tmp_path / "gang", count, devices)
    np.testing.assert_allclose(np.load(tmp_path / "gang" / "losses.npy"), np.load(alone / "losses.npy"), rtol=1e-5)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "gang", alone))
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, atol=1e-4, err_msg=name)
    ours, theirs = (load_file(folder / VALUE_FILE) for folder in (tmp_path / "gang", alone))
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, atol=1e-4, err_msg=name)
