"""A run that is killed trains what one trains that is not: the same groups, the same losses, bit by bit."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from buffer import Buffer, EmbeddedRedis

_HERE = Path(__file__).parent
_STEPS = 12


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


def start(redis, run: str, folder: Path, *gang: int, fsdp: int = 1) -> subprocess.Popen:
    """Start a learner, or a process of a gang: the port where it meets, its index, and how many there are."""
    folder.mkdir(exist_ok=True)
    environment = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(_HERE.parents[1]),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={1 if gang else fsdp}",
        "JAX_COMPILATION_CACHE_DIR": str(redis.folder / "compiled"),  # what is compiled anew may round differently
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    arguments = [redis.url, run, str(folder), str(_STEPS), str(fsdp), *map(str, gang)]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, str(_HERE / "resume_learner.py"), *arguments], env=os.environ | environment, stderr=log
        )


def finish(process: subprocess.Popen, folder: Path) -> None:
    assert process.wait(300) == 0, (folder / "log").read_text()[-3000:]


def trained(folder: Path) -> dict[int, dict]:
    """The last that was trained as each step."""
    path = folder / "trained"
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["step"]: record for record in map(json.loads, lines)}


def kill_after(process: subprocess.Popen, folder: Path, step: int, seconds: float) -> None:
    """Kill it some time after it has trained that step."""
    deadline = time.monotonic() + 200
    while max(trained(folder), default=0) < step and process.poll() is None:
        assert time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
        time.sleep(0.005)
    time.sleep(seconds)
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def reference(redis, tmp_path_factory) -> dict[int, dict]:
    folder = tmp_path_factory.mktemp("reference") / "run"
    finish(start(redis, "reference", folder), folder)
    return trained(folder)


def test_a_run_that_is_killed_trains_the_same_groups_to_the_same_losses(redis, tmp_path, reference) -> None:
    assert sorted(task for record in reference.values() for task in record["tasks"]) == list(range(2 * _STEPS))
    folder, rng = tmp_path / "run", random.Random(0)
    for step in (4, 8):
        kill_after(start(redis, "killed", folder), folder, step, rng.uniform(0, 0.1))
    finish(start(redis, "killed", folder), folder)
    assert trained(folder) == reference
    buffer = Buffer(redis.url, "killed", timeout_seconds=5)
    stats = buffer.stats()
    buffer.close()
    assert (stats.counters["acked"], stats.unaccounted) == (2 * _STEPS, 0)


def test_a_run_goes_on_on_another_mesh(redis, tmp_path, reference) -> None:
    folder = tmp_path / "run"
    kill_after(start(redis, "moved", folder), folder, 7, 0.0)
    finish(start(redis, "moved", folder, fsdp=2), folder)
    moved = trained(folder)
    assert {step: record["tasks"] for step, record in moved.items()} == {
        step: record["tasks"] for step, record in reference.items()
    }
    for step, record in reference.items():
        assert float.fromhex(moved[step]["loss"]) == pytest.approx(float.fromhex(record["loss"]), rel=1e-4)


@pytest.mark.slow
def test_a_gang_that_is_killed_and_resumed_trains_what_one_process_trains(redis, tmp_path, reference) -> None:
    """Two processes, each of which leases its own shard of every batch."""
    folder = tmp_path / "run"
    for is_killed in (True, False):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        processes = [start(redis, "gang", folder, port, index, 2, fsdp=2) for index in range(2)]
        if is_killed:
            kill_after(processes[0], folder, 4, 0.05)
            processes[1].kill()
            processes[1].wait()
        else:
            for process in processes:
                finish(process, folder)
    for step, record in reference.items():
        found = trained(folder)[step]
        assert set(found["tasks"]) < set(record["tasks"]), "the first process trained on the other's shard"
        assert float.fromhex(found["loss"]) == pytest.approx(float.fromhex(record["loss"]), rel=1e-4)
