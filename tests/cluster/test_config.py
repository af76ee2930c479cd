import ast
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from annotated_types import Ge, Le
from pydantic import BaseModel

from buffer.protocol import Keys, Limits
from cluster.config import BufferConfig, Config
from cluster.errors import ConfigError
from cluster.loading import check, load_config, to_yaml

ROOT = Path(__file__).parent.parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def complaint(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(QUICKSTART, overrides)
    return str(raised.value)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid(path):
    assert load_config(path).run.experiment == path.stem


def test_the_printed_configuration_loads_to_the_same_configuration(tmp_path):
    config = load_config(QUICKSTART, ["learner.steps=7", "run.name=x"])
    (tmp_path / "again.yaml").write_text(to_yaml(config.redacted()))
    assert load_config(tmp_path / "again.yaml") == config


def test_overrides_reach_the_last_word_over_the_file():
    config = load_config(QUICKSTART, ["learner.steps=7", "environment.kwargs.size=8", "learner.row_lengths=[512]"])
    assert config.learner.steps == 7
    assert config.environment.kwargs["size"] == 8
    assert config.learner.row_lengths == (512,)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("learner.stps=5", ("learner.stps=5", "no such key", "did you mean learner.steps?")),
        ("lerner.steps=5", ("lerner=", "no such key", "did you mean learner?")),
        ("group_size=8", ("group_size=8", "no such key", "did you mean buffer.group_size?")),
        ("learner.zzz=5", ("learner.zzz=5", "no such key", "learner has steps, mesh, processes, resources")),
        ("learner.steps=abc", ('learner.steps="abc"', "expected an integer")),
        ("learner.steps=1.5", ("learner.steps=1.5", "expected an integer")),
        ("learner.steps=true", ("learner.steps=true", "expected an integer")),
        ("learner.steps=0", ("learner.steps=0", "expected at least 1", "Optimizer steps")),
        ("learner.steps=", ("learner.steps=null", "expected an integer")),
        ("learner.optimizer=null", ("learner.optimizer=null", "expected a section")),
        ("learner=5", ("learner=5", "expected a section")),
        ("sampler.temperature=0", ("sampler.temperature=0", "expected more than 0")),
        ("objective.advantage=ppo", ('objective.advantage="ppo"', "expected 'grpo', 'dr_grpo',", "'gae' or 'vtrace'")),
        ("objective.name=ppo", ('objective.name="ppo"', "'dppo', 'decoupled_ppo' or 'reinforce'")),
        ("objective.clip_low=2", ("objective.clip_low=2", "expected at most 1")),
        ("objective.icepop.low=0.5", ("objective.icepop.high: missing", "Highest ratio that is kept")),
        ("objective.icepop={low: 1.5, high: 5}", ("objective.icepop.low=1.5", "expected less than 1")),
        ("objective.reference.weight=0", ("objective.reference.weight=0", "expected more than 0")),
        ("objective.truncation.cap=0.5", ("objective.truncation.cap=0.5", "expected at least 1")),
        ("model.lora.rank=8", ("model.lora.alpha: missing", "Adapters act by alpha ÷ rank")),
        ("model.lora={rank: 0, alpha: 16}", ("model.lora.rank=0", "expected at least 1", "Inner size")),
        ("model.lora={rank: 8, alpha: 0}", ("model.lora.alpha=0", "expected more than 0")),
        ("model.lora={rank: 8, alpha: 16, targets: []}", ("model.lora.targets=[]", "at least 1 item")),
        (
            "model.lora={rank: 8, alpha: 16, targets: [q_proj, lm_head]}",
            (
                'model.lora.targets.1="lm_head"',
                "expected 'q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj'",
            ),
        ),
        ("learner.resources={TPU: 0}", ("learner.resources.TPU=0", "expected more than 0")),
        ("learner.resources={TPU: 3}", ("learner.resources=", "expected 1, 2, 4 or 8 TPU chips")),
        ("learner.resources={CPU: 2}", ("learner.resources=", "other than CPU", "`cpus`")),
        ("learner.resources={GPU: 1}", ("learner.resources=", "expected TPU or resources of your own")),
        ("learner.row_lengths=144", ("learner.row_lengths=144", "expected a list")),
        ("learner.row_lengths=[]", ("learner.row_lengths=[]", "at least 1 item")),
        ("learner.row_lengths=[256,128]", ("learner.row_lengths=[256, 128]", "ascending order")),
        ("learner.agreement.every_steps=-1", ("learner.agreement.every_steps=-1", "expected at least 0")),
        ("learner.agreement.max_mean=0", ("learner.agreement.max_mean=0", "expected more than 0")),
        ("learner.agreement.max_outside_fraction=2", ("max_outside_fraction=2", "expected at most 1")),
        ("learner.agreement.on_alarm=shout", ('learner.agreement.on_alarm="shout"', "expected 'warn' or 'stop'")),
        ("run.name=a/b", ('run.name="a/b"', "expected 1 to 100 of the characters")),
        ("run.name=my run", ('run.name="my run"', "expected 1 to 100 of the characters")),
        ("run.name='a*b'", ('run.name="a*b"', "expected 1 to 100 of the characters")),
        ("run.name='..'", ('run.name=".."', "expected 1 to 100 of the characters")),
        (f"run.name={'x' * 101}", ("run.name=", "expected 1 to 100 of the characters")),
        ("run.experiment='my runs'", ('run.experiment="my runs"', "expected 1 to 100 of the characters")),
        ("buffer.url=localhost:6379", ("buffer.url=", "redis://")),
        ("buffer.url=redis://h:x/0", ('buffer.url="redis://h:x/0"', "redis://:password@host:6379/0")),
        ("buffer.url=redis://h:99999/0", ('buffer.url="redis://h:99999/0"', "redis://:password@host:6379/0")),
        ("buffer.url=redis://h:1/zero", ('buffer.url="redis://h:1/zero"', "redis://:password@host:6379/0")),
        ("buffer.url=redis://:***@h:1/0", ("buffer.url=", "give the URL with its password")),
        ("buffer.group_size=1025", ("buffer.group_size=1025", "expected at most 1024")),
        ("buffer.groups_per_batch=4097", ("buffer.groups_per_batch=4097", "expected at most 4096")),
        ("buffer.slot_seconds=0.0001", ("buffer.slot_seconds=0.0001", "expected at least 0.001")),
        ("buffer.slot_seconds=2e9", ("buffer.slot_seconds=2000000000.0", "expected at most 1000000")),
        ("buffer.max_attempts=1000001", ("buffer.max_attempts=1000001", "expected at most 1000000")),
        ("learner.lease_timeout_seconds=.inf", ("learner.lease_timeout_seconds=", "expected a finite number")),
        ("sampler.kind=vllm", ('sampler.kind="vllm"', "'local', 'sglang_jax' or 'sglang'")),
        ("sampler.urls=[gpu-0:30000]", ("sampler.urls", "http://gpu-0:30000")),
        ("sampler.sort=local", ('sampler.sort="local"', "no such key")),
        ("learner.mesh.pipeline=1", ("learner.mesh.pipeline=1", "no such key")),
        ("learner.steps", ("learner.steps", "expected key=value")),
        ("learner.steps=[1", ("learner.steps=[1", "not valid YAML")),
        ("agent.system_prompt=${oc.env:HEADRACE_NO_SUCH_VARIABLE}", ("HEADRACE_NO_SUCH_VARIABLE", "not found")),
    ],
)
def test_a_mistake_is_named_with_what_was_expected(override, parts):
    message = complaint(override)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["agent.stop=['']"], ("agent.stop", "not empty")),
        (["evaluation.top_p=0.9"], ("evaluation.top_p=0.9", "evaluation.temperature=0 is greedy")),
        (["sampler.top_p=0.9"], ("sampler.top_p=0.9", "no such key", "evaluation.top_p")),
        (
            [
                "sampler.kind=sglang",
                "sampler.urls=[http://gpu-0:30000]",
                "sampler.transport=folder",
                "sampler.weights_folder=/w",
                "evaluation={temperature: 1.0, min_p: 0.1}",
            ],
            ("evaluation.min_p=0.1", "unfiltered", "sampler.kind=local or sglang_jax"),
        ),
        (["sampler.tokens_in_flight=215"], ("sampler.tokens_in_flight=215", "sampler.context_length=216")),
        (["task.eval_seed_start=1000010"], ("task.eval_seed_start=1000010", "overlap", "1000000..1999999")),
        (["agent.max_tokens_per_turn=216"], ("agent.max_tokens_per_turn=216", "sampler.context_length=216")),
        (["sampler.context_length=400"], ("learner.row_lengths=[144, 216]", "sampler.context_length=400")),
        (["model.architecture.max_position_embeddings=64"], ("max_position_embeddings=64", "at least", "216")),
        (
            ["learner.agreement.every_steps=0", "learner.agreement.on_alarm=stop"],
            ("learner.agreement.on_alarm=stop", "every_steps=0 checks nothing", "leave it out"),
        ),
        (["buffer.group_size=1"], ("buffer.group_size=1", "grpo", "at least 2", "reinforce, gae or vtrace")),
        (["objective.value.decay=0.9"], ("objective.value.decay=0.9", "grpo has no value head", "null", "vtrace")),
        (["objective.value.gradient=head"], ("objective.value.gradient=head", "no value head", "use gae or vtrace")),
        (
            ["objective.advantage=vtrace", "objective.name=reinforce", "objective.truncation.cap=3"],
            ("objective.truncation.cap=3", "vtrace", "weighted twice", "use gae"),
        ),
        (["learner.processes=2"], ("learner.processes=2", "fsdp = 1", "a divisor of it, or a larger mesh")),
        (
            ["learner.processes=2", "learner.mesh.data=2", "objective.zero_variance=refill"],
            ("objective.zero_variance=refill", "learner.processes=2", "use objective.zero_variance=drop"),
        ),
        (
            ["learner.processes=2", "learner.mesh.data=2", "objective.advantage=reinforce"],
            ("objective.advantage=reinforce", "learner.processes=2", "mean of its own shard", "use gae or vtrace"),
        ),
        (["sampler.tensor=2"], ("sampler.tensor=2", "sampler.kind=local does not read it", "sampler.kind=sglang_jax")),
        (["sampler.precision=bfloat16"], ("sampler.precision=bfloat16", "local does not read it")),
        (["sampler.urls=[http://a:1]"], ("sampler.urls=['http://a:1']", "local does not read it", "kind=sglang")),
        (["sampler.kind=sglang"], ("sampler.urls=[]", "sampler.kind=sglang needs", "set them")),
        (["sampler.transport=folder"], ("sampler.weights_folder=null", "sampler.transport=folder needs one")),
        (["sampler.weights_folder=/w"], ("sampler.weights_folder=/w", "object_store does not use one")),
        (["sampler.stall_seconds=500"], ("sampler.stall_seconds=500", "learner.publish_timeout_seconds=60, 3 times")),
        (
            ["sampler.on_update=drain", "sampler.request_timeout_seconds=300"],
            ("sampler.request_timeout_seconds=300", "on_update=drain", "learner.publish_timeout_seconds=60, 3 times"),
        ),
        (
            ["sampler.kind=sglang", "sampler.urls=[http://a:1]"],
            ("sampler.transport=object_store", "use sampler.transport=folder"),
        ),
        (
            [
                "sampler.kind=sglang",
                "sampler.urls=[http://a:1,http://a:1]",
                "sampler.weights_folder=/w",
                "sampler.transport=folder",
            ],
            ("sampler.urls=['http://a:1', 'http://a:1']", "twice"),
        ),
        (
            [
                "sampler.kind=sglang",
                "sampler.urls=[http://a:1]",
                "sampler.weights_folder=/w",
                "sampler.transport=folder",
                "sampler.on_update=continue",
            ],
            ("sampler.on_update=continue", "use recompute or drain"),
        ),
        (
            [
                "sampler.kind=sglang",
                "sampler.urls=[http://a:1]",
                "sampler.weights_folder=/w",
                "sampler.transport=folder",
                "sampler.replicas=2",
            ],
            ("sampler.replicas=2", "sglang does not read it"),
        ),
        (
            ["sampler.kind=sglang_jax", "model.architecture.head_dim=64"],
            ("model.architecture.head_dim=64", "multiples of 128"),
        ),
        (["learner.mesh.data=3"], ("learner.rows_per_microbatch=8", "multiple of 3")),
        (
            ["model.lora={rank: 4, alpha: 8, path: /x}"],
            ("model.lora.path=/x", "model.path=null makes a new one", "set model.path to that model"),
        ),
        (
            ["model.lora={rank: 4, alpha: 8, path: /x}", "model.path=/y"],
            ("model.lora.path=/x", "model.path=/y would be changed by model.warm_start", "model.warm_start to null"),
        ),
        (["model.architecture=null"], ("model.path=null", "model.architecture is null")),
        (["model.architecture.num_key_value_heads=3"], ("num_attention_heads=2", "multiple of")),
        (["objective.name=gspo", "objective.dual_clip=3"], ("objective.dual_clip=3", "gspo does not read", "ppo_clip")),
        (["objective.name=dppo", "objective.clip_high=1"], ("objective.clip_high=1", "dppo does not read", "cispo")),
        (["objective.divergence=0.1"], ("objective.divergence=0.1", "ppo_clip does not read", "use dppo")),
        (["objective.proximal=recomputed"], ("objective.proximal=recomputed", "use decoupled_ppo")),
        (
            ["objective.truncation.cap=3"],
            ("objective.truncation.cap=3", "weighted twice", "reinforce or decoupled_ppo"),
        ),
        (["objective.sequence_tokens=9"], ("objective.sequence_tokens=9", "token_mean", "both or neither")),
        (["objective.aggregation=sequence_sum"], ("objective.sequence_tokens=null", "sequence_sum", "both or neither")),
        (
            ["objective.advantage=rloo", "objective.credit=turn"],
            ("objective.credit=turn", "rloo", "objective.credit=trajectory"),
        ),
        (
            ["objective.advantage=gae", "objective.credit=turn"],
            ("objective.credit=turn", "advantage=gae does not read it", "leave it out"),
        ),
        (
            ["objective.discount=0.9"],
            ("objective.discount=0.9", "credit=trajectory", "set it to 1", "objective.credit=turn", "gae or vtrace"),
        ),
        (["objective.overlong.limit=9"], ("objective.overlong.limit=9", "treatment=penalty", "keep", "null")),
        (["objective.overlong.treatment=penalty"], ("objective.overlong.buffer=null", "use 1 to 216")),
        (
            ["objective.overlong={treatment: penalty, buffer: 8, limit: 500}"],
            ("objective.overlong.limit=500", "sampler.context_length=216", "at most"),
        ),
        (
            ["objective.overlong={treatment: penalty, buffer: 101, limit: 100}"],
            ("objective.overlong.buffer=101", "use 1 to 100"),
        ),
        (
            ["objective.advantage=reinforce", "objective.zero_variance=drop"],
            ("objective.zero_variance=drop", "advantage=reinforce", "use keep"),
        ),
        (
            ["objective.advantage=gae", "objective.zero_variance=refill"],
            ("objective.zero_variance=refill", "advantage=gae", "use keep"),
        ),
        (["objective.refill_leases=1"], ("objective.refill_leases=1", "zero_variance=refill", "keep", "null")),
        (
            ["objective.zero_variance=refill", "buffer.max_staleness=0"],
            ("objective.zero_variance=refill", "buffer.max_staleness=0", "use drop"),
        ),
        (
            ["objective.zero_variance=refill", "objective.refill_leases=3"],
            ("objective.refill_leases=3", "max_staleness + 1 = 3 batches", "at most 2"),
        ),
        (["objective.entropy_bonus=0"], ("objective.entropy_cap=0.5", "entropy_bonus, which is 0", "null")),
        (["buffer.url=redis://h:1", "buffer.port=7"], ("buffer.port=7", "buffer.url")),
        (["buffer.payload_urls=['redis://h:2']"], ("buffer.payload_urls=1 URLs", "buffer.url is null")),
        (["buffer.url=redis://h:1", "buffer.host=10.0.0.1"], ("buffer.host=10.0.0.1", "buffer.url")),
        (["buffer.min_group_size=9"], ("buffer.min_group_size=9", "at most buffer.group_size=8")),
        (["buffer.order=uniform", "buffer.look_ahead=3"], ("buffer.look_ahead=3", "buffer.order=uniform")),
        (["buffer.max_staleness=0", "buffer.max_uses=2"], ("buffer.max_uses=2", "buffer.max_staleness=0")),
        (["buffer.max_bytes=1000"], ("buffer.max_bytes=1000", "16 × 8", "never be complete")),
        (  # the arrays alone would fit
            [f"buffer.max_bytes={16 * 8 * 216 * 13}"],
            (f"buffer.max_bytes={16 * 8 * 216 * 13}", f"may take {16 * 8 * (216 * 13 + 1024)} bytes"),
        ),
    ],
)
def test_an_impossible_combination_is_refused_with_its_remedy(overrides, parts):
    message = complaint(*overrides)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_each_mistake_gets_a_line_of_its_own():
    lines = complaint("learner.steps=0", "sampler.slots=x", "buffer.sise=3").splitlines()
    assert [line.partition("=")[0] for line in lines] == ["sampler.slots", "buffer.sise", "learner.steps"]


