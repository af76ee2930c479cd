"""``headrace train`` with a learner of several processes."""

import os
import re
import signal

import psutil
import pytest
from jobs import (
    assert_groups_add_up,
    processes_naming,
    read_records,
    read_summary,
    start_train,
    wait_until,
)

TWO = ("learner.processes=2", "learner.mesh.data=2", "learner.mesh.fsdp=2")


def test_two_processes_of_two_devices_train_a_run_from_its_warm_start_to_its_model(train, tmp_path):
    done = train("learner.steps=4", "run.name=gang", *TWO)
    assert done.returncode == 0, done.stderr + done.stdout
    folder, summary = tmp_path / "gang", read_summary(tmp_path / "gang")
    assert summary["steps"] == summary["version"] == 4
    assert summary["compilations_after_warmup"] == 0
    assert summary["agreement"]["checks"] > 0 and summary["agreement"]["worst"]["max"] <= 1e-4
    assert summary["groups"]["acked"] == 8
    assert_groups_add_up(summary["groups"])
    losses = [record["loss"] for record in read_records(folder, "warm_start")]
    assert len(losses) == 20 and losses[-1] < losses[0]
    assert (folder / "model" / "model.safetensors").exists() and (folder / "model" / "tokenizer.json").exists()
    assert processes_naming(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_of_which_a_process_is_killed_says_so_and_goes_on_from_its_checkpoint(train, tmp_path):
    running = start_train(tmp_path, "run.name=killed", *TWO)
    try:
        folder = tmp_path / "killed"
        wait_until(lambda: (folder / "metrics.jsonl").exists() and len(read_records(folder)) >= 4, running)
        family = {process.pid: process.cmdline() for process in psutil.Process(running.pid).children(recursive=True)}
        learners = sorted(
            pid for pid, words in family.items() if words[:1] and words[0].startswith("ray::LearnerActor")
        )
        assert len(learners) == 2, family
        os.kill(learners[-1], signal.SIGKILL)
        output, _ = running.communicate(timeout=400)
    finally:
        running.kill()
    assert running.returncode == 1, output
    assert re.search(r"killed/learner-[01] died", output) and "run.resume=true" in output, output
    assert "Traceback" not in output
    assert processes_naming(tmp_path) == []

    steps = max(record["step"] for record in read_records(folder)) + 2
    done = train("run.name=killed", "run.resume=true", f"learner.steps={steps}", *TWO)
    assert done.returncode == 0, done.stderr + done.stdout
    summary = read_summary(folder)
    assert summary["steps"] == steps
    assert_groups_add_up(summary["groups"])
