"""A service is killed in the middle of a run, as the kernel or a lost machine does it."""

import re
import signal
import subprocess

import psutil
import pytest
from jobs import (
    QUICKSTART,
    SMALL,
    assert_groups_add_up,
    command,
    environment,
    processes_naming,
    read_records,
    read_summary,
    start_train,
    wait_until,
)

pytestmark = pytest.mark.slow

EVALUATED = [setting for setting in SMALL if not setting.startswith("model.")]
"""The small run, without the settings of a model to be made."""


def process_of(running, folder, service):
    family = [process.pid for process in psutil.Process(running.pid).children(recursive=True)]
    family += [pid for pid, _ in processes_naming(folder)]  # Redis is nobody's child
    (found,) = [pid for pid in set(family) if service in " ".join(psutil.Process(pid).cmdline()[:1])]
    return psutil.Process(found)


def kill(running, folder, service):
    process_of(running, folder, service).kill()


def steps(folder):
    return len(read_records(folder)) if (folder / "metrics.jsonl").exists() else 0


def wait_for_steps(folder, running, count):
    wait_until(lambda: steps(folder) >= count, running)


def test_a_run_whose_redis_is_killed_goes_on(tmp_path):
    running = start_train(tmp_path, "run.name=killed", "learner.steps=24")
    try:
        folder = tmp_path / "killed"
        for done in (5, 12):
            wait_until(lambda done=done: steps(folder) >= done, running)
            kill(running, tmp_path, "redis-server")
        output, _ = running.communicate(timeout=250)
    finally:
        running.kill()
    assert running.returncode == 0, output
    summary = read_summary(folder)
    assert summary["steps"] == 24
    assert summary["groups"]["acked"] == 2 * 24, "a group was trained twice or lost"
    assert summary["staleness_max_trained"] <= summary["staleness_limit"]
    assert_groups_add_up(summary["groups"])
    assert processes_naming(tmp_path) == []


@pytest.mark.parametrize("service", ["ray::RolloutWorker", "ray::LearnerActor"])
def test_a_run_whose_service_is_killed_ends_at_once_and_goes_on_when_resumed(train, tmp_path, service):
    settings = ["run.name=killed", "buffer.outage_seconds=5"]
    running = start_train(tmp_path, *settings)
    try:
        folder = tmp_path / "killed"
        wait_until(lambda: steps(folder) >= 5, running)
        kill(running, tmp_path, service)
        output, _ = running.communicate(timeout=150)
    finally:
        running.kill()
    assert running.returncode == 1, output
    assert "run.resume=true" in output
    assert "Traceback" not in output
    assert " died: its process was killed" in output.splitlines()[-1]
    assert processes_naming(tmp_path) == []
    trained = read_records(folder)[-1]["step"]

    done = train(*settings, "run.resume=true", f"learner.steps={trained + 4}")
    assert done.returncode == 0, done.stderr + done.stdout
    summary = read_summary(folder)
    assert summary["steps"] == trained + 4
    assert summary["staleness_max_trained"] <= summary["staleness_limit"]
    assert_groups_add_up(summary["groups"])
    # A step after the last checkpoint is made again under a new version: no version stands for two sets of weights.
    versions = [record["version"] for record in read_records(folder)]
    assert versions == sorted(set(versions))


def test_a_run_goes_on_when_its_samplers_are_killed_and_stall(tmp_path):
    running = start_train(
        tmp_path, "run.name=killed", "learner.steps=2000", "sampler.stall_seconds=5", "sampler.cpus=0.25"
    )
    try:
        folder = tmp_path / "killed"
        wait_for_steps(folder, running, 5)
        for strike in (psutil.Process.kill, psutil.Process.suspend):  # the only sampler: nobody else can be asked
            before = steps(folder)
            strike(process_of(running, tmp_path, "ray::LocalSampler"))
            wait_until(lambda before=before: steps(folder) >= before + 40, running)
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 130, output
    summary = read_summary(folder)
    assert summary["sampler_restarts"] == 2, output
    assert "sampler-0 failed: its process was killed" in output
    assert "sampler-0 failed: it did not say how it is" in output
    assert "sampler_error" not in output, "an attempt of an episode was lost"
    assert summary["staleness_max_trained"] <= summary["staleness_limit"]
    assert_groups_add_up(summary["groups"])
    records = read_records(folder)
    assert all(record["sampler_version_lag"] is not None for record in records[5:])
    served = [int(version) for version in re.findall(r"sampler-0 serves from version (\d+) on", output)]
    assert len(served) == 2 and 5 <= served[0] < served[1], "it was not given the current weights"
    assert processes_naming(tmp_path) == []


def test_a_run_whose_sampler_fails_too_often_ends_and_says_so(tmp_path):
    running = start_train(tmp_path, "run.name=killed", "sampler.max_restarts=1")
    try:
        folder = tmp_path / "killed"
        for done in (5, 25):
            wait_for_steps(folder, running, done)
            kill(running, tmp_path, "ray::LocalSampler")
        output, _ = running.communicate(timeout=150)
    finally:
        running.kill()
    assert running.returncode == 1, output
    assert "Traceback" not in output
    assert re.search(
        r"sampler-0 was started anew 1 times and failed again: its process was killed.*run\.resume=true",
        output.splitlines()[-1],
    )
    assert read_summary(folder)["sampler_restarts"] == 1
    assert_groups_add_up(read_summary(folder)["groups"])
    assert processes_naming(tmp_path) == []


def test_an_evaluation_whose_sampler_is_killed_says_so(train, tmp_path):
    assert train("learner.steps=1", "run.name=trained").returncode == 0
    overrides = ("model.architecture=null", "model.warm_start=null", "task.eval_tasks=100000")
    log = tmp_path / "log"
    with log.open("w") as output:
        running = subprocess.Popen(
            command("eval", QUICKSTART, *EVALUATED, f"model.path={tmp_path / 'trained' / 'model'}", *overrides),
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: f"evaluating {tmp_path}" in log.read_text(), running)
        kill(running, tmp_path, "ray::LocalSampler")
        assert running.wait(60) == 1, log.read_text()
    finally:
        running.kill()
    assert "Traceback" not in log.read_text()
    assert "sampler-0 failed: its process was killed" in log.read_text().splitlines()[-1]


def test_a_run_is_scaled_while_it_trains_and_no_episode_is_lost(tmp_path):
    running = start_train(tmp_path, "run.name=scaled", "learner.steps=5000", "sampler.cpus=0.25")
    folder = tmp_path / "scaled"

    def scale(count):
        done = subprocess.run(
            command("scale", folder, "--samplers", count), env=environment(), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr

    def serving():
        return {record["samplers_serving"] for record in read_records(folder)[-3:]}

    try:
        wait_for_steps(folder, running, 5)
        for count in (2, 1):
            scale(count)
            wait_until(lambda count=count: serving() == {count}, running)
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 130, output
    assert "sampler-1 serves from version" in output and "sampler-1 has ended; 1 of 1 serve" in output
    assert "sampler_error" not in output
    summary = read_summary(folder)
    assert summary["sampler_restarts"] == 0
    assert_groups_add_up(summary["groups"])
    assert processes_naming(tmp_path) == []
