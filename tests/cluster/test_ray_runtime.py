"""Each test runs a process of its own, because Ray can be configured once per process only."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cluster.errors import RayUnavailable
from cluster.ray_runtime import jax_environment, ray_runtime

ROOT = Path(__file__).parent.parent.parent

RUN = """
import json, os, subprocess, sys, time, urllib.request
import psutil
from cluster.ray_runtime import jax_environment, ray_runtime
from cluster.signals import stop_on_signals
from cluster.telemetry import RayMetrics

JOIN = '''
import os
from cluster.ray_runtime import ray_runtime
with ray_runtime(cpus=2, dashboard=False, metrics_port=0) as runtime:
    import ray
    print(runtime.local, ray.get_actor("role:worker", namespace="test") is not None)
'''

with ray_runtime(cpus=2, dashboard=False, metrics_port=0) as runtime, stop_on_signals() as stop:
    import ray

    class Role:
        def environment(self):
            return {name: os.environ.get(name) for name in ("NPROC", "OMP_NUM_THREADS")}

    options = dict(name="role:worker", namespace="test", num_cpus=0, runtime_env={"env_vars": jax_environment(1)})
    role = ray.remote(Role).options(**options).remote()
    environment = ray.get(role.environment.remote())
    family = psutil.Process().children(recursive=True)
    listening = [c.laddr.ip for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]

    metrics = RayMetrics("mine")
    metrics.set({"step": 7, "success_mean": 0.5, "staleness_limit": 2})
    metrics.set_groups({"acked": 3})
    node = ray.nodes()[0]
    deadline, page = time.monotonic() + 60, ""
    while "ray_headrace_groups{" not in page and time.monotonic() < deadline:
        page = urllib.request.urlopen(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics").read().decode()
        stop.requested.wait(0.5)

    join = subprocess.run([sys.executable, "-c", JOIN], env={**os.environ, "RAY_ADDRESS": runtime.address},
                          capture_output=True, text=True, timeout=120)
    print(json.dumps({
        "local": runtime.local, "address": runtime.address, "logs": os.path.isdir(runtime.session_folder),
        "environment": environment, "listening": sorted(set(listening)),
        "metrics": [line for line in page.splitlines() if line.startswith("ray_headrace")],
        "joined": join.stdout.strip() or join.stderr[-2000:], "family": [p.pid for p in family],
    }), flush=True)
    stop.requested.wait(120)
    print(json.dumps({"exit_status": stop.exit_status, "alive": ray.get(role.environment.remote()) == environment}),
          flush=True)
sys.exit(stop.exit_status)
"""


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def clean_environment():
    """The environment of a person's shell: none of the settings that the tests share."""
    private = ("RAY_", "JAX_")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(private)},
        "PYTHONPATH": str(ROOT),
        "HOME": "/nonexistent",
    }


def test_a_local_ray_is_private_measured_and_gone_after_ctrl_c(clean_environment):
    process = subprocess.Popen(
        [sys.executable, "-c", RUN], env=clean_environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        # A terminal sends Ctrl-C to every process of the group, Ray's included.
        os.killpg(process.pid, signal.SIGINT)
        end = json.loads(process.stdout.readline())
        status = process.wait(timeout=120)
    finally:
        process.kill()

    assert told["local"] and told["logs"]
    assert told["address"].startswith("127.0.0.1:")
    assert set(told["listening"]) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, "a port is open to other machines"
    assert told["environment"] == {"NPROC": "1", "OMP_NUM_THREADS": "1"}
    assert told["joined"] == "False True", "a second process could not join by RAY_ADDRESS"
    metrics = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in told["metrics"]}
    assert metrics == {
        "ray_headrace_step": 7,
        "ray_headrace_success_mean": 0.5,
        "ray_headrace_staleness_limit": 2,
        "ray_headrace_groups": 3,
    }
    assert end == {"exit_status": 130, "alive": True}, "actors must outlive the signal, to be drained"
    assert status == 130
    deadline = time.monotonic() + 30
    while alive(told["family"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(told["family"])


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:nonsense", "ray://127.0.0.1:1"])
def test_a_dead_cluster_is_reported_at_once(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    expected = pytest.raises(RayUnavailable, match=rf"RAY_ADDRESS={address}: no Ray head answers")
    with expected, ray_runtime(cpus=2, dashboard=False, metrics_port=0):
        pass


def test_what_the_user_set_is_kept(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert jax_environment(2)["MALLOC_ARENA_MAX"] == "4"
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x")
    assert jax_environment(2)["XLA_FLAGS"].split() == ["--xla_dump_to=/tmp/x", "--xla_cpu_multi_thread_eigen=true"]


def test_a_cpu_is_as_many_devices_as_asked_for():
    environment = {**os.environ, **jax_environment(1, devices=3), "JAX_PLATFORMS": "cpu"}
    count = [sys.executable, "-c", "import jax; print(jax.device_count())"]
    done = subprocess.run(count, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    assert int(done.stdout) == 3


PAGE_FAULTS = """
import resource, jax, jax.numpy as jnp
call = jax.jit(lambda x: jnp.tanh(x @ x).sum())  # 16 MiB of scratch
x = jnp.ones((2048, 2048))
faults = []
for _ in range(6):
    call(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[2])
"""


def test_scratch_memory_of_xla_is_kept_between_calls():
    environment = {**os.environ, **jax_environment(1), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS], env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    assert int(done.stdout) < 1000, "mapped anew, scratch is thousands of pages"
