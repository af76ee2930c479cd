"""What the local sampler promises beyond the contract."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from sampler_examples import CONFIG, CONTEXT, TOLERANCE, Reference, Served, make_local, make_weights

from actors.samplers.contract import Generation, RequestError, SamplerError, SamplingParams, StopReason
from actors.samplers.local import Engine, LocalSampler
from actors.samplers.publication import Publication
from actors.samplers.serving import _Swap
from learner.models.config import ModelError, write_config


@pytest.fixture(scope="session")  # pytest leaves this module for the other tests of `served`, and comes back
def engine() -> Engine:
    """Few slots, and keys that stay for requests in flight across updates."""
    engine = Engine(CONFIG, slots=3, context_length=100, on_update="continue", seed=0)
    engine.warm_up()
    return engine


@pytest.fixture(scope="module")
def actor() -> Iterator[Any]:
    """One slot, which compiles in half the time."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    remote: Any = ray.remote
    make = remote(num_cpus=0, max_concurrency=1000, concurrency_groups={"health": 1})(LocalSampler)
    yield make.remote(model=CONFIG, slots=1, context_length=100, on_update="recompute", seed=0, name="sampler-0")
    ray.shutdown()


def _publish(engine: Engine, weights: dict[str, np.ndarray]) -> int:
    """The next version."""
    return engine.swap(0 if engine.version is None else engine.version + 1, engine.prepare(weights))


def _finish(engine: Engine, *numbers: int) -> list[Generation]:
    ended: dict[int, Generation] = {}
    for _ in range(500):
        ended |= dict(engine.step())
        if ended.keys() >= set(numbers):
            return [ended[number] for number in numbers]
    raise AssertionError(f"only {sorted(ended)} of {sorted(numbers)} ended within 500 steps")


def test_turns_and_siblings_reuse_keys(served_local: Served, random: np.random.Generator) -> None:
    prompt = random.integers(0, CONFIG.vocab_size, 90)

    async def group_then_a_second_turn() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        before = await served_local.sampler.status()
        params = SamplingParams(max_tokens=4)
        members = await asyncio.gather(*(served_local.sampler.generate(prompt, params) for _ in range(8)))
        between = await served_local.sampler.status()
        turns = [np.concatenate([prompt, member.tokens, [1, 2, 3]]) for member in members]
        await asyncio.gather(*(served_local.sampler.generate(turn, params) for turn in turns))
        return before, between, await served_local.sampler.status()

    before, between, after = served_local.run(group_then_a_second_turn())
    assert between["tokens_reused"] - before["tokens_reused"] == 7 * 89
    assert between["tokens_prefilled"] - before["tokens_prefilled"] == 89
    # All but the last sampled token of each member had keys; it and three new ones follow, the last is sampled behind.
    assert after["tokens_reused"] - between["tokens_reused"] == 8 * 93
    assert after["tokens_prefilled"] - between["tokens_prefilled"] == 8 * 3


def test_many_in_one_call_come_back_as_they_end(served_local: Served) -> None:
    requests = [([1, 2, 3], SamplingParams(max_tokens=length)) for length in (100, 1, 1, 2)]
    requests.insert(2, ([999], SamplingParams(max_tokens=1)))

    async def collect() -> list[list[tuple[int, Any]]]:
        return [batch async for batch in served_local.sampler.generate_many(requests)]

    batches = served_local.run(collect())
    outcomes = dict(pair for batch in batches for pair in batch)
    assert isinstance(outcomes.pop(2), RequestError)
    assert {index: len(generation.tokens) for index, generation in outcomes.items()} == {0: 100, 1: 1, 3: 1, 4: 2}
    assert [index for index, _ in batches[-1]] == [0]


def test_leaving_many_early_aborts_the_rest(served_local: Served) -> None:
    async def leave() -> dict[str, Any]:
        calls = served_local.sampler.generate_many([([1], SamplingParams(max_tokens=n)) for n in (1, 150, 150)])
        await anext(calls)
        await calls.aclose()
        await served_local.sampler.generate([1], SamplingParams(max_tokens=2))
        return await served_local.sampler.status()

    status = served_local.run(leave())
    assert (status["running"], status["waiting"]) == (0, 0)