def test_a_missing_key_is_named(tmp_path):
    text = QUICKSTART.read_text()
    (tmp_path / "x.yaml").write_text(re.sub(r"  max_turns: .*\n", "", text))
    with pytest.raises(ConfigError, match=r"^agent.max_turns: missing; set it \(Most turns of an episode"):
        load_config(tmp_path / "x.yaml")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        load_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("run:\n  name: [x\n", r"x.yaml:3:1: not valid YAML"),
        ("a: 1\na: 2\n", r"x.yaml:2:1: .*duplicate key"),
        ("- 1\n", "sections"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_named_with_the_line(tmp_path, text, where):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=where):
        load_config(tmp_path / "x.yaml")


def test_a_password_is_never_shown():
    url = "redis://user:hunter2@host:6379/0"
    redacted = load_config(QUICKSTART, [f"buffer.url={url}"]).redacted()
    assert redacted["buffer"]["url"] == "redis://user:***@host:6379/0"
    assert "hunter2" not in complaint("buffer.url=http://user:hunter2@host:6379/0")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("unix:///run/redis.sock?db=1&password=hunter2", "unix:///run/redis.sock?db=1&password=***"),
        ("redis://:hunter2@h:1/0?protocol=3", "redis://:***@h:1/0?protocol=3"),
        ("redis://host:6379", "redis://host:6379"),
    ],
)
def test_all_of_a_url_but_the_password_is_shown(url, shown):
    assert load_config(QUICKSTART, [f"buffer.url='{url}'"]).redacted()["buffer"]["url"] == shown


