"""Every repair of SGLang-Jax, shown to be needed: each of these fails without it."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_examples import CONTEXT, TOLERANCE, Reference, filtered_reference, make_weights
from scipy import special, stats
from sglang_engine import SLOTS, finish, publish

from actors.samplers.contract import SamplingParams, StopReason
from actors.samplers.sglang.corrections import correct_package, draw, sample
from actors.samplers.sglang.engine import SglangEngine
from actors.samplers.sglang.release import RELEASE, ReleaseError, check_model, check_release


def draws(
    sampler: Any,
    logits_V: np.ndarray,
    seeds_B: np.ndarray,
    position: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Tokens that ``sampler`` draws from softmax(logits / temperature) as filtered, one for each seed."""
    count = len(seeds_B)
    logits_BV = jnp.tile(jnp.asarray(logits_V), (count, 1))
    ones, whole, positions_B = (
        jnp.ones(count),
        jnp.full(count, 1 << 30, jnp.int32),
        jnp.full(count, position, jnp.int32),
    )
    temperatures_B1, top_ps_B, min_ps_B = ones[:, None] * temperature, ones * top_p, ones * min_p
    seeds_B = jnp.asarray(seeds_B, jnp.int32)
    if sampler is draw:
        return np.asarray(draw(logits_BV / temperatures_B1, seeds_B, positions_B, whole, top_ps_B, min_ps_B)[0])
    arguments = (
        logits_BV,
        jax.nn.softmax(logits_BV / temperatures_B1),
        whole,
        top_ps_B,
        min_ps_B,
        positions_B,
        temperatures_B1,
        seeds_B,
        min_p > 0,
        jax.random.key(0),
    )
    return np.asarray(sampler(arguments))


def fit(tokens: np.ndarray, logits_V: np.ndarray) -> float:
    """p-value of the hypothesis that ``tokens`` follow softmax(logits)."""
    expected_V = len(tokens) * special.softmax(logits_V.astype(np.float64))
    return float(stats.chisquare(np.bincount(tokens, minlength=len(logits_V)), expected_V).pvalue)


@pytest.mark.parametrize("seeds", ["neighbours", "random"])
def test_tokens_follow_the_stated_distribution(engine: SglangEngine, seeds: str) -> None:
    from sgl_jax.srt.layers.sampler import Sampler
    from sgl_jax.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_jax_with_mask as released

    random = np.random.default_rng(0)
    logits_V = random.standard_normal(16).astype(np.float32)
    seeds_B = np.arange(50_000) if seeds == "neighbours" else random.integers(-(2**31), 2**31, 50_000)
    assert Sampler._regular_sampling is sample, "the engine does not use the correction"
    assert min(fit(draws(draw, logits_V, seeds_B, position), logits_V) for position in (3, 4)) > 1e-4
    assert fit(draws(released, logits_V, seeds_B, 3), logits_V) < 1e-4, "the correction is needed no more"


@pytest.mark.parametrize(("temperature", "top_p", "min_p"), [(0.4, 0.8, 0.0), (1.0, 1.0, 0.2)])
def test_filters_keep_what_they_say(engine: SglangEngine, temperature: float, top_p: float, min_p: float) -> None:
    from sgl_jax.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_jax_with_mask as released

    logits_V = np.linspace(0, 2, 16, dtype=np.float32)
    scaled_V = special.log_softmax(logits_V / temperature)
    expected = set(np.flatnonzero(np.isfinite(filtered_reference(scaled_V, top_k=None, top_p=top_p, min_p=min_p))))
    filters = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    seeds_B = np.arange(5_000)
    assert set(draws(draw, logits_V, seeds_B, 3, **filters).tolist()) == expected
    assert set(draws(released, logits_V, seeds_B, 3, **filters).tolist()) != expected, (
        "no correction is needed any more"
    )


