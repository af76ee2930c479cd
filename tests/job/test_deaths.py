"""A service is killed in the middle of a run, as the kernel or a lost machine does it."""

import psutil
import pytest
from jobs import assert_groups_add_up, processes_naming, read_records, read_summary, start_train, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("service", ["ray::LocalSampler", "ray::RolloutWorker", "ray::LearnerActor", "redis-server"])
def test_a_run_whose_service_is_killed_ends_at_once_and_goes_on_when_resumed(train, tmp_path, service):
    settings = ["run.name=killed", "buffer.outage_seconds=5"]
    running = start_train(tmp_path, *settings)
    try:
        folder = tmp_path / "killed"
        wait_until(lambda: (folder / "metrics.jsonl").exists() and len(read_records(folder)) >= 5, running)
        family = [process.pid for process in psutil.Process(running.pid).children(recursive=True)]
        family += [pid for pid, _ in processes_naming(tmp_path)]  # Redis is nobody's child
        (victim,) = [pid for pid in set(family) if service in " ".join(psutil.Process(pid).cmdline()[:1])]
        psutil.Process(victim).kill()
        output, _ = running.communicate(timeout=150)
    finally:
        running.kill()
    assert running.returncode == 1, output
    assert "run.resume=true" in output
    if service.startswith("ray::"):
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