@pytest.mark.parametrize("password", ["hun/ter2", "hun#ter2", "hun?ter2", "12#ter2", "12?ter2", "[ter2", "*/ter2"])
def test_a_password_that_breaks_its_url_is_not_shown_either(password):
    message = complaint(f"buffer.url='redis://u:{password}@host:6379/0'")
    assert "%2F" in message and "ter2" not in message


@pytest.mark.parametrize(
    ("file", "experiment"),
    [("my config.yaml", "my-config"), ("a*b.yaml", "a-b"), ("é.yaml", "run"), (f"{'x' * 200}.yaml", "x" * 100)],
)
def test_the_experiment_is_named_after_the_file_in_letters_that_a_run_may_have(tmp_path, file, experiment):
    (tmp_path / file).write_text(QUICKSTART.read_text())
    assert load_config(tmp_path / file).run.experiment == experiment


def test_the_longest_name_is_one_that_the_buffer_takes():
    config = load_config(QUICKSTART, [f"run.name={'x' * 100}", f"run.experiment={'x' * 100}"])
    Keys(f"{config.run.name}-01234567")
    Keys(f"{config.run.experiment}-{10**6}-01234567")


@pytest.mark.parametrize(
    "name",
    [
        "max_staleness",
        "max_age_seconds",
        "groups_per_batch",
        "group_size",
        "max_bytes",
        "slot_seconds",
        "max_attempts",
        "max_uses",
    ],
)
def test_the_buffer_takes_whatever_the_schema_takes(name):
    [least] = [bound.ge for bound in BufferConfig.model_fields[name].metadata if isinstance(bound, Ge)]
    [most] = [bound.le for bound in BufferConfig.model_fields[name].metadata if isinstance(bound, Le)]
    some = {field.name: 1 for field in fields(Limits) if field.default is MISSING}
    for value in (least, most):
        Limits(**some | {name: value})


