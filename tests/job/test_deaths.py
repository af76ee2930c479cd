"""A service is killed in the middle of a run, as the kernel or a lost machine does it."""

import psutil
import pytest
from jobs import assert_groups_add_up, processes_naming, read_records, read_summary, start_train, wait_until

pytestmark = pytest.mark.slow


def kill(running, folder, service):
    family = [process.pid for process in psutil.Process(running.pid).children(recursive=True)]
    family += [pid for pid, _ in processes_naming(folder)]  # Redis is nobody's child
    (victim,) = [pid for pid in set(family) if service in " ".join(psutil.Process(pid).cmdline()[:1])]
    psutil.Process(victim).kill()


def steps(folder):
    return len(read_records(folder)) if (folder / "metrics.jsonl").exists() else 0


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


@pytest.mark.parametrize("service", ["ray::LocalSampler", "ray::RolloutWorker", "ray::LearnerActor"])
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
