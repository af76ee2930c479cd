"""What every sampler promises; see ``actors.samplers.contract``."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sampler_examples import CONFIG, CONTEXT, TOLERANCE, Served, filtered_reference, make_tokenizer, make_weights
from scipy import stats

from actors.samplers.contract import Generation, RequestError, SamplingParams, StopReason, UpdateError
from actors.samplers.publication import Manifest, Publication


def _prompt(random: np.random.Generator, length: int) -> np.ndarray:
    return random.integers(0, CONFIG.vocab_size, length).astype(np.int32)


def test_refuses_to_sample_before_it_holds_a_version(served: Served) -> None:
    assert served.refusal is not None
    assert "version" in str(served.refusal)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_an_independent_forward_pass(
    served: Served, random: np.random.Generator, temperature: float
) -> None:
    prompts = [_prompt(random, length) for length in (1, 2, 31, 32, 33, 64, 65, 140)]
    params = SamplingParams(max_tokens=15, temperature=temperature)

    async def sample() -> list[Generation]:
        return await asyncio.gather(*(served.sampler.generate(prompt, params) for prompt in prompts))

    for prompt, generation in zip(prompts, served.run(sample()), strict=True):
        assert generation.tokens.dtype == generation.versions.dtype == np.int32
        assert generation.logprobs.dtype == np.float32
        assert len(generation.tokens) == len(generation.logprobs) == len(generation.versions) == 15
        assert generation.stop_reason is StopReason.LENGTH
        assert served.worst_difference(prompt, generation, temperature) <= TOLERANCE


def test_greedy_takes_the_likeliest_token_and_reports_its_logprob(served: Served, random: np.random.Generator) -> None:
    prompt = _prompt(random, 20)
    generation = served.run(served.sampler.generate(prompt, SamplingParams(max_tokens=12, temperature=0.0)))
    reference_TV = served.reference(served.version, np.concatenate([prompt, generation.tokens]))
    np.testing.assert_array_equal(generation.tokens, reference_TV[19:-1].argmax(axis=-1))
    assert served.worst_difference(prompt, generation) <= TOLERANCE


def test_64_concurrent_requests_of_mixed_length_all_come_back(served: Served, random: np.random.Generator) -> None:
    prompts = [_prompt(random, int(length)) for length in random.integers(1, 100, 64)]
    lengths = random.integers(1, 50, 64)

    async def sample() -> list[Generation]:
        return await asyncio.gather(
            *(
                served.sampler.generate(prompt, SamplingParams(max_tokens=int(length)))
                for prompt, length in zip(prompts, lengths, strict=True)
            )
        )

    generations = served.run(sample())
    assert [len(generation.tokens) for generation in generations] == lengths.tolist()
    assert max(map(served.worst_difference, prompts, generations)) <= TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_follow_the_distribution_and_equal_prompts_draw_independently(
    served: Served, random: np.random.Generator, temperature: float
) -> None:
    prompt, draws = _prompt(random, 9), 1500
    params = SamplingParams(max_tokens=2, temperature=temperature)

    async def sample() -> list[Generation]:
        return await asyncio.gather(*(served.sampler.generate(prompt, params) for _ in range(draws)))

    generations = served.run(sample())
    first = Counter(int(generation.tokens[0]) for generation in generations)
    expected_V = draws * np.exp(served.reference(served.version, prompt, temperature)[-1].astype(np.float64))
    observed_V = np.array([first[token] for token in range(CONFIG.vocab_size)])
    assert stats.chisquare(*_pooled(observed_V, expected_V)).pvalue > 1e-4
    # Neighbours drew independently: they agree as often as two draws do by chance.
    pairs = [(a.tokens[0], b.tokens[0]) for a, b in zip(generations[::2], generations[1::2], strict=True)]
    agreement = float(np.sum((expected_V / draws) ** 2))
    assert stats.binomtest(sum(a == b for a, b in pairs), len(pairs), agreement).pvalue > 1e-4


def _pooled(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts with all cells of fewer than 5 expected draws made one, as the chi-square test needs."""
    rare = expected < 5
    pooled = [np.append(counts[~rare], [counts[rare].sum()] * bool(rare.any())) for counts in (observed, expected)]
    return pooled[0], pooled[1] * (pooled[0].sum() / pooled[1].sum())


