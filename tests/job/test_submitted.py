"""``ray job submit`` on a Ray that was there before: the same job, the right exit status, nothing left behind."""

import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from jobs import ROOT, SMALL, environment, processes_naming, read_records, read_summary, wait_until

RAY = str(Path(sys.executable).with_name("ray"))


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Environment in which ``ray job submit`` reaches a head of our own, and the head's metrics address."""
    ports = free_ports(5)
    temporary = Path("/tmp") / f"headrace-test-{os.getpid()}"  # Ray's socket paths must be short
    variables = environment(
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        HOME=str(tmp_path_factory.mktemp("home")),
    )
    running = subprocess.Popen(
        [
            RAY, "start", "--head", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1",
            f"--port={ports[0]}", f"--dashboard-port={ports[1]}", f"--metrics-export-port={ports[2]}",
            f"--dashboard-agent-listen-port={ports[3]}", f"--temp-dir={temporary}", "--object-store-memory=200000000",
        ],
        env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    address = f"http://127.0.0.1:{ports[1]}"
    try:
        wait_until(lambda: answers(f"{address}/api/version"), running, seconds=120)
        yield variables | {"RAY_API_SERVER_ADDRESS": address}, f"http://127.0.0.1:{ports[2]}/metrics"
    finally:
        running.terminate()
        running.wait(60)
        subprocess.run(["rm", "-rf", temporary], check=True)


def test_a_submitted_job_trains_with_actors_named_by_role_and_metrics_for_prometheus(head, tmp_path):
    variables, metrics = head
    job = submit(variables, "whole", tmp_path, "learner.steps=12", "run.name=whole")
    seen = {"actors": set(), "metrics": set()}
    folder = tmp_path / "whole"
    wait_until(lambda: (folder / "metrics.jsonl").exists() and len(read_records(folder)) >= 1, job)

    def look():
        seen["actors"] |= {a["name"] for a in alive_actors(variables["RAY_API_SERVER_ADDRESS"])}
        page = urllib.request.urlopen(metrics, timeout=10).read().decode()
        seen["metrics"] |= {name for name in ("ray_headrace_step", "ray_headrace_staleness_max") if name in page}
        return job.poll() is not None

    while not look():
        pass
    output, _ = job.communicate()
    assert job.returncode == 0, output
    assert {"whole/learner", "whole/sampler-0", "whole/worker-0"} <= seen["actors"]
    assert seen["metrics"] == {"ray_headrace_step", "ray_headrace_staleness_max"}
    assert read_summary(folder)["steps"] == 12
    assert processes_naming(tmp_path) == []


def test_a_job_with_a_mistake_ends_with_exit_status_2(head, tmp_path):
    variables, _ = head
    job = submit(variables, "mistake", tmp_path, "learner.step=1")
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 1
    assert "learner.step" in output and "learner.steps" in output
    with urllib.request.urlopen(f"{variables['RAY_API_SERVER_ADDRESS']}/api/jobs/mistake", timeout=10) as reply:
        assert json.load(reply)["driver_exit_code"] == 2


@pytest.mark.slow
def test_a_stopped_job_leaves_nothing_running_and_goes_on_when_submitted_again(head, tmp_path):
    variables, _ = head
    job = submit(variables, "first", tmp_path, "learner.steps=100000", "run.name=half")
    folder = tmp_path / "half"
    wait_until(lambda: (folder / "metrics.jsonl").exists() and len(read_records(folder)) >= 5, job)
    subprocess.run([RAY, "job", "stop", "first"], env=variables, check=True, capture_output=True, timeout=120)
    job.communicate(timeout=120)
    wait_until(lambda: processes_naming(tmp_path) == [], seconds=60)
    wait_until(lambda: not alive_actors(variables["RAY_API_SERVER_ADDRESS"]), seconds=60)

    steps = read_records(folder)[-1]["step"] + 3
    again = submit(variables, "second", tmp_path, f"learner.steps={steps}", "run.name=half", "run.resume=true")
    output, _ = again.communicate(timeout=280)
    assert again.returncode == 0, output
    assert "going on from the checkpoint of step" in output
    summary = read_summary(folder)
    assert summary["steps"] == steps
    assert summary["groups"]["reserved"] == sum(n for name, n in summary["groups"].items() if name != "reserved")


def submit(variables, name, folder, *overrides):
    return subprocess.Popen(
        [
            RAY, "job", "submit", "--working-dir", str(ROOT), f"--submission-id={name}",
            "--",
            sys.executable, "-m", "cluster", "train", "configs/quickstart.yaml",
            *SMALL, f"run.folder={folder}", *overrides,
        ],
        env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def alive_actors(address):
    with urllib.request.urlopen(f"{address}/api/v0/actors?detail=1", timeout=30) as reply:
        actors = json.load(reply)["data"]["result"]["result"]
    return [actor for actor in actors if actor["state"] == "ALIVE"]


def answers(url):
    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except OSError:
        return False


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