@pytest.mark.parametrize("key", ["model.path", "model.warm_start.conversations"])
def test_a_path_is_absolute_because_actors_have_another_working_directory(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")

    def resolved(value: str) -> str:
        data = load_config(QUICKSTART, [f"{key}={value}"]).redacted()
        for part in key.split("."):
            data = data[part]
        return str(data)

    assert resolved("models/mine") == str(tmp_path / "models" / "mine")
    assert resolved("~/mine") == "/home/somebody/mine"
    assert resolved("/elsewhere/mine") == "/elsewhere/mine"


def test_the_configuration_cannot_be_changed():
    config = load_config(QUICKSTART)
    with pytest.raises(ValueError, match="frozen"):
        config.learner.steps = 3


def sections(model: type[BaseModel] = Config, name: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield name, model
    for field, info in model.model_fields.items():
        for option in getattr(info.annotation, "__args__", (info.annotation,)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from sections(option, field)


def test_every_option_has_a_description():
    bare = [
        f"{model.__name__}.{field}"
        for _, model in sections()
        for field, info in model.model_fields.items()
        if not info.description
    ]
    assert not bare


def test_every_option_is_read_by_something():
    """An attribute of its name is read in cluster/, or its whole section is dumped into keyword arguments."""
    read: set[str] = set()
    dumped: set[str] = set()
    for path in (ROOT / "cluster").glob("*.py"):
        if path.name in ("config.py", "combinations.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
                if node.attr == "model_dump" and isinstance(node.value, ast.Attribute | ast.Name):
                    dumped.add(node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id)
    unread = [
        f"{name}.{field}"
        for name, model in sections()
        if name not in dumped
        for field in model.model_fields
        if field not in read
    ]
    assert not unread


def test_plain_data_is_checked_the_same_way():
    with pytest.raises(ConfigError, match="agent: missing"):
        check({})