def test_continue_keeps_keys_across_an_update_and_recompute_does_not(engine: Engine, served_local: Served) -> None:
    _publish(engine, make_weights(0))
    number = engine.submit([3] * 60, SamplingParams(max_tokens=30))
    for _ in range(10):
        engine.step()
    prefilled = engine.counters.tokens_prefilled
    _publish(engine, make_weights(1))
    (generation,) = _finish(engine, number)
    assert len(np.unique(generation.versions)) == 2
    assert engine.counters.tokens_prefilled == prefilled

    async def update_in_flight() -> tuple[Generation, dict[str, Any], dict[str, Any]]:
        before = await served_local.sampler.status()
        call = asyncio.ensure_future(served_local.sampler.generate([3] * 60, SamplingParams(max_tokens=90)))
        await served_local.sampler.generate([4], SamplingParams(max_tokens=5))
        await served_local.publish()
        return await call, before, await served_local.sampler.status()

    for _ in range(20):  # on a busy machine all tokens may be there before the weights are checked
        generation, before, after = served_local.run(update_in_flight())
        if len(np.unique(generation.versions)) == 2:
            break
    assert len(np.unique(generation.versions)) == 2
    assert after["tokens_prefilled"] - before["tokens_prefilled"] > 59 + 59
    assert served_local.worst_difference(np.array([3] * 60), generation) <= TOLERANCE


def test_continue_keeps_keys_for_their_own_request_and_no_later_one(
    engine: Engine, random: np.random.Generator
) -> None:
    old = _publish(engine, make_weights(0))
    finished_P, running_P = random.integers(0, CONFIG.vocab_size, (2, 40))
    (finished,) = _finish(engine, engine.submit(finished_P, SamplingParams(max_tokens=5)))
    in_flight = engine.submit(running_P, SamplingParams(max_tokens=30))
    for _ in range(5):
        engine.step()
    new = _publish(engine, make_weights(1))
    reference = Reference({old: make_weights(0), new: make_weights(1)})

    def check(prompt_P: np.ndarray, *, reused: int) -> None:
        before = engine.counters.tokens_reused
        number = engine.submit(prompt_P, SamplingParams(max_tokens=5))
        ended: dict[int, Generation] = {}
        while number not in ended:
            ended |= dict(engine.step())
            assert in_flight not in ended, "the older request was to be running all the while"
        assert engine.counters.tokens_reused - before == reused
        assert set(ended[number].versions.tolist()) == {new}
        assert reference.worst_difference(prompt_P, ended[number]) <= TOLERANCE

    next_turn_P = np.concatenate([finished_P, finished.tokens, [1, 2, 3]])
    check(next_turn_P, reused=0)
    check(running_P, reused=0)  # a sibling of what still runs with older keys
    check(running_P, reused=39)  # and a sibling of that sibling
    (mixed,) = _finish(engine, in_flight)
    assert set(mixed.versions.tolist()) == {old, new}
    after_P = np.concatenate([running_P, mixed.tokens, [1, 2, 3]])
    (after,) = _finish(engine, engine.submit(after_P, SamplingParams(max_tokens=5)))
    assert reference.worst_difference(after_P, after) <= TOLERANCE


def test_under_drain_an_update_waits_for_what_is_in_flight_and_later_requests_wait_for_it() -> None:
    sampler = make_local(on_update="drain", slots=1, context_length=100)
    weights = {0: make_weights(0), 1: make_weights(1)}

    async def update_in_flight() -> tuple[Generation, Generation, int]:
        await sampler.update(Publication.of(0, weights[0]))
        first = asyncio.ensure_future(sampler.generate([3] * 5, SamplingParams(max_tokens=80)))
        while not (await sampler.status())["running"]:
            await asyncio.sleep(0)
        no_room = asyncio.ensure_future(sampler.generate([6], SamplingParams(max_tokens=15)))
        update = asyncio.ensure_future(sampler.update(Publication.of(1, weights[1])))
        # The weights are checked in a thread first.
        while not any(isinstance(errand, _Swap) for errand in sampler._inbox):
            await asyncio.sleep(0)
        later = asyncio.ensure_future(sampler.generate([4], SamplingParams(max_tokens=5)))
        abandoned = asyncio.ensure_future(sampler.generate([5], SamplingParams(max_tokens=90)))
        await asyncio.sleep(0)
        abandoned.cancel()
        first_one, later_one, held, waited = await asyncio.gather(first, later, update, no_room)
        status = await sampler.status()
        assert (status["running"], status["waiting"], status["in_line"], len(sampler._inbox)) == (0, 0, 0, 0)
        assert set(waited.versions.tolist()) == {1}, "who waits in line has not begun"
        return first_one, later_one, held

    first, later, held = asyncio.run(asyncio.wait_for(update_in_flight(), 60))
    sampler.close()
    assert held == 1
    assert (set(first.versions.tolist()), set(later.versions.tolist())) == ({0}, {1})
    reference = Reference(weights)
    assert reference.worst_difference(np.array([3] * 5), first) <= TOLERANCE
    assert reference.worst_difference(np.array([4]), later) <= TOLERANCE


