import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.config import Config
from cluster.errors import RunError
from cluster.loading import load_config
from cluster.runfolder import RunFolder, read_metrics, runs_folder

ROOT = Path(__file__).parent.parent.parent


def config(folder: Path, *overrides: str) -> Config:
    return load_config(ROOT / "configs" / "quickstart.yaml", [f"run.folder={folder}", *overrides])


def finished_run(folder: Path, *overrides: str) -> Path:
    with RunFolder.open(config(folder, *overrides)) as run:
        run.append_metrics("step", {"step": 1})
        return run.root


def test_runs_without_a_name_are_numbered_after_their_configuration(tmp_path):
    names = [finished_run(tmp_path).name for _ in range(3)]
    assert names == ["quickstart-1", "quickstart-2", "quickstart-3"]


def test_a_name_that_was_given_is_used_once(tmp_path):
    root = finished_run(tmp_path, "run.name=mine")
    assert root == tmp_path / "mine"
    with pytest.raises(
        RunError, match=r"run.name=mine: .*exists; go on with it by run.resume=true, or choose another name"
    ):
        RunFolder.open(config(tmp_path, "run.name=mine"))


def test_a_run_that_never_got_anywhere_frees_its_name(tmp_path):
    with RunFolder.open(config(tmp_path, "run.name=mine")):
        assert (tmp_path / "mine" / "config.yaml").is_file()
    assert not (tmp_path / "mine").exists()


def test_a_run_is_resumed_by_name_and_keeps_its_metrics(tmp_path):
    finished_run(tmp_path, "run.name=mine")
    with RunFolder.open(config(tmp_path, "run.name=mine", "run.resume=true", "learner.steps=999")) as run:
        assert run.resumed
        run.append_metrics("step", {"step": 2})
        assert [record["step"] for record in run.read_metrics()] == [1, 2]
    assert yaml.safe_load((tmp_path / "mine" / "config.yaml").read_text())["learner"]["steps"] == 999


def test_resuming_without_a_name_takes_the_newest_run(tmp_path):
    for _ in range(11):
        finished_run(tmp_path)
    with RunFolder.open(config(tmp_path, "run.resume=true")) as run:
        assert run.name == "quickstart-11"


@pytest.mark.parametrize("name", ["run.name=none", "run.name=null"])
def test_a_run_that_does_not_exist_cannot_be_resumed(tmp_path, name):
    with pytest.raises(RunError, match=r"run.resume=true: .*holds no run"):
        RunFolder.open(config(tmp_path, name, "run.resume=true"))
    assert not list(tmp_path.iterdir())


def test_a_run_is_not_resumed_with_another_model(tmp_path):
    finished_run(tmp_path, "run.name=mine")
    before = (tmp_path / "mine" / "config.yaml").read_text()
    with pytest.raises(RunError, match=r"model.architecture.hidden_size=256: .*was started with 128"):
        RunFolder.open(config(tmp_path, "run.name=mine", "run.resume=true", "model.architecture.hidden_size=256"))
    with pytest.raises(RunError, match=r"model.path=/m: .*was started with None"):
        RunFolder.open(config(tmp_path, "run.name=mine", "run.resume=true", "model.path=/m", "model.architecture=null"))
    assert (tmp_path / "mine" / "config.yaml").read_text() == before


def test_two_processes_never_hold_the_same_run_and_a_killed_one_lets_go(tmp_path):
    finished_run(tmp_path, "run.name=mine")
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from cluster.loading import load_config; "
            "from cluster.runfolder import RunFolder\n"
            "run = RunFolder.open(load_config(Path('configs/quickstart.yaml'), sys.argv[1:]))\n"
            "print('held', flush=True); sys.stdin.read()",
            f"run.folder={tmp_path}",
            "run.name=mine",
            "run.resume=true",
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=rf"in use by process {holder.pid}"):
            RunFolder.open(config(tmp_path, "run.name=mine", "run.resume=true"))
    finally:
        holder.kill()
        holder.communicate()
    RunFolder.open(config(tmp_path, "run.name=mine", "run.resume=true")).close()


def test_a_metrics_line_cut_short_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    assert read_metrics(path) == [{"kind": "step", "step": 1}]


def test_a_summary_is_replaced_as_a_whole(tmp_path):
    with RunFolder.open(config(tmp_path)) as run:
        run.write_summary({"steps": 1})
        run.write_summary({"steps": 2})
        assert json.loads(run.summary_path.read_text()) == {"steps": 2}
        assert not list(run.root.glob("*.new"))


def test_the_stored_configuration_holds_no_password(tmp_path):
    with RunFolder.open(config(tmp_path, "buffer.url=redis://:hunter2@host:1/0")) as run:
        assert "hunter2" not in run.config_path.read_text()
        assert yaml.safe_load(run.config_path.read_text())["run"]["name"] == "quickstart-1"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"run.folder=.*file: cannot make"):
        RunFolder.open(config(tmp_path / "file"))


def test_a_submitted_job_keeps_its_run_outside_the_temporary_copy(tmp_path, monkeypatch):
    copy = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(copy)
    parent, notice = runs_folder(Path("runs"))
    assert parent == tmp_path / "home" / "headrace" / "runs"
    assert notice is not None and str(parent) in notice
    assert runs_folder(tmp_path / "elsewhere") == (tmp_path / "elsewhere", None)


def test_elsewhere_a_relative_folder_is_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert runs_folder(Path("runs")) == (Path(os.getcwd()) / "runs", None)
