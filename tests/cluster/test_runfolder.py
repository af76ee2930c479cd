import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from cluster.config import Config
from cluster.errors import ConfigError, RunError
from cluster.loading import load_config
from cluster.runfolder import RunFolder, read_metrics, request_scale, runs_folder

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
    with RunFolder.open(config(tmp_path, "run.name=mine")) as run:
        assert run.config_path.is_file()
        (run.root / "new_model").mkdir()
        assert run.worthless
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


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("buffer.group_size=4", "buffer.group_size=4: the run in .*mine was started with 8;"),
        ("sampler.temperature=0.5", "sampler.temperature=0.5: .* was started with 1.0;"),
        ("environment.kwargs.size=5", "environment.kwargs.size=5: .* was started with 4;"),
        ("environment.kwargs.other=1", "environment.kwargs.other=1: .* was started with null;"),
        ("environment.id=Other-v0", "environment.id=Other-v0: .* was started with headrace/FrozenLakeText-v0;"),
        ("agent.system_prompt=hi", "agent.system_prompt=hi: .* was started with null;"),
        ("agent.max_turns=3", "agent.max_turns=3: .* was started with 8;"),
        ("model.lora={rank: 8, alpha: 16}", "model.lora={.*}: .* was started with null;"),
        ("model.path=/m", "model.path=/m: .* was started with null;"),
        ("model.architecture.num_hidden_layers=3", "model.architecture.num_hidden_layers=3: .* was started with 2;"),
    ],
)
def test_a_run_is_not_resumed_with_what_its_stored_trajectories_were_not_made_with(tmp_path, override, said):
    finished_run(tmp_path, "run.name=mine")
    with pytest.raises(RunError, match=said):
        RunFolder.open(config(tmp_path, "run.name=mine", "run.resume=true", override))


def test_a_run_is_not_resumed_with_rows_too_short_for_its_stored_trajectories(tmp_path):
    finished_run(tmp_path, "run.name=mine")
    shorter = ("sampler.context_length=128", "learner.row_lengths=[128]")
    with pytest.raises(RunError, match=r"learner.row_lengths=\[128\]: .*sampler.context_length=216"):
        RunFolder.open(config(tmp_path, "run.name=mine", "run.resume=true", *shorter))


def test_a_run_may_be_resumed_with_more_steps_time_and_workers(tmp_path):
    finished_run(tmp_path, "run.name=mine")
    changes = ("learner.steps=900", "environment.step_timeout_seconds=90", "actors.workers=2", "buffer.max_staleness=1")
    RunFolder.open(config(tmp_path, "run.name=mine", "run.resume=true", *changes)).close()


def test_a_run_from_before_there_were_stop_texts_is_resumed_without_them(tmp_path):
    finished_run(tmp_path, "run.name=mine")
    (stored,) = tmp_path.rglob("config.yaml")
    text = stored.read_text()
    assert "\n  stop: []" in text
    stored.write_text(text.replace("\n  stop: []", "", 1))
    RunFolder.open(config(tmp_path, "run.name=mine", "run.resume=true")).close()
    with pytest.raises(RunError, match=r'agent.stop=\["x"\]: .* was started with \[\]'):
        RunFolder.open(config(tmp_path, "run.name=mine", "run.resume=true", "agent.stop=[x]"))


def test_a_model_in_the_next_copy_of_a_working_directory_is_the_same_model(tmp_path):
    copies = "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_"
    finished_run(tmp_path, "run.name=mine", f"model.path={copies}1/models/m")
    resumed = ("run.name=mine", "run.resume=true")
    RunFolder.open(config(tmp_path, *resumed, f"model.path={copies}2/models/m")).close()
    with pytest.raises(RunError, match=r"model.path=.*models/n: "):
        RunFolder.open(config(tmp_path, *resumed, f"model.path={copies}2/models/n"))


def resumed_by(command: str, *overrides: str) -> RunFolder:
    program, subcommand, path, *given = shlex.split(command)
    assert (program, subcommand) == ("headrace", "train")
    return RunFolder.open(load_config(Path(path), [*given, *overrides]))


def test_the_resume_command_goes_on_from_any_working_directory(tmp_path, monkeypatch):
    (tmp_path / "first place").mkdir()
    monkeypatch.chdir(tmp_path / "first place")
    with RunFolder.open(config(Path("runs"))) as run:
        run.append_metrics("step", {"step": 1})
        command = run.resume_command()
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # going on does not change how to go on
        with resumed_by(command) as run:
            assert run.resumed
            assert run.root == tmp_path / "first place" / "runs" / "quickstart-1"
            assert run.resume_command() == command