def test_a_deadline_ends_waiting_and_running_requests_with_what_they_have(engine: Engine) -> None:
    _publish(engine, make_weights(2))
    running = [engine.submit([token] * 5, SamplingParams(max_tokens=90)) for token in range(3)]
    waiting = engine.submit([8, 8], SamplingParams(max_tokens=90))
    for _ in range(6):
        assert engine.step() == []
    assert (engine.running, engine.waiting) == (3, 1)
    for number in (running[0], waiting):
        engine.abort(number)
    ended = dict(engine.step())
    assert set(ended) == {running[0], waiting}
    assert all(generation.stop_reason is StopReason.ABORTED for generation in ended.values())
    assert len(ended[running[0]].tokens) > 0 and len(ended[waiting].tokens) == 0
    for number in running[1:]:
        engine.abort(number)
    engine.step()
    assert (engine.running, engine.waiting) == (0, 0)


def test_what_the_sampler_was_not_made_for_is_refused_by_name(engine: Engine) -> None:
    _publish(engine, make_weights(0))
    refused = {
        "top_k, top_p and min_p are 3, 1 and 0; .* evaluation": SamplingParams(max_tokens=1, top_k=3),
        "stop_strings .* tokenizer.json": SamplingParams(max_tokens=1, stop_strings=("x",)),
    }
    for complaint, params in refused.items():
        with pytest.raises(RequestError, match=complaint):
            engine.submit([1], params)
    greedy = SamplingParams(max_tokens=1, temperature=0.0, top_k=3)
    assert len(_finish(engine, engine.submit([1], greedy))) == 1, "which no filter changes"


