"""What a person gets for bad input: one line that names the value and the remedy, exit status 2, nothing started."""

import json
import socket
import subprocess

import pytest
from jobs import QUICKSTART, command, environment, processes_naming

from actors.tokenizers import write_character_tokenizer


@pytest.fixture
def fail(tmp_path):
    """Runs a command that must be refused; returns the one line it says."""

    def run(*arguments):
        done = subprocess.run(
            command(*arguments, f"run.folder={tmp_path / 'runs'}"),
            env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 2, done.stdout + done.stderr
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("headrace: error: "), done.stderr
        assert processes_naming(tmp_path) == []
        assert list((tmp_path / "runs").glob("*")) == [], "a refused run left a folder"
        return lines[0]

    return run


@pytest.fixture
def model_folder(tmp_path):
    """A folder that describes a model, without weights."""
    folder = tmp_path / "model"
    raw = {
        "model_type": "qwen3", "vocab_size": write_character_tokenizer(folder), "hidden_size": 128,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": 128, "max_position_embeddings": 512,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_a_missing_file(fail):
    assert "no_such.yaml" in fail("train", "no_such.yaml")


def test_an_unknown_key_is_answered_with_the_nearest_one(fail):
    line = fail("train", QUICKSTART, "learner.step=3")
    assert "learner.step" in line and "learner.steps" in line


def test_a_wrong_type(fail):
    line = fail("train", QUICKSTART, "learner.steps=many")
    assert "learner.steps" in line and "many" in line


def test_an_occupied_port(fail):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in fail("train", QUICKSTART, f"buffer.port={port}")


def test_no_redis_at_the_url(fail):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        line = fail("train", QUICKSTART, f"buffer.url=redis://:secret@127.0.0.1:{port}/0", "buffer.timeout_seconds=1")
    assert f"127.0.0.1:{port}" in line and "secret" not in line


def test_a_model_folder_without_a_model(fail, tmp_path):
    line = fail("train", QUICKSTART, f"model.path={tmp_path / 'nothing'}")
    assert str(tmp_path / "nothing") in line


def test_a_model_of_another_architecture(fail, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert "mamba" in fail("eval", QUICKSTART, f"model.path={folder}")


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_an_environment_that_cannot_be_made(fail, model_folder, command):
    assert "size=1" in fail(command, QUICKSTART, "environment.kwargs.size=1", f"model.path={model_folder}")


@pytest.mark.parametrize("command", ["train", "sft"])
def test_no_file_of_conversations(fail, command):
    line = fail(command, QUICKSTART, "model.warm_start.conversations=no_such.jsonl")
    assert "model.warm_start.conversations=" in line and "no_such.jsonl" in line