def test_a_seeded_sample_does_not_depend_on_the_batch(served: Served, random: np.random.Generator) -> None:
    prompt = _prompt(random, 40)
    params = SamplingParams(max_tokens=20, seed=1234)

    async def alone_then_in_a_crowd() -> tuple[Generation, Generation]:
        alone = await served.sampler.generate(prompt, params)
        crowd = [served.sampler.generate(_prompt(random, 30), SamplingParams(max_tokens=25)) for _ in range(20)]
        among, *_ = await asyncio.gather(served.sampler.generate(prompt, params), *crowd)
        return alone, among

    alone, among = served.run(alone_then_in_a_crowd())
    np.testing.assert_array_equal(alone.tokens, among.tokens)
    np.testing.assert_allclose(alone.logprobs, among.logprobs, atol=TOLERANCE)


def test_different_seeds_give_different_samples(served: Served, random: np.random.Generator) -> None:
    prompt = _prompt(random, 5)

    async def sample() -> list[Generation]:
        params = [SamplingParams(max_tokens=30, seed=seed) for seed in (0, 1, 2**32, 2**64 - 1)]
        return await asyncio.gather(*(served.sampler.generate(prompt, each) for each in params))

    assert len({generation.tokens.tobytes() for generation in served.run(sample())}) == 4


def test_a_stop_token_ends_the_generation_and_is_its_last_token(served: Served, random: np.random.Generator) -> None:
    prompt = _prompt(random, 12)
    free = served.run(served.sampler.generate(prompt, SamplingParams(max_tokens=30, seed=5)))
    stops = (int(free.tokens[10]), int(free.tokens[17]))
    end = int(np.flatnonzero(np.isin(free.tokens, stops))[0])
    params = SamplingParams(max_tokens=30, seed=5, stop_tokens=stops)
    stopped = served.run(served.sampler.generate(prompt, params))
    assert stopped.stop_reason is StopReason.STOP
    np.testing.assert_array_equal(stopped.tokens, free.tokens[: end + 1])


@pytest.mark.parametrize("spare", [0, 10])
def test_a_stop_string_ends_the_generation_with_the_token_that_completes_it(
    served: Served, random: np.random.Generator, spare: int
) -> None:
    prompt, tokenizer = _prompt(random, 12), make_tokenizer()
    free = served.run(served.sampler.generate(prompt, SamplingParams(max_tokens=60, seed=5)))
    texts = [tokenizer.decode(free.tokens[:end].tolist()) for end in range(61)]
    start = next(i for i in range(10, len(texts[-1])) if "\ufffd" not in texts[-1][i : i + 4])
    string = texts[-1][start : start + 4]
    end = next(end for end, text in enumerate(texts) if string in text)
    assert string not in tokenizer.decode([int(free.tokens[end - 1])]), "it was to span tokens"
    params = SamplingParams(max_tokens=end + spare, seed=5, stop_strings=("never said", string))
    stopped = served.run(served.sampler.generate(prompt, params))
    assert (stopped.stop_reason, stopped.stop_string) == (StopReason.STOP, string)
    np.testing.assert_array_equal(stopped.tokens, free.tokens[:end])
    assert len(stopped.logprobs) == len(stopped.versions) == end
    assert free.stop_string is None


def test_a_stop_string_is_looked_for_in_what_was_sampled_and_not_in_the_prompt(served: Served) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, stop_strings=("ab", "abc"))
    generation = served.run(served.sampler.generate([0, 1, 2, 0, 1], params))  # the text abcab
    assert "ab" not in make_tokenizer().decode(generation.tokens.tolist())
    assert (generation.stop_reason, generation.stop_string) == (StopReason.LENGTH, None)


FILTERS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 5},
    "top-k of one": {"top_k": 1},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 12, "top_p": 0.85, "min_p": 0.12},
}


