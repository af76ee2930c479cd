"""``headrace train`` as a person runs it: real Redis, Ray, sampler, workers and learner, on a small model."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from jobs import assert_groups_add_up, processes_naming, read_records, read_summary, start_train, wait_until
from safetensors.numpy import load_file


def test_a_run_trains_evaluates_and_leaves_nothing_behind(train, tmp_path):
    done = train("learner.steps=4", "run.name=once", "sampler.transport=shared_memory")
    assert done.returncode == 0, done.stderr + done.stdout
    folder, summary = tmp_path / "once", read_summary(tmp_path / "once")
    assert summary["steps"] == summary["version"] == 4
    assert summary["episodes_evaluated"] == 16
    assert 0 <= summary["success_before"] <= 1 and 0 <= summary["success_after"] <= 1
    assert summary["staleness_max_trained"] <= summary["staleness_limit"] == 2
    assert summary["compilations_after_warmup"] == 0
    assert summary["agreement"]["checks"] > 0 and summary["agreement"]["worst"]["max"] <= 1e-4
    assert summary["groups"]["acked"] == 8
    assert 0 <= summary["swaps"]["count"] <= 4  # as the sampler last told: all may have been in less than a second
    assert_groups_add_up(summary["groups"])
    for name in ("config.yaml", "learning_curve.png", "model/model.safetensors", "model/tokenizer.json", "checkpoints"):
        assert (folder / name).exists(), name
    assert "success before" in done.stdout and "success after" in done.stdout
    assert not done.stderr
    assert processes_naming(tmp_path) == []
    run_id = (folder / "run_id").read_text().strip()
    assert not list(Path("/dev/shm").glob(f"headrace-{run_id}-*")), "published weights stay in memory"


@pytest.mark.slow
def test_trained_adapters_are_left_merged_and_by_themselves(train, tmp_path):
    done = train("learner.steps=4", "run.name=adapted", "model.lora={rank: 4, alpha: 8}", "objective.entropy_bonus=0.2")
    assert done.returncode == 0, done.stderr + done.stdout
    folder, summary = tmp_path / "adapted", read_summary(tmp_path / "adapted")
    assert summary["compilations_after_warmup"] == 0
    assert summary["agreement"]["checks"] > 0 and summary["agreement"]["worst"]["max"] <= 1e-4
    about = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(folder / "initial_model")
    base, merged, adapter = (
        load_file(folder / name)
        for name in (
            "initial_model/model.safetensors",
            "model/model.safetensors",
            "adapter/adapter_model.safetensors",
        )
    )
    changed = set()
    for name, weight in base.items():
        wrapped = "base_model.model." + name.removesuffix(".weight")
        if f"{wrapped}.lora_A.weight" in adapter:
            change = 8 / 4 * (adapter[f"{wrapped}.lora_B.weight"] @ adapter[f"{wrapped}.lora_A.weight"])
            if change.any():
                changed.add(name.split(".")[-2])
        else:
            change = 0.0
        np.testing.assert_allclose(merged[name], weight + change, atol=1e-6, err_msg=name)
    assert changed == set(about["target_modules"])

    other = train("learner.steps=5", "run.name=adapted", "run.resume=true", "model.lora={rank: 8, alpha: 8}")
    assert other.returncode == 2
    assert "model.lora.rank=8: the run in" in other.stderr and "was started with 4" in other.stderr
    again = train("learner.steps=5", "run.name=adapted", "run.resume=true", "model.lora={rank: 4, alpha: 8}")
    assert again.returncode == 0, again.stderr + again.stdout
    assert "going on from the checkpoint of step 4" in again.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_samples_with_sglang_jax(train, tmp_path):
    done = train(
        "learner.steps=3", "run.name=other", "sampler.kind=sglang_jax", "sampler.slots=8", timeout=850
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    summary = read_summary(tmp_path / "other")
    assert (summary["sampler"], summary["steps"]) == ("sglang_jax", 3)
    assert summary["compilations_after_warmup"] == 0
    assert summary["agreement"]["checks"] > 0 and summary["agreement"]["worst"]["max"] <= 1e-4
    assert_groups_add_up(summary["groups"])
    assert processes_naming(tmp_path) == []


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.7])
def test_without_staleness_every_trained_token_was_sampled_by_the_policy_that_trains_on_it(
    train, tmp_path, temperature
):
    done = train(
        "learner.steps=3", "run.name=sync", "buffer.max_staleness=0", f"sampler.temperature={temperature}",
        "learner.optimizer.learning_rate=0.01", "task.eval_tasks=1",
        "learner.agreement.every_steps=1",
        "objective.entropy_bonus=0", "objective.entropy_cap=null",  # groups of equal rewards are left out
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    steps = read_records(tmp_path / "sync")
    assert [record["version"] for record in steps] == [0, 1, 2]
    for record in steps:
        assert record["staleness_max"] == 0
        assert record["tokens_staleness_0"] == record["trained_tokens"] == record["agreement_tokens"]
        assert record["agreement_version"] == record["version"] and "agreement_alarm" not in record
        assert record.get("agreement_max", 0) <= 1e-4
        assert abs(record["ratio_max"] - 1) <= 1e-4 or not record["trained_tokens"]
    assert any(record["trained_tokens"] for record in steps), "no group had a gradient: the test shows nothing"


@pytest.mark.slow
@pytest.mark.timeout(900)  # three runs
def test_values_of_states_train_a_policy_on_groups_of_one_and_go_on_with_their_head(train, tmp_path):
    overrides = (
        "run.name=values", "objective.advantage=gae", "objective.discount=0.9", "buffer.group_size=1",
        "buffer.groups_per_batch=8", "task.eval_tasks=1",
    )  # fmt: skip
    done = train("learner.steps=3", *overrides)
    assert done.returncode == 0, done.stderr + done.stdout
    folder = tmp_path / "values"
    records = read_records(folder)
    assert records[0]["value_mean"] == 0 and all(record["value_mean"] != 0 for record in records[1:])
    assert all(record["trained_tokens"] > 0 and record["skipped_tokens"] == 0 for record in records)
    assert all(record["compilations_after_warmup"] == 0 for record in records)
    assert read_summary(folder)["agreement"]["worst"]["max"] <= 1e-4, "the samplers got another policy"
    head = folder / "model" / "value_head" / "value_head.safetensors"
    assert all(tensor.any() for tensor in load_file(head).values())

    done = train("learner.steps=5", "run.resume=true", *overrides)
    assert done.returncode == 0, done.stderr + done.stdout
    assert [record["step"] for record in read_records(folder)] == [1, 2, 3, 4, 5]
    assert read_records(folder)[3]["value_mean"] != 0

    done = train("learner.steps=1", *overrides[1:], f"model.path={folder / 'model'}", "model.warm_start=null")
    assert done.returncode == 0, done.stderr + done.stdout
    assert read_records(tmp_path / "quickstart-1")[0]["value_mean"] != 0, "the head of the model was not read"


def test_a_stopped_run_is_saved_and_goes_on_where_it_was(train, tmp_path):
    running = start_train(tmp_path, "run.name=stopped")
    try:
        folder = tmp_path / "stopped"
        wait_until(lambda: (folder / "metrics.jsonl").exists() and len(read_records(folder)) >= 3, running)
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 130, output
    assert "Traceback" not in output
    assert "run.resume=true" in output
    assert processes_naming(tmp_path) == []
    before = read_summary(folder)
    assert_groups_add_up(before["groups"])

    more = before["steps"] + 2
    done = train("run.name=stopped", "run.resume=true", f"learner.steps={more}")
    assert done.returncode == 0, done.stderr + done.stdout
    after = read_summary(folder)
    assert f"going on from the checkpoint of step {before['steps']}" in done.stdout
    assert after["steps"] == more
    assert [record["step"] for record in read_records(folder)] == list(range(1, more + 1))
    versions = [record["version"] for record in read_records(folder)]
    assert versions == sorted(set(versions)), "a policy version was used twice"
    assert after["groups"]["acked"] == 2 * more, "a group was trained twice or lost"
    assert_groups_add_up(after["groups"])


@pytest.mark.slow
def test_a_run_whose_sampler_disagrees_with_the_learner_says_so_ends_and_can_go_on(train, tmp_path):
    limit = ("learner.agreement.max_mean=1e-5", "learner.agreement.on_alarm=stop")
    done = train("learner.steps=20", "run.name=apart", "learner.precision=bfloat16", *limit)
    assert done.returncode == 1, done.stderr + done.stdout
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("headrace: error: sampler and learner disagree about version 0: the mean difference is ")
    assert "more than 1e-05 (learner.agreement.max_mean)" in line and "; sampled by sampler-0 (" in line
    assert "learner.agreement.on_alarm=stop ended the run, go on with: " in line
    assert "alarm 1, step " in done.stdout
    summary = read_summary(tmp_path / "apart")
    assert summary["agreement"]["alarms"] == 1 and 1e-5 < summary["agreement"]["last"]["mean"] < 0.03
    assert summary["groups"]["acked"] == 2 * summary["steps"] > 0
    assert_groups_add_up(summary["groups"])
    assert processes_naming(tmp_path) == []
    steps = summary["steps"] + 2
    done = train(f"learner.steps={steps}", "run.name=apart", "run.resume=true")
    assert done.returncode == 0, done.stderr + done.stdout
    assert read_summary(tmp_path / "apart")["steps"] == steps
