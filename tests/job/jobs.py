"""A training run small enough for a test, and the means to start it as a person does and to look at what it left."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"

SMALL = [
    "environment.kwargs.size=2",  # two moves reach the goal: even an untrained policy wins and loses
    "environment.kwargs.split=all",
    "environment.evaluation_kwargs.split=all",
    "agent.max_turns=4",
    "agent.max_tokens_per_turn=4",  # replies of several tokens, some of them invalid
    "sampler.context_length=128",
    "sampler.slots=16",
    "actors.episodes_in_flight=16",
    "buffer.groups_per_batch=2",
    "buffer.group_size=4",
    "learner.row_lengths=[128]",
    "learner.rows_per_microbatch=4",
    "learner.checkpoint_every_steps=2",
    "model.architecture.num_hidden_layers=1",
    "model.architecture.intermediate_size=64",
    "model.warm_start.steps=20",
    "model.warm_start.noise=1.0",  # a random walker: some episodes of a group succeed and some fail
    "model.warm_start.demonstrations=64",
    "model.warm_start.examples_per_step=16",
    "task.eval_tasks=16",
    "telemetry.plain_every_seconds=0.5",
]


def environment(**extra):
    """As a person's shell has it: nothing of what the test process set for its own Ray."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return inherited | extra


def command(*arguments):
    return [sys.executable, "-m", "cluster", *map(str, arguments)]


def start_train(folder, *overrides):
    """``headrace train`` on the small model, for as long as the test lets it run."""
    return subprocess.Popen(
        command("train", QUICKSTART, *SMALL, f"run.folder={folder}", "learner.steps=1000", *overrides),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def assert_groups_add_up(groups):
    assert groups["reserved"] == sum(count for name, count in groups.items() if name != "reserved")


def read_records(folder, kind="step"):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def read_summary(folder):
    return json.loads((folder / "summary.json").read_text())


def processes_naming(text):
    """Processes whose command line or working directory names ``text``, such as a run's folder."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.cwd()]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(text) in word for word in words):
            found.append((process.pid, words))
    return found


def wait_until(happened, process=None, *, seconds=240):
    """Wait for something to happen; ``process`` must not end before."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)
