"""``headrace buffer``: what a person sees of a real buffer, and what the commands refuse."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from actors.chat import Chat
from actors.tokenizers import write_character_tokenizer
from buffer import Buffer, EmbeddedRedis, Limits, Status, Trajectory
from cluster import store

ROOT = Path(__file__).parent.parent.parent
LIMITS = Limits(
    max_staleness=3,
    max_age_seconds=math.inf,
    groups_per_batch=1,
    group_size=2,
    max_bytes=1 << 20,
    slot_seconds=60,
    max_attempts=3,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as embedded:
        yield embedded


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(folder)
    return folder


@pytest.fixture
def run(request, server, tokenizer):
    """A run with a group of each kind; yields its name."""
    name = request.node.name.translate(str.maketrans("[] ", "---"))[:60]
    buffer = Buffer(server.url, name, timeout_seconds=5)
    buffer.open(LIMITS)
    epoch = buffer.begin_epoch()
    for _ in range(3):
        slot = buffer.reserve("worker-1", timeout=0)
        buffer.commit(*(conversation(Chat(tokenizer), slot.group, index) for index in range(2)))
    buffer.reserve("worker-2", timeout=0)
    buffer.ack(buffer.lease(epoch, 0, timeout=0), 1)
    buffer.lease(epoch, 1, timeout=0)
    yield name
    buffer.delete()
    buffer.close()


def conversation(chat, group, index):
    given_T, sampled_T = chat.prompt([{"role": "user", "content": "which way?"}]), chat.encode_reply("go left")
    mask_T = np.arange(len(given_T) + len(sampled_T)) >= len(given_T)
    return Trajectory(
        tokens=np.concatenate([given_T, sampled_T]).astype(np.int32),
        loss_mask=mask_T,
        logprobs=np.where(mask_T, np.float32(-0.25), np.float32(0)),
        versions=np.where(mask_T, np.int32(0), np.int32(-1)),
        rewards=np.array([0.5], np.float32),
        reward=0.5,
        status=Status.COMPLETED,
        task=7,
        group=group,
        index=index,
        sampler="sampler-0",
        metadata={"seed": 3},
    )


def headrace(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "cluster", "buffer", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def printed(print_it, *arguments, **options):
    stream = io.StringIO()
    print_it(*arguments, console=Console(file=stream, width=120), **options)
    return stream.getvalue()


def test_stats_show_states_outcomes_leases_and_slots(server, run):
    text = printed(store.print_stats, store.find(server.url, run, ()), as_json=False)
    rows = [line.split() for line in text.splitlines()]
    assert f"run {run}  version 1, learner epoch 1 of" in text
    assert next(row for row in rows if row[:1] == ["ready"])[:3] == ["ready", "1", "2"]
    assert next(row for row in rows if row[:1] == ["leased"])[:3] == ["leased", "1", "2"]
    assert next(row for row in rows if row[:1] == ["acked"]) == ["acked", "1"]
    assert next(row for row in rows if row[:1] == ["unaccounted"]) == ["unaccounted", "0"]
    assert next(row for row in rows if row[:1] == ["worker-2"])[:5] == ["worker-2", "1", "0", "of", "2"]
    assert "leases, held by learner epoch 1" in text


def test_stats_as_json_are_one_object(server, run):
    data = json.loads(printed(store.print_stats, store.find(server.url, run, ()), as_json=True))
    assert (data["run"], data["version"], data["unaccounted"]) == (run, 1, 0)
    assert {state: len(groups) for state, groups in data["groups"].items()} == {
        "reserved": 1,
        "ready": 1,
        "leased": 1,
        "kept": 1,
    }
    assert data["groups"]["leased"][0]["lease_version"] == 1


def test_peek_prints_what_was_given_and_what_was_sampled_apart(server, run, tokenizer):
    target = store.find(server.url, run, ())
    text = printed(store.print_trajectory, target, group=None, index=1, tokenizer=tokenizer, as_json=False)
    given, sampled = (line for line in text.splitlines() if line.startswith(("given", "sampled")))
    assert "which way?" in given and "go left" not in given
    assert "go left" in sampled and sampled.split()[1:4] == ["0", "-0.250", "0.5"]
    assert "member 1 of 2" in text and "task 7, ready" in text and '"seed": 3' in text


def test_peek_without_a_tokenizer_prints_ids_and_as_json_the_arrays(server, run):
    target = store.find(server.url, run, ())
    options = {"group": None, "index": 0, "tokenizer": None}
    data = json.loads(printed(store.print_trajectory, target, **options, as_json=True))
    text = printed(store.print_trajectory, target, **options, as_json=False)
    assert " ".join(map(str, data["tokens"][-3:])) in text
    assert data["loss_mask"][-1] is True and data["state"] == "ready"


def test_drain_wants_a_yes_and_leaves_what_is_leased(server, run):
    refused = headrace("drain", server.url, "--run", run)
    assert refused.returncode == 2
    assert "--yes is missing: this would drain 2 groups" in refused.stderr
    done = headrace("drain", server.url, "--run", run, "--yes")
    assert (done.returncode, done.stdout) == (0, "2 groups drained; their tasks are issued again\n")
    stats = store.find(server.url, run, ()).buffer.stats()
    assert (stats.reserved, stats.ready, stats.leased, stats.unaccounted) == (0, 0, 1, 0)


def test_drain_and_delete_leaves_nothing(server, run):
    done = headrace("drain", server.admin_url, "--run", run, "--yes", "--delete")
    assert done.returncode == 0 and "keys deleted" in done.stdout
    assert run not in store.runs_in(server.admin_url, timeout_seconds=5)
    again = headrace("stats", server.admin_url, "--run", run)
    assert again.returncode == 2 and f"--run {run}: no such run in this Redis" in again.stderr


def test_a_run_folder_names_its_own_redis(tmp_path, tokenizer):
    folder = tmp_path / "run-1"
    (folder / "initial_model").mkdir(parents=True)
    write_character_tokenizer(folder / "initial_model")
    settings = "model: {}\nagent: {}\nenvironment: {}\nsampler: {kind: local, context_length: 9}\nbuffer: {url: null}\n"
    (folder / "config.yaml").write_text(settings)
    (folder / "run_id").write_text("run-1-abcd\n")
    refused = headrace("stats", str(folder))
    assert refused.returncode == 2 and "has not started a Redis yet" in refused.stderr
    with EmbeddedRedis(folder / "redis", run="run-1-abcd") as server:
        buffer = Buffer(server.url, "run-1-abcd", timeout_seconds=5)
        buffer.open(LIMITS)
        slot = buffer.reserve("worker-1", timeout=0)
        buffer.commit(*(conversation(Chat(tokenizer), slot.group, index) for index in range(2)))
        done = headrace("peek", str(folder))
        assert done.returncode == 0 and "go left" in done.stdout
        buffer.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("stats", "nowhere"), "nowhere is neither a URL nor a run folder"),
        (("stats", "redis://127.0.0.1:1"), "no answer from Redis at 127.0.0.1:1"),
        (("stats", "http://127.0.0.1:1"), "the Redis URL has scheme 'http'"),
    ],
)
def test_a_target_that_is_none_is_one_line_and_status_2(arguments, said):
    done = headrace(*arguments)
    assert done.returncode == 2 and said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_several_runs_in_one_redis_are_listed(server, run, tokenizer):
    other = Buffer(server.url, f"{run}-2", timeout_seconds=5)
    other.open(LIMITS)
    done = headrace("stats", server.admin_url)
    assert done.returncode == 2 and run in done.stderr and "choose one by --run" in done.stderr
    other.delete()
    other.close()


def test_a_trajectory_that_is_not_there_says_what_is(server, run):
    target = store.find(server.url, run, ())
    options = {"tokenizer": None, "as_json": False}
    with pytest.raises(store.RunError, match="--group nobody: no such group"):
        printed(store.print_trajectory, target, group="nobody", index=0, **options)
    with pytest.raises(store.RunError, match=r"index is 5; group .* has the members 0, 1: choose one"):
        printed(store.print_trajectory, target, group=None, index=5, **options)


def test_the_rules_of_a_user_fit_the_run():
    done = headrace("acl", "quick-1")
    assert done.stdout.startswith("ACL SETUSER headrace reset on >PASSWORD ~{headrace:quick-1}:* -@all +")
