import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from actors.chat import ChatError
from actors.environments import EnvironmentSetupError
from actors.samplers.sglang.release import ReleaseError
from actors.tokenizers import write_character_tokenizer
from cluster.config import Config, EnvironmentConfig, LoraConfig
from cluster.errors import ConfigError
from cluster.inputs import check_environment, check_inputs, check_model_folder, check_sampler
from cluster.loading import load_config
from learner.models.config import ModelError

ROOT = Path(__file__).parent.parent.parent
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 512,
}
TALK = {"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "D"}]}


def config(*overrides: str) -> Config:
    return load_config(ROOT / "configs" / "quickstart.yaml", overrides)


def conversations(folder: Path, *lines: object, count: int = 40) -> str:
    """The override that names a file of ``lines``, made up to ``count`` by good ones."""
    path = folder / "talks.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in (*lines, *[TALK] * (count - len(lines)))]
    path.write_text("\n".join(texts) + "\n")
    return f"model.warm_start.conversations={path}"


def model_folder(folder: Path, **changes: int | str) -> str:
    """The override that names a model without weights."""
    raw = {"model_type": "qwen3", "vocab_size": write_character_tokenizer(folder), **SHAPE, **changes}
    (folder / "config.json").write_text(json.dumps(raw))
    return f"model.path={folder}"


def test_what_the_quickstart_reads_is_found():
    check_inputs(config())


def test_a_model_and_conversations_that_fit_are_found(tmp_path):
    check_inputs(config(model_folder(tmp_path), conversations(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"model_type": "gemma2"}, "the model_type is gemma2"), ({"head_dim": 64}, "the model's head_dim is 64")],
)
def test_a_model_that_the_sampler_does_not_serve_is_refused(tmp_path, changes, said):
    path = model_folder(tmp_path, **changes)
    check_sampler(config(path))  # the local sampler serves it
    with pytest.raises(ReleaseError, match=said):
        check_sampler(config(path, "sampler.kind=sglang_jax"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("environment.id=Nowhere-v0", "Nowhere"),
        ("environment.id=no_such_module:X-v0", "no_such_module"),
        ("environment.id=CartPole-v1", "CartPole-v1"),
        ("environment.kwargs.size=1", "size=1"),
        ("environment.kwargs.size=four", "size"),
        ("environment.kwargs.sise=4", "sise"),
    ],
)
@pytest.mark.parametrize("check", [check_inputs, check_environment])
def test_an_environment_that_cannot_be_made_is_found(check, override, said):
    with pytest.raises(EnvironmentSetupError, match=said):
        check(config(override))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"talks.jsonl:1: expected one JSON object"),
        ("[]", r"talks.jsonl:1: expected one JSON object"),
        ({"messages": []}, r"talks.jsonl:1: .*expected a last message of the assistant"),
        ({"messages": ["hi"]}, r'talks.jsonl:1: expected "messages" to be a list'),
        ({"messages": [{"role": "assistant", "content": 5}]}, r'talks.jsonl:1: expected "messages" to be a list'),
        ({"messages": [{"role": "user", "content": "A"}]}, r"talks.jsonl:1: .*last message of the assistant"),
        ({"messages": [{"role": "assistant", "content": "é"}]}, r"talks.jsonl:1: .*cannot encode 'é'"),
        ({"messages": [{"role": "assistant", "content": "x" * 400}]}, r"talks.jsonl:1: .*at most the longest"),
    ],
)
def test_a_conversation_that_cannot_be_learned_is_found_with_its_line(tmp_path, line, said):
    with pytest.raises(ConfigError, match=said):
        check_inputs(config(conversations(tmp_path, line)))


def test_a_file_of_conversations_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model.warm_start.conversations=.*none: cannot be read \(No such file"):
        check_inputs(config(f"model.warm_start.conversations={tmp_path / 'none'}"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary: cannot be read \(it is not UTF-8"):
        check_inputs(config(f"model.warm_start.conversations={tmp_path / 'binary'}"))


def test_too_few_conversations_for_one_step_are_found(tmp_path):
    said = r"model.warm_start.examples_per_step=32: there are only 31 conversations"
    with pytest.raises(ConfigError, match=said):
        check_inputs(config(conversations(tmp_path, count=31)))
    with pytest.raises(ConfigError, match=said):
        check_inputs(config("model.warm_start.demonstrations=31"))


def test_an_environment_without_text_or_without_a_demonstrator_is_found(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "actors")
    quickstart = config()

    def of(environment_id: str) -> Config:
        return quickstart.model_copy(update={"environment": EnvironmentConfig(id=environment_id)})

    with pytest.raises(EnvironmentSetupError, match=r"gymnasium\.spaces\.Text"):
        check_inputs(of("CartPole-v1"))
    with pytest.raises(ConfigError, match=r"model.warm_start.conversations=null: scripted:.*has no demonstrator"):
        check_inputs(of("scripted:scripted/Counting-v0"))


def test_a_run_that_goes_on_does_not_need_its_conversations_any_more(tmp_path):
    check_inputs(config(f"model.warm_start.conversations={tmp_path / 'none'}", "run.resume=true"))


def test_a_model_folder_that_does_not_fit_is_found(tmp_path):
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        check_inputs(config(f"model.path={tmp_path}"))
    with pytest.raises(ConfigError, match=r"sampler.context_length=216: .*made for 128 tokens"):
        check_inputs(config(model_folder(tmp_path, max_position_embeddings=128)))
    with pytest.raises(ConfigError, match=r"its tokenizer has \d+ tokens, its model vocab_size=9"):
        check_model_folder(config(model_folder(tmp_path, vocab_size=9)))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ChatError, match=r"tokenizer\.json"):
        check_model_folder(config(f"model.path={tmp_path}"))


def test_a_folder_without_adapters_or_with_others_is_found(tmp_path):
    base, warm_start = model_folder(tmp_path), "model.warm_start=null"
    adapters = f"model.lora={{rank: 4, alpha: 8, path: {tmp_path}}}"
    with pytest.raises(ModelError, match=r"model\.lora\.path: .* holds no adapter_config\.json; expected a folder of"):
        check_inputs(config(base, warm_start, adapters))
    about = {"r": 4, "lora_alpha": 8, "target_modules": list(LoraConfig(rank=4, alpha=8).targets)}
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    check_inputs(config(base, warm_start, adapters))
    (tmp_path / "adapter_config.json").write_text(json.dumps(about | {"r": 2}))
    with pytest.raises(ModelError, match=r"model\.lora\.path=.*: its rank is 2, alpha 8 and targets q_proj, "):
        check_inputs(config(base, warm_start, adapters))


def test_a_server_that_nobody_hears_from_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        servers = ("sampler.kind=sglang", "sampler.transport=folder", "sampler.weights_folder=/w")
        check_sampler(config(*servers, f"sampler.urls=[{url}]"))
    with pytest.raises(ConfigError, match=f"sampler.urls={url}: nobody answers there .*; start the SGLang server"):
        check_sampler(config(*servers, f"sampler.urls=[{url}]"))


def test_looking_at_inputs_needs_neither_jax_nor_ray():
    script = (
        "import sys; from pathlib import Path; from cluster.loading import load_config; "
        "from cluster.inputs import check_inputs\n"
        "check_inputs(load_config(Path('configs/quickstart.yaml')))\n"
        "print(sorted({'jax', 'ray', 'flax', 'redis'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
