"""What the SGLang-Jax engine promises beyond the contract."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from sampler_examples import CONFIG, TOLERANCE, Reference, Served, make_weights
from sglang_engine import finish, make_engine, publish

from actors.samplers.contract import RequestError, SamplerError, SamplingParams, UpdateError
from actors.samplers.publication import Publication
from actors.samplers.sglang.engine import SglangEngine
from actors.samplers.sglang.release import ReleaseError
from actors.samplers.sglang.sampler import SglangJaxSampler
from learner.models.config import RopeScaling, write_config


def test_turns_reuse_keys_of_their_own_version_and_no_other(engine: SglangEngine, random: np.random.Generator) -> None:
    old = publish(engine, 0)
    prompt_P = random.integers(0, CONFIG.vocab_size, 50)
    (first,) = finish(engine, [engine.submit(prompt_P, SamplingParams(max_tokens=4))])
    turn_P = np.concatenate([prompt_P, first.tokens, [1, 2, 3]])

    def reused() -> int:
        before = engine.counters.tokens_reused
        (generation,) = finish(engine, [engine.submit(turn_P, SamplingParams(max_tokens=4))])
        weights = {old: make_weights(0), old + 1: make_weights(1)}
        assert Reference(weights).worst_difference(turn_P, generation) <= TOLERANCE
        return engine.counters.tokens_reused - before

    assert reused() == 53  # the last sampled token has no keys yet
    publish(engine, 1)
    assert reused() == 0
    assert reused() == 56  # all but the last token, which has to be run


@pytest.fixture(scope="module")
def continuing(tmp_path_factory: pytest.TempPathFactory) -> SglangEngine:
    """Keys stay for requests in flight; the last test here ends it."""
    return make_engine(tmp_path_factory.mktemp("continuing"), slots=2, on_update="continue")


def test_continue_keeps_the_keys_of_requests_in_flight_and_gives_them_to_no_later_one(
    continuing: SglangEngine,
) -> None:
    engine = continuing
    old = publish(engine, 0)
    number = engine.submit([3] * 60, SamplingParams(max_tokens=30))
    for _ in range(10):
        engine.step()
    prefilled = engine.counters.tokens_prefilled
    new = publish(engine, 1)
    (mixed,) = finish(engine, [number])
    assert set(mixed.versions.tolist()) == {old, new}
    assert engine.counters.tokens_prefilled == prefilled
    turn_P = np.concatenate([[3] * 60, mixed.tokens, [1, 2, 3]])
    reused = engine.counters.tokens_reused
    (later,) = finish(engine, [engine.submit(turn_P, SamplingParams(max_tokens=5))])
    assert engine.counters.tokens_reused == reused
    assert Reference({new: make_weights(1)}).worst_difference(turn_P, later) <= TOLERANCE


def test_long_prompts_are_prefilled_in_chunks_and_survive_an_update_between_two(
    engine: SglangEngine, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._scheduler, "chunked_prefill_size", 32)
    publish(engine, 0)
    prompts = random.integers(0, CONFIG.vocab_size, (3, 100))
    numbers = [engine.submit(prompt_P, SamplingParams(max_tokens=3)) for prompt_P in prompts]
    engine.step()
    engine.step()
    new = publish(engine, 1)
    for prompt_P, generation in zip(prompts, finish(engine, numbers), strict=True):
        assert set(generation.versions.tolist()) == {new}
        assert Reference({new: make_weights(1)}).worst_difference(prompt_P, generation) <= TOLERANCE


def test_a_request_aborted_between_two_chunks_leaves_nothing_behind(
    engine: SglangEngine, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._scheduler, "chunked_prefill_size", 32)
    publish(engine, 0)
    number = engine.submit(random.integers(0, CONFIG.vocab_size, 100), SamplingParams(max_tokens=3))
    engine.step()
    engine.abort(number)
    (generation,) = finish(engine, [number])
    assert len(generation.tokens) == 0
    assert (engine.running, engine.waiting) == (0, 0)
    for _ in range(3):
        engine.step()  # idle, it checks that no key is lost


def test_weights_are_copied_before_they_are_served(served_sglang_jax: Served) -> None:
    async def update_and_spoil() -> tuple[bytes, bytes]:
        served_sglang_jax.version += 1
        weights = make_weights(7)
        served_sglang_jax.weights[served_sglang_jax.version] = make_weights(7)
        await served_sglang_jax.sampler.update(Publication.of(served_sglang_jax.version, weights))
        params = SamplingParams(max_tokens=10, temperature=0.0)
        before = await served_sglang_jax.sampler.generate([1, 2, 3], params)
        for value in weights.values():
            value *= -1
        after = await served_sglang_jax.sampler.generate([1, 2, 3], params)
        return before.tokens.tobytes(), after.tokens.tobytes()

    before, after = served_sglang_jax.run(update_and_spoil())
    assert before == after


def test_many_in_one_call_come_back_as_they_end(served_sglang_jax: Served) -> None:
    requests = [([1, 2, 3], SamplingParams(max_tokens=length)) for length in (100, 1, 1, 2)]
    requests.insert(2, ([999], SamplingParams(max_tokens=1)))

    async def collect() -> list[list[tuple[int, object]]]:
        return [batch async for batch in served_sglang_jax.sampler.generate_many(requests)]

    batches = served_sglang_jax.run(collect())
    outcomes = dict(pair for batch in batches for pair in batch)
    assert isinstance(outcomes.pop(2), RequestError)
    assert {index: len(generation.tokens) for index, generation in outcomes.items()} == {0: 100, 1: 1, 3: 1, 4: 2}
    assert [index for index, _ in batches[-1]] == [0]


def test_a_version_that_is_none_is_refused(engine: SglangEngine) -> None:
    leaves = engine.prepare(make_weights(0))
    for version in (-1, "7", None):
        with pytest.raises(UpdateError, match="version is"):
            engine.swap(version, leaves)  # type: ignore[arg-type]


def test_a_model_that_is_not_served_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write_config(dataclasses.replace(CONFIG, head_dim=64), tmp_path, eos_token_id=None)
    with pytest.raises(ReleaseError, match="head_dim is 64"):
        SglangJaxSampler(model=tmp_path, slots=1, context_length=64, on_update="recompute", seed=0, name="sampler-0")


FAMILIES = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama with long rope": {
        "model_type": "llama",
        "rope_scaling": RopeScaling("llama3", factor=8.0, original_max_position_embeddings=64),
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3 with 3 layers": {"num_hidden_layers": 3, "num_key_value_heads": 4, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_every_family_equal_an_independent_forward_pass(
    tmp_path: Path, random: np.random.Generator, family: str
) -> None:
    config = dataclasses.replace(CONFIG, **FAMILIES[family])  # type: ignore[arg-type]
    weights = make_weights(0, config)
    engine = make_engine(tmp_path, slots=4, config=config)
    engine.swap(0, engine.prepare(weights))
    prompts = [random.integers(0, config.vocab_size, length) for length in (1, 30, 64, 100)]
    numbers = [engine.submit(prompt_P, SamplingParams(max_tokens=20, temperature=0.7)) for prompt_P in prompts]
    reference = Reference({0: weights}, config)
    for prompt_P, generation in zip(prompts, finish(engine, numbers), strict=True):
        assert reference.worst_difference(prompt_P, generation, 0.7) <= TOLERANCE


def test_weights_that_overflow_end_the_engine_with_a_reason(continuing: SglangEngine) -> None:
    weights = {name: value * np.float32(1e25 if "mlp" in name else 1) for name, value in make_weights(4).items()}
    continuing.swap((continuing.version or 0) + 1, continuing.prepare(weights))
    number = continuing.submit([1] * 20, SamplingParams(max_tokens=5))
    with pytest.raises(SamplerError, match="not finite"):
        finish(continuing, [number])