def test_the_stored_configuration_starts_a_new_run_unless_told_to_resume(tmp_path):
    finished_run(tmp_path, "run.name=mine")
    RunFolder.open(config(tmp_path, "run.name=mine", "run.resume=true")).close()
    assert not load_config(tmp_path / "mine" / "config.yaml").run.resume


def test_the_resume_command_asks_for_a_password_that_was_not_stored(tmp_path):
    with RunFolder.open(config(tmp_path, "buffer.url=redis://:hunter2@host:1/0")) as run:
        run.append_metrics("step", {"step": 1})
        command = run.resume_command()
    assert command.endswith("run.resume=true buffer.url=redis://:PASSWORD@host:1/0")
    with resumed_by(command.replace("PASSWORD", "hunter2")) as run:
        assert run.resumed
    with pytest.raises(ConfigError, match=r"buffer.url=.*give the URL with its password"):
        load_config(run.config_path)


def test_a_run_is_not_resumed_with_another_model(tmp_path):
    finished_run(tmp_path, "run.name=mine")
    before = (tmp_path / "mine" / "config.yaml").read_text()
    with pytest.raises(RunError, match=r"model.architecture.hidden_size=256: .*was started with 128"):
        RunFolder.open(config(tmp_path, "run.name=mine", "run.resume=true", "model.architecture.hidden_size=256"))
    with pytest.raises(RunError, match=r"model.path=/m: .*was started with null"):
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


def test_a_run_that_is_up_is_asked_for_samplers_once(tmp_path):
    with RunFolder.open(config(tmp_path, "run.name=mine")) as run:
        assert run.take_scale_request() is None
        request_scale(run.root, 3)
        request_scale(run.root, 2)
        assert run.take_scale_request() == 2
        assert run.take_scale_request() is None
        run.append_metrics("step", {"step": 1})
        request_scale(run.root, 5)
    with RunFolder.open(config(tmp_path, "run.name=mine", "run.resume=true")) as run:
        assert run.take_scale_request() is None, "it was meant for the start before"


def test_requests_for_samplers_that_meet_are_each_whole(tmp_path):
    with RunFolder.open(config(tmp_path, "run.name=mine")) as run, ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(request_scale, run.root, count) for count in range(1, 101)]
        taken = []
        while not all(request.done() for request in asked):
            taken.append(run.take_scale_request())
        for request in asked:
            request.result()
        taken = [count for count in [*taken, run.take_scale_request()] if count is not None]
        assert taken and len(set(taken)) == len(taken) and set(taken) <= set(range(1, 101))
        assert not list(run.root.glob("scale*"))


@pytest.mark.parametrize(
    "text",
    [
        "sampler: [",
        "sampler:\n\t- 1\n",
        "[]",
        "",
        "sampler: {}\n",
        "sampler: 1\nbuffer: {}\n",
        "model: {}\nagent: {}\nenvironment: {}\nsampler: {kind: local}\nbuffer: {url: null}\n",
    ],
)
def test_settings_that_no_run_wrote_are_refused_in_one_line(tmp_path, text):
    with RunFolder.open(config(tmp_path, "run.name=mine")) as run:
        run.append_metrics("step", {"step": 1})  # lest it leaves no folder
        run.config_path.write_text(text)
        with pytest.raises(RunError, match=r"mine/config.yaml .*put") as refusal:
            request_scale(run.root, 2)
        assert "\n" not in str(refusal.value)
        assert "run.resume=true" in run.resume_command(), "it is said when a run fails, whatever the file holds by then"
    with pytest.raises(RunError, match=r"mine/config.yaml .*put") as refusal:
        RunFolder.open(config(tmp_path, "run.name=mine", "run.resume=true"))
    assert "\n" not in str(refusal.value)


def test_a_run_that_cannot_be_scaled_is_not_asked(tmp_path):
    root = finished_run(tmp_path, "run.name=mine")
    with pytest.raises(RunError, match=r"mine is not running; .* run.resume=true sampler.replicas=2"):
        request_scale(root, 2)
    with pytest.raises(RunError, match="nowhere holds no run"):
        request_scale(tmp_path / "nowhere", 2)
    servers = (
        "sampler.kind=sglang",
        "sampler.urls=[http://a:1]",
        "sampler.transport=folder",
        "sampler.weights_folder=/w",
    )
    with RunFolder.open(config(tmp_path, "run.name=servers", *servers)) as run:
        for count in (0, -1, 1001):
            with pytest.raises(RunError, match=f"--samplers {count}: expected 1 to 1000"):
                request_scale(run.root, count)
        with pytest.raises(RunError, match=r"--samplers 2: .*servers has the servers of sampler.urls"):
            request_scale(run.root, 2)
        assert run.take_scale_request() is None