def test_the_engine_is_given_a_bounded_number_of_tokens_and_the_others_wait_in_line(served_local: Served) -> None:
    long, most = SamplingParams(max_tokens=140), 8 * CONTEXT

    async def overload() -> tuple[list[dict[str, Any]], list[Generation], Generation]:
        statuses = []
        calls = [asyncio.ensure_future(served_local.sampler.generate([n, 1, 2, 3], long)) for n in range(30)]
        abandoned = asyncio.ensure_future(served_local.sampler.generate([31], long))
        late = asyncio.ensure_future(served_local.sampler.generate([32], replace(long, deadline_seconds=0.01)))
        while not (await served_local.sampler.status())["in_line"]:
            await asyncio.sleep(0.002)  # a loop that never rests leaves the engine's thread no time
        abandoned.cancel()
        for call in calls:
            while not call.done():
                statuses.append(await served_local.sampler.status())
                await asyncio.sleep(0.002)
        return statuses, await asyncio.gather(*calls), await late

    statuses, generations, late = served_local.run(overload())
    assert max(status["tokens_in_flight"] for status in statuses) == (most // 144) * 144
    assert all(status["tokens_in_flight"] <= most == status["most_tokens_in_flight"] for status in statuses)
    assert max(status["in_line"] for status in statuses) > 20
    assert max(status["running"] + status["waiting"] for status in statuses) == most // 144
    assert all(len(generation.tokens) == 140 for generation in generations)
    assert (late.stop_reason, len(late.tokens)) == (StopReason.ABORTED, 0)
    after = served_local.run(served_local.sampler.status())
    assert (after["tokens_in_flight"], after["in_line"]) == (0, 0)


def test_a_stream_of_short_requests_does_not_hold_up_a_long_one(engine: Engine) -> None:
    _publish(engine, make_weights(3))
    long = engine.submit([1, 1], SamplingParams(max_tokens=40))
    for step in range(200):
        engine.submit([step % CONFIG.vocab_size, 2, 3, 4], SamplingParams(max_tokens=1))
        ended = dict(engine.step())
        if long in ended:
            break
    else:
        raise AssertionError("the long request did not end within 200 steps")
    _finish(engine, *(request.number for request in list(engine._waiting)))


def test_weights_that_overflow_are_reported_and_leave_no_trace(engine: Engine) -> None:
    weights = {name: value * (1e25 if "mlp" in name else 1) for name, value in make_weights(4).items()}
    _publish(engine, weights)
    numbers = [engine.submit([slot] * 60, SamplingParams(max_tokens=5)) for slot in range(3)]
    with pytest.raises(SamplerError, match="not finite"):
        _finish(engine, *numbers)
    for number in numbers:
        engine.abort(number)
    _publish(engine, make_weights(5))
    # Shorter than what was there: the rest of its slot still holds what the bad weights left.
    prompt = np.arange(20, 30)
    (generation,) = _finish(engine, engine.submit(prompt, SamplingParams(max_tokens=5)))
    reference = Reference({engine.version or 0: make_weights(5)})
    assert reference.worst_difference(prompt, generation) <= TOLERANCE


def test_an_engine_failure_reaches_every_caller_and_status(monkeypatch: pytest.MonkeyPatch) -> None:
    # An engine that was never compiled cannot run a call: a real failure inside a step.
    monkeypatch.setattr(Engine, "warm_up", lambda self: None)
    sampler = make_local()

    async def use() -> tuple[list[Any], Any, dict[str, Any], dict[str, Any]]:
        await sampler.update(Publication.of(0, make_weights(0)))
        calls = [sampler.generate([1, 2], SamplingParams(max_tokens=3)) for _ in range(5)]
        failures = await asyncio.gather(*calls, return_exceptions=True)
        (later,) = await asyncio.gather(sampler.update(Publication.of(1, make_weights(0))), return_exceptions=True)
        return failures, later, await sampler.status(), await sampler.health()

    failures, later, status, health = asyncio.run(asyncio.wait_for(use(), 60))
    assert all(isinstance(failure, SamplerError) and "restart" in str(failure) for failure in [*failures, later])
    assert "restart" in status["failure"]
    assert not health["alive"]


@pytest.mark.parametrize("call", ["submit", "swap"])
def test_what_the_engine_has_in_hand_when_it_fails_is_answered(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(Engine, "warm_up", lambda self: None)
    sampler = make_local()

    async def use() -> list[Any]:
        await sampler.update(Publication.of(0, make_weights(0)))
        monkeypatch.delattr(Engine, call)
        errands = [
            sampler.update(Publication.of(1, make_weights(1))),
            *(sampler.generate([1, 2], SamplingParams(max_tokens=3)) for _ in range(3)),
        ]
        return await asyncio.gather(*errands if call == "swap" else errands[1:], return_exceptions=True)

    for failure in asyncio.run(asyncio.wait_for(use(), 60)):
        assert isinstance(failure, SamplerError) and "restart" in str(failure)


def test_closing_fails_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "warm_up", lambda self: None)
    sampler = make_local()
    sampler.close()
    with pytest.raises(SamplerError, match="closed"):
        asyncio.run(sampler.generate([1], SamplingParams(max_tokens=1)))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"context_length": 999}, "context_length is 999"),
        ({"on_update": "never"}, "never"),
        ({"tokens_in_flight": CONTEXT - 1}, "tokens_in_flight is 159"),
    ],
)
def test_an_impossible_engine_is_refused(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_local(**arguments)


def test_the_model_can_be_a_checkpoint_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "warm_up", lambda self: None)
    with pytest.raises(ModelError, match=r"config\.json"):
        make_local(model=tmp_path)
    write_config(CONFIG, tmp_path, eos_token_id=None)
    sampler = make_local(model=tmp_path)
    assert asyncio.run(sampler.update(Publication.of(3, make_weights(0)))) == 3
    sampler.close()


def test_a_ray_actor_keeps_the_contract(actor: Any) -> None:
    publication = ray.put(Publication.of(0, make_weights(0)))
    prompt = [1, 2, 3, 4, 5]

    async def use() -> tuple[Generation, list[tuple[int, Any]]]:
        with pytest.raises(SamplerError, match="version"):
            await actor.generate.remote(prompt, SamplingParams(max_tokens=1))
        assert await actor.update.remote(publication) == 0
        with pytest.raises(RequestError, match="token id 77"):
            await actor.generate.remote([77], SamplingParams(max_tokens=1))
        generation = await actor.generate.remote(prompt, SamplingParams(max_tokens=10))
        many: list[tuple[int, Any]] = []
        async for batch in actor.generate_many.remote([(prompt, SamplingParams(max_tokens=n)) for n in (1, 5, 20)]):
            many += await batch
        return generation, many

    generation, many = asyncio.run(asyncio.wait_for(use(), 120))
    reference = Reference({0: make_weights(0)})
    for outcome in [generation, *(outcome for _, outcome in many)]:
        assert reference.worst_difference(np.array(prompt), outcome) <= TOLERANCE
    assert {index: len(outcome.tokens) for index, outcome in many} == {0: 1, 1: 5, 2: 20}
    health = actor.health.options(concurrency_group="health").remote()
    assert ray.get(health, timeout=60)["alive"]
    assert ray.get(actor.status.remote(), timeout=60)["compilations_after_warmup"] == 0
