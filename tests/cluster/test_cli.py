import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.tokenizers import write_character_tokenizer
from cluster.errors import user_errors

ROOT = Path(__file__).parent.parent.parent


def headrace(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_config_prints_the_resolved_configuration():
    done = headrace("config", "configs/quickstart.yaml", "learner.steps=7", "--json")
    assert done.returncode == 0
    printed = json.loads(done.stdout)
    assert printed["learner"]["steps"] == 7
    assert printed["learner"]["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize("command", ["train", "sft", "eval", "config"])
def test_bad_input_is_one_line_and_status_2_before_anything_starts(command, tmp_path):
    quickstart = str(ROOT / "configs" / "quickstart.yaml")
    done = headrace(command, quickstart, "learner.stps=3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ("" if command == "config" else f"headrace: loading {quickstart} ...\n")
    assert done.stderr == "headrace: error: learner.stps=3: no such key; did you mean learner.steps?\n"
    assert not list(tmp_path.iterdir())


def test_a_run_that_cannot_be_scaled_is_one_line_and_status_2(tmp_path):
    done = headrace("scale", str(tmp_path / "nowhere"), "--samplers", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"headrace: error: {tmp_path / 'nowhere'} holds no run; expected the folder of one, such as runs/NAME"
    ]


def test_a_missing_file_is_one_line_and_status_2():
    done = headrace("train", "nowhere.yaml")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "headrace: error: nowhere.yaml: no such file; expected a YAML configuration such as configs/quickstart.yaml"
    ]


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_missing_sampler_is_one_line_and_status_2_before_anything_starts(command, tmp_path):
    # An environment without it: its description is not found, whatever else is.
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib import metadata\n"
        "found = metadata.version\n"
        "def version(name):\n"
        "    if name == 'sglang-jax':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.version = version\n"
    )
    model = tmp_path / "model"
    shape = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    shape |= {"num_key_value_heads": 1, "head_dim": 128, "max_position_embeddings": 512}
    model.mkdir()
    raw = {"model_type": "qwen3", "vocab_size": write_character_tokenizer(model), **shape}
    (model / "config.json").write_text(json.dumps(raw))
    done = headrace(
        command,
        str(ROOT / "configs" / "quickstart.yaml"),
        "sampler.kind=sglang_jax",
        f"model.path={model}",
        PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]),
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "headrace: error: sampler.kind=sglang_jax: sglang-jax is not installed; expected 0.1.0rc0: "
        "make setup-sampler installs it, or use sampler.kind=local"
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--help",), "Exit status: 0 success; 2 a mistake that one line names"),
        (("train", "--help"), "headrace config CONFIG prints every key"),
        (("eval", "--help"), "model.path=FOLDER says which"),
    ],
)
def test_help_says_how_to_go_on(arguments, said):
    assert said in " ".join(headrace(*arguments).stdout.split())


@pytest.mark.parametrize("arguments", [("--help",), ("config", "--help"), ("train", "--help")])
def test_help_works_without_jax_or_ray(arguments):
    script = (
        "import sys; from cluster.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print('loaded:', sorted({'jax', 'ray', 'flax', 'redis', 'omegaconf'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "Usage" in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_checking_a_configuration_loads_neither_jax_nor_ray():
    script = (
        "import sys; from pathlib import Path; from cluster.loading import load_config\n"
        "load_config(Path('configs/quickstart.yaml'))\n"
        "print(sorted({'jax', 'ray', 'flax', 'redis'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_the_first_line_comes_before_anything_heavy_is_imported():
    script = (
        "import sys, typer\n"
        "say = typer.echo\n"
        "heavy = {'jax', 'ray', 'flax', 'redis', 'omegaconf', 'numpy'}\n"
        "typer.echo = lambda text, **kind: say(f'{text} {sorted(heavy & set(sys.modules))}', **kind)\n"
        "sys.argv = ['headrace', 'train', 'nowhere.yaml']\n"
        "from cluster.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "headrace: loading nowhere.yaml ... []\n"


def run_inside_command(body: str) -> subprocess.CompletedProcess[str]:
    """What the command line makes of a train function with that body."""
    script = (
        "import sys, types, signal\n"
        f"def train(config):\n    {body}\n"
        "module = types.ModuleType('cluster.train'); module.train = train; sys.modules['cluster.train'] = module\n"
        "sys.argv = ['headrace', 'train', 'configs/quickstart.yaml']\n"
        "from cluster.cli import main; main()"
    )
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("body", "status", "stderr"),
    [
        ("return 0", 0, ""),
        ("return 130", 130, ""),
        ("raise KeyboardInterrupt", 130, "headrace: stopped\n"),
        ("from cluster.errors import RunError; raise RunError('x: taken')", 2, "headrace: error: x: taken\n"),
        ("from buffer.errors import BufferUnavailable; raise BufferUnavailable('h:1')", 2, "headrace: error: h:1\n"),
        ("from learner.models.config import ModelError; raise ModelError('other')", 2, "headrace: error: other\n"),
        ("from learner.models.config import ModelError; raise ModelError('a\\n b')", 2, "headrace: error: a b\n"),
        (
            "from cluster.errors import ConfigError; raise ConfigError('a\\nb')",
            2,
            "headrace: error: a\nheadrace: error: b\n",
        ),
        ("from buffer.errors import BufferError; raise BufferError('no Lua')", 2, "headrace: error: no Lua\n"),
    ],
)
def test_the_exit_status_tells_how_it_ended(body, status, stderr):
    done = run_inside_command(body)
    assert (done.returncode, done.stderr) == (status, stderr)


@pytest.mark.parametrize(
    ("body", "last"),
    [
        ("raise RuntimeError('a bug')", "RuntimeError: a bug"),
        ("from buffer.errors import WaitTimeout; raise WaitTimeout('late')", "buffer.errors.WaitTimeout: late"),
    ],
)
def test_a_failure_of_ours_shows_its_traceback_and_status_1(body, last):
    done = run_inside_command(body)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1] == last


def test_an_error_raised_inside_an_actor_counts_as_what_it_is():
    done = run_inside_command(
        "from learner.models.config import ModelError; from ray.exceptions import RayTaskError; "
        "raise RayTaskError('build', 'a long traceback', ModelError('other model')).as_instanceof_cause()"
    )
    assert (done.returncode, done.stderr) == (2, "headrace: error: other model\n")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("actors.chat", "ChatError"),
        ("actors.environments", "EnvironmentSetupError"),
        ("buffer.errors", "BufferUnavailable"),
        ("buffer.errors", "FormatError"),
        ("buffer.errors", "NotOpen"),
        ("buffer.errors", "PortInUse"),
        ("buffer.errors", "ServerError"),
        ("cluster.waiting", "StartError"),
        ("learner.mesh", "MeshError"),
        ("learner.models.config", "ModelError"),
    ],
)
def test_what_a_person_can_mend_is_known_wherever_it_is_raised(module, name):
    assert getattr(importlib.import_module(module), name) in user_errors()


def test_the_version_is_printed():
    assert headrace("--version").stdout.startswith("headrace ")