@pytest.mark.parametrize("name", FILTERS)
def test_filtered_samples_follow_the_filtered_distribution_and_report_its_logprobs(
    filtering: Served, random: np.random.Generator, name: str
) -> None:
    filters: dict[str, Any] = {"top_k": None, "top_p": 1.0, "min_p": 0.0} | FILTERS[name]
    prompt, draws, temperature = _prompt(random, 9), 800, 1.3

    async def sample() -> list[Generation]:
        asked = [SamplingParams(max_tokens=1, temperature=temperature, seed=seed, **filters) for seed in range(draws)]
        return await asyncio.gather(*(filtering.sampler.generate(prompt, params) for params in asked))

    generations = filtering.run(sample())
    whole_V = filtering.reference(filtering.version, prompt, temperature)[-1]
    expected_V = filtered_reference(whole_V, **filters)
    kept = np.flatnonzero(np.isfinite(expected_V))
    assert len(kept) < len(whole_V) - 10
    tokens = np.array([int(generation.tokens[0]) for generation in generations])
    assert set(tokens.tolist()) <= set(kept.tolist())
    logprobs = np.array([generation.logprobs[0] for generation in generations])
    np.testing.assert_allclose(logprobs, expected_V[tokens], atol=TOLERANCE)
    if len(kept) > 1:
        counts = np.bincount(tokens, minlength=len(whole_V))[kept], draws * np.exp(expected_V[kept])
        assert stats.chisquare(*_pooled(*counts)).pvalue > 1e-4


def test_a_filtered_and_a_free_sample_do_not_depend_on_each_other(
    filtering: Served, random: np.random.Generator
) -> None:
    prompt = _prompt(random, 40)
    free = SamplingParams(max_tokens=20, seed=1234)
    greedy = replace(free, temperature=0.0)
    narrow = replace(free, top_k=8, top_p=0.8, min_p=0.05)
    wanted = [free, greedy, narrow, replace(greedy, top_p=0.5)]

    async def alone_then_together() -> tuple[list[Generation], list[Generation]]:
        alone = [await filtering.sampler.generate(prompt, params) for params in wanted]
        crowd = [filtering.sampler.generate(_prompt(random, 30), replace(narrow, seed=seed)) for seed in range(12)]
        together = await asyncio.gather(*(filtering.sampler.generate(prompt, params) for params in wanted), *crowd)
        return alone, together[: len(wanted)]

    for alone, together in zip(*filtering.run(alone_then_together()), strict=True):
        np.testing.assert_array_equal(alone.tokens, together.tokens)
        np.testing.assert_allclose(alone.logprobs, together.logprobs, atol=TOLERANCE)
    assert filtering.worst_difference(prompt, filtering.run(filtering.sampler.generate(prompt, wanted[3]))) <= TOLERANCE


def test_nothing_compiles_for_filters_and_stop_strings(filtering: Served, random: np.random.Generator) -> None:
    async def use() -> tuple[int, int]:
        before = await filtering.sampler.status()
        for count in (1, 3, 9, 30):
            asked = [
                SamplingParams(max_tokens=9, top_k=k, top_p=0.9, min_p=0.1, stop_strings=("ab",))
                for k in range(1, count)
            ]
            prompts = [_prompt(random, int(n)) for n in random.integers(1, 130, len(asked))]
            await asyncio.gather(*map(filtering.sampler.generate, prompts, asked))
        after = await filtering.sampler.status()
        return before["compilations_after_warmup"], after["compilations_after_warmup"]

    before, after = filtering.run(use())
    assert after == before


def test_the_context_length_ends_a_generation(served: Served, random: np.random.Generator) -> None:
    generation = served.run(served.sampler.generate(_prompt(random, CONTEXT - 3), SamplingParams(max_tokens=100)))
    assert (len(generation.tokens), generation.stop_reason) == (3, StopReason.LENGTH)


def test_a_passed_deadline_returns_what_was_sampled_so_far(served: Served, random: np.random.Generator) -> None:
    params = SamplingParams(max_tokens=150, deadline_seconds=1e-6)
    late = served.run(served.sampler.generate(_prompt(random, 4), params))
    assert late.stop_reason is StopReason.ABORTED
    assert len(late.tokens) == len(late.logprobs) == len(late.versions) < 150


def test_a_cancelled_call_frees_its_place(served: Served, random: np.random.Generator) -> None:
    async def cancel() -> dict[str, Any]:
        calls = [
            asyncio.ensure_future(served.sampler.generate(_prompt(random, 4), SamplingParams(max_tokens=150)))
            for _ in range(40)
        ]
        await served.sampler.generate(_prompt(random, 4), SamplingParams(max_tokens=1))
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        # Whatever was aborted is gone once a later request has been served.
        await served.sampler.generate(_prompt(random, 4), SamplingParams(max_tokens=2))
        return await served.sampler.status()

    status = served.run(cancel())
    assert (status["running"], status["waiting"]) == (0, 0)