def test_the_rotary_frequencies_of_llama_3_1_are_used() -> None:
    correct_package()
    from sgl_jax.srt.layers.embeddings import Llama3RotaryEmbedding, RotaryEmbedding

    plain_F = RotaryEmbedding(128, 128, 8192, 500_000, True, jnp.float32)._inv_freq_np
    stretched_F = Llama3RotaryEmbedding(128, 128, 8192, 500_000, True, jnp.float32, 8.0, 1.0, 4.0, 8192)._inv_freq_np
    wavelength_F = 2 * np.pi / plain_F
    np.testing.assert_allclose(stretched_F[wavelength_F < 8192 / 4], plain_F[wavelength_F < 8192 / 4], rtol=1e-6)
    np.testing.assert_allclose(stretched_F[wavelength_F > 8192], plain_F[wavelength_F > 8192] / 8, rtol=1e-6)
    between = (wavelength_F > 8192 / 4) & (wavelength_F < 8192)
    assert between.any() and (stretched_F[between] < plain_F[between]).all()
    assert (np.diff(stretched_F) < 0).all()


def test_what_was_just_prefilled_survives_an_update(engine: SglangEngine) -> None:
    old = publish(engine, 0)
    number = engine.submit([3] * 20, SamplingParams(max_tokens=10))
    assert engine.step() == [], "a prefill that gives the first token"
    new = publish(engine, 1)
    (generation,) = finish(engine, [number])
    assert generation.versions.tolist() == [old] + 9 * [new]
    reference = Reference({old: make_weights(0), new: make_weights(1)})
    assert reference.worst_difference(np.array([3] * 20), generation) <= TOLERANCE


def test_a_full_batch_admits_again_after_an_update(engine: SglangEngine) -> None:
    publish(engine, 0)
    numbers = [engine.submit([token, 2, 3], SamplingParams(max_tokens=12)) for token in range(SLOTS + 3)]
    for _ in range(4):
        engine.step()
    assert (engine.running, engine.waiting) == (SLOTS, 3)
    engine._scheduler.running_batch.reqs_info[0].batch_is_full = True  # as when the cache has no room for another
    publish(engine, 1)
    assert [len(generation.tokens) for generation in finish(engine, numbers)] == [12] * (SLOTS + 3)


def test_the_whole_context_is_used(engine: SglangEngine) -> None:
    publish(engine, 0)
    numbers = [engine.submit([1] * length, SamplingParams(max_tokens=99)) for length in (CONTEXT - 1, CONTEXT - 4)]
    assert [len(generation.tokens) for generation in finish(engine, numbers)] == [1, 4]


def test_an_abort_ends_no_request_whose_name_begins_alike(engine: SglangEngine) -> None:
    publish(engine, 0)
    first = engine.submit([1], SamplingParams(max_tokens=40))
    engine._numbers = 10 * first  # a thousand requests later
    numbers = [engine.submit([1], SamplingParams(max_tokens=4)) for _ in range(10)]
    engine.abort(first)
    reasons = [generation.stop_reason for generation in finish(engine, [first, *numbers])]
    assert reasons == [StopReason.ABORTED] + 10 * [StopReason.LENGTH]


def test_a_thread_of_the_engine_that_fails_ends_no_other_process(
    engine: SglangEngine, caplog: pytest.LogCaptureFixture
) -> None:
    worker = engine._scheduler.tp_worker
    with caplog.at_level(logging.ERROR, logger="actors.samplers.sglang.corrections"):
        worker.sync_queue.put("no pair")
        worker.sync_expert_ids_d2h_thread.join(30)
    assert not worker.sync_expert_ids_d2h_thread.is_alive()
    assert "not passed on" in caplog.text
    publish(engine, 0)
    assert len(finish(engine, [engine.submit([1], SamplingParams(max_tokens=3))])[0].tokens) == 3


@pytest.mark.parametrize("installed", ["0.0.2", "0.1.0", "0.1.0rc1", None])
def test_another_release_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, installed: str | None) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(metadata, "version", version)
    for check in (check_release, correct_package):
        with pytest.raises(ReleaseError) as caught:
            check()
        assert "\n" not in str(caught.value)
        for part in (installed or "not installed", RELEASE, "make setup-sampler"):
            assert part in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "head_dim", "complaint"),
    [("gemma2", 256, "model_type is gemma2"), ("qwen3", 64, "head_dim is 64")],
)
def test_a_model_that_is_not_served_is_refused_in_one_line(model_type: str, head_dim: int, complaint: str) -> None:
    with pytest.raises(ReleaseError, match=complaint):
        check_model(model_type, head_dim)
    check_model("qwen3", 256)