GARBAGE: dict[str, tuple[Any, Any]] = {
    "non-empty": ([], SamplingParams(max_tokens=1)),
    "flat": ([[1, 2]], SamplingParams(max_tokens=1)),
    "no array": ([[1], [2, 3]], SamplingParams(max_tokens=1)),
    "type float64": ([1.5], SamplingParams(max_tokens=1)),
    "token id 40": ([1, 40], SamplingParams(max_tokens=1)),
    "token id -1": ([-1], SamplingParams(max_tokens=1)),
    "at most 159": ([1] * CONTEXT, SamplingParams(max_tokens=1)),
    "max_tokens is 0": ([1], SamplingParams(max_tokens=0)),
    "temperature is -0.1": ([1], SamplingParams(max_tokens=1, temperature=-0.1)),
    "temperature is nan": ([1], SamplingParams(max_tokens=1, temperature=float("nan"))),
    "temperature is inf": ([1], SamplingParams(max_tokens=1, temperature=float("inf"))),
    "stop_tokens is (99,)": ([1], SamplingParams(max_tokens=1, stop_tokens=(99,))),
    "stop_tokens is 3": ([1], SamplingParams(max_tokens=1, stop_tokens=3)),  # type: ignore[arg-type]
    "top_k is 0": ([1], SamplingParams(max_tokens=1, top_k=0)),
    "top_p is 0": ([1], SamplingParams(max_tokens=1, top_p=0)),
    "top_p is 1.5": ([1], SamplingParams(max_tokens=1, top_p=1.5)),
    "min_p is nan": ([1], SamplingParams(max_tokens=1, min_p=float("nan"))),
    "stop_strings is ('',)": ([1], SamplingParams(max_tokens=1, stop_strings=("",))),
    "stop_strings is 'ab'": ([1], SamplingParams(max_tokens=1, stop_strings="ab")),  # type: ignore[arg-type]
    "seed is -1": ([1], SamplingParams(max_tokens=1, seed=-1)),
    "deadline_seconds is 0": ([1], SamplingParams(max_tokens=1, deadline_seconds=0)),
    "expected SamplingParams": ([1], {"max_tokens": 1}),
}


@pytest.mark.parametrize("complaint", GARBAGE)
def test_garbage_is_refused_by_name_and_harms_nobody_else(served: Served, complaint: str) -> None:
    async def garbage_beside_a_good_request() -> tuple[Any, Any]:
        good = served.sampler.generate([1, 2, 3], SamplingParams(max_tokens=5))
        return await asyncio.gather(served.sampler.generate(*GARBAGE[complaint]), good, return_exceptions=True)

    refused, good = served.run(garbage_beside_a_good_request())
    assert isinstance(refused, RequestError)
    assert complaint in str(refused)
    assert len(good.tokens) == 5


def test_updates_under_load_lose_nothing_and_every_token_matches_its_own_version(
    served: Served, random: np.random.Generator
) -> None:
    prompts = [_prompt(random, int(length)) for length in random.integers(2, 60, 32)]
    params = SamplingParams(max_tokens=90)

    async def update_while_sampling() -> list[Generation]:
        calls = [asyncio.ensure_future(served.sampler.generate(prompt, params)) for prompt in prompts]
        for _ in range(20):
            await served.publish()
        return await asyncio.gather(*calls)

    first, before = served.version, served.run(served.sampler.status())
    generations = served.run(update_while_sampling())
    after = served.run(served.sampler.status())
    assert after["swaps"] - before["swaps"] == 20 and after["swap_seconds"] > before["swap_seconds"]
    assert all(len(generation.tokens) == 90 for generation in generations)
    assert all((np.diff(generation.versions) >= 0).all() for generation in generations)
    seen = np.unique(np.concatenate([generation.versions for generation in generations]))
    assert len(seen) > 3 and first <= seen.min() and seen.max() <= served.version
    assert max(map(served.worst_difference, prompts, generations)) <= TOLERANCE


def _missing(weights: dict[str, np.ndarray]) -> None:
    del weights["model.norm.weight"]


def _unknown(weights: dict[str, np.ndarray]) -> None:
    weights["model.layers.7.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)


def _misshapen(weights: dict[str, np.ndarray]) -> None:
    weights["model.norm.weight"] = np.ones(5, np.float32)


def _integers(weights: dict[str, np.ndarray]) -> None:
    weights["model.norm.weight"] = np.ones(CONFIG.hidden_size, np.int32)


def _not_finite(weights: dict[str, np.ndarray]) -> None:
    weights["model.norm.weight"] = np.full(CONFIG.hidden_size, np.nan, np.float32)


@pytest.mark.parametrize("spoil", [_missing, _unknown, _misshapen, _integers, _not_finite])
def test_weights_that_do_not_fit_are_refused_and_the_old_version_goes_on(served: Served, spoil: Any) -> None:
    async def update() -> Generation:
        weights = make_weights(seed=99)
        spoil(weights)
        with pytest.raises(UpdateError, match=r"model\."):
            await served.sampler.update(served.publication(served.version + 1, weights))
        return await served.sampler.generate([1, 2, 3], SamplingParams(max_tokens=8))

    generation = served.run(update())
    assert set(generation.versions.tolist()) == {served.version}
    assert served.worst_difference(np.array([1, 2, 3]), generation) <= TOLERANCE


def test_weights_that_are_not_those_of_their_manifest_are_refused_and_the_old_version_goes_on(served: Served) -> None:
    async def update() -> Generation:
        honest = served.publication(served.version + 1, make_weights(seed=97))
        name = "model.norm.weight"
        wrong = honest.manifest.tensors[name]._replace(digest=1)
        manifest = Manifest(honest.manifest.version, {**honest.manifest.tensors, name: wrong})
        with pytest.raises(UpdateError, match=r"tensor model\.norm\.weight has digest .*publish it again"):
            await served.sampler.update(Publication(manifest, honest.parts))
        with pytest.raises(UpdateError, match="expected a Publication"):
            await served.sampler.update(b"garbage")
        return await served.sampler.generate([1, 2, 3], SamplingParams(max_tokens=8))

    generation = served.run(update())
    assert set(generation.versions.tolist()) == {served.version}
    assert served.worst_difference(np.array([1, 2, 3]), generation) <= TOLERANCE


def test_an_older_version_changes_nothing_and_the_newer_one_is_acknowledged(served: Served) -> None:
    async def update() -> tuple[int, Generation]:
        held = await served.sampler.update(served.publication(served.version - 1, make_weights(seed=98)))
        return held, await served.sampler.generate([4, 5], SamplingParams(max_tokens=6))

    held, generation = served.run(update())
    assert held == served.version
    assert served.worst_difference(np.array([4, 5]), generation) <= TOLERANCE


def test_turns_of_an_episode_give_the_logprobs_of_a_single_pass(served: Served, random: np.random.Generator) -> None:
    async def episode() -> list[tuple[np.ndarray, Generation]]:
        tokens, turns = _prompt(random, 30), []
        for _ in range(5):
            generation = await served.sampler.generate(tokens, SamplingParams(max_tokens=3))
            turns.append((tokens, generation))
            tokens = np.concatenate([tokens, generation.tokens, _prompt(random, 17)])
        return turns

    async def episodes() -> list[list[tuple[np.ndarray, Generation]]]:
        return await asyncio.gather(*(episode() for _ in range(10)))

    turns = [turn for episode in served.run(episodes()) for turn in episode]
    assert max(served.worst_difference(*turn) for turn in turns) <= TOLERANCE


def test_nothing_compiles_after_warm_up(served: Served, random: np.random.Generator) -> None:
    async def use() -> tuple[int, int]:
        before = await served.sampler.status()
        await served.publish()
        params = SamplingParams(max_tokens=20, temperature=0.3, stop_tokens=tuple(range(12)))
        for count in (1, 3, 9, 30):
            lengths = random.integers(1, 130, count)
            await asyncio.gather(*(served.sampler.generate(_prompt(random, int(n)), params) for n in lengths))
        after = await served.sampler.status()
        return before["compilations_after_warmup"], after["compilations_after_warmup"]

    before, after = served.run(use())
    assert after == before
