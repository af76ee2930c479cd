"""What the HTTP client promises beyond the contract."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from sampler_examples import (
    CONFIG,
    TOLERANCE,
    Served,
    in_folder,
    make_sglang,
    make_tokenizer,
    make_weights,
    write_checkpoint,
)
from sglang_server import DocumentedServer, ForwardingServer, SglangJaxServer

from actors.samplers.contract import (
    Generation,
    RequestError,
    SamplerError,
    SamplerLost,
    SamplingParams,
    StopReason,
    UpdateError,
)
from actors.samplers.publication import Publication
from actors.samplers.sglang import client as client_module


def test_new_weights_are_told_in_the_documented_words(documented: DocumentedServer, served_sglang: Served) -> None:
    before = len(documented.asked)
    served_sglang.run(served_sglang.publish())
    (pause, paused), (update, updated), (resume, resumed) = documented.asked[before:]
    assert (pause, paused) == ("/pause_generation", {"mode": "abort"})
    assert (resume, resumed) == ("/continue_generation", {})
    folder = Path(updated.pop("model_path"))
    assert (update, updated) == (
        "/update_weights_from_disk",
        {"weight_version": str(served_sglang.version), "flush_cache": True},
    )
    assert (folder / "config.json").is_file()
    written = load_file(folder / "model.safetensors")
    for name, value in served_sglang.weights[served_sglang.version].items():
        np.testing.assert_array_equal(written[name], value)
    served_sglang.run(served_sglang.publish())
    served_sglang.run(served_sglang.publish())
    versions = [f"version-{served_sglang.version - age:08d}" for age in (1, 0)]
    assert sorted(path.name.rpartition("-")[0] for path in folder.parent.iterdir()) == versions


def test_an_update_interrupts_requests_and_asks_for_the_rest(
    documented: DocumentedServer, served_sglang: Served
) -> None:
    async def update_in_flight() -> Generation:
        call = asyncio.ensure_future(served_sglang.sampler.generate([1, 2, 3], SamplingParams(max_tokens=150)))
        await served_sglang.sampler.generate([4], SamplingParams(max_tokens=20))
        await served_sglang.publish()
        return await call

    for _ in range(20):  # on a busy machine all tokens may be there before the weights are written
        before = len(documented.asked)
        generation = served_sglang.run(update_in_flight())
        old = int((generation.versions < served_sglang.version).sum())
        if old < 150:
            break
    asked = [
        body for path, body in documented.asked[before:] if path == "/generate" and body["input_ids"][:3] == [1, 2, 3]
    ]
    assert 0 < old < len(generation.tokens) == 150
    assert asked[1]["input_ids"] == [1, 2, 3, *generation.tokens[:old].tolist()]
    assert asked[1]["sampling_params"]["max_new_tokens"] == 150 - old
    assert asked[0]["rid"] != asked[1]["rid"], "a server keeps the names of requests that are over"


def test_an_end_that_only_the_server_knows_is_no_end(
    documented: DocumentedServer, served_sglang: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0)
    free = served_sglang.run(served_sglang.sampler.generate([5, 6], params))
    other = next(token for token in range(CONFIG.vocab_size) if token not in free.tokens)
    monkeypatch.setattr(documented, "eos", int(free.tokens[4]))
    params = SamplingParams(max_tokens=20, temperature=0.0, stop_tokens=(other,))
    generation = served_sglang.run(served_sglang.sampler.generate([5, 6], params))
    np.testing.assert_array_equal(generation.tokens, free.tokens)
    assert generation.stop_reason is StopReason.LENGTH


def test_filters_are_refused_by_name(served_sglang: Served) -> None:
    for filters in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}):
        with pytest.raises(RequestError, match=r"unfiltered distribution; use sampler\.kind=local"):
            served_sglang.run(served_sglang.sampler.generate([1], SamplingParams(max_tokens=1, **filters)))  # type: ignore[arg-type]


def test_a_stop_string_that_the_server_missed_ends_the_generation_all_the_same(
    documented: DocumentedServer, served_sglang: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, before = make_tokenizer(), len(documented.asked)
    free = served_sglang.run(served_sglang.sampler.generate([5, 6], SamplingParams(max_tokens=40, temperature=0.0)))
    string = tokenizer.decode(free.tokens[10:12].tolist())
    end = next(end for end in range(41) if string in tokenizer.decode(free.tokens[:end].tolist()))
    params = SamplingParams(max_tokens=40, temperature=0.0, stop_strings=(string,))
    for reads_text in (True, False):
        monkeypatch.setattr(documented, "reads_text", reads_text)
        generation = served_sglang.run(served_sglang.sampler.generate([5, 6], params))
        np.testing.assert_array_equal(generation.tokens, free.tokens[:end])
        assert len(generation.logprobs) == len(generation.versions) == end
        assert (generation.stop_reason, generation.stop_string) == (StopReason.STOP, string)
    assert documented.asked[-1][1]["sampling_params"]["stop"] == [string]
    assert len(documented.asked) == before + 3


def test_a_checkpoint_that_the_server_refuses_leaves_the_old_version_serving(
    documented: DocumentedServer, served_sglang: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(publication: Publication) -> int:
        raise UpdateError("no room")

    async def update_and_sample() -> Generation:
        with monkeypatch.context() as patch:
            patch.setattr(documented._sampler, "update", refuse)
            with pytest.raises(UpdateError, match="Failed to update weights: no room"):
                await served_sglang.sampler.update(
                    served_sglang.publication(served_sglang.version + 1, make_weights(0))
                )
        return await served_sglang.sampler.generate([1, 2, 3], SamplingParams(max_tokens=8))

    generation = served_sglang.run(update_and_sample())
    assert set(generation.versions.tolist()) == {served_sglang.version}
    assert served_sglang.worst_difference(np.array([1, 2, 3]), generation) <= TOLERANCE


def test_after_an_update_of_unknown_outcome_nothing_is_sampled_until_the_next(
    documented: DocumentedServer, served_sglang: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(publication: Publication) -> int:
        raise RuntimeError("the loader crashed")

    async def update_and_sample() -> Generation:
        with monkeypatch.context() as patch:
            patch.setattr(documented._sampler, "update", fail)
            with pytest.raises(SamplerError, match="update_weights_from_disk with status 500"):
                version = served_sglang.version + 1
                await served_sglang.sampler.update(served_sglang.publication(version, make_weights(version)))
        with pytest.raises(SamplerError, match="no policy version is held"):
            await served_sglang.sampler.generate([1], SamplingParams(max_tokens=1))
        await served_sglang.publish()
        return await served_sglang.sampler.generate([1, 2, 3], SamplingParams(max_tokens=8))

    generation = served_sglang.run(update_and_sample())
    assert served_sglang.worst_difference(np.array([1, 2, 3]), generation) <= TOLERANCE


def test_an_answer_in_another_form_is_an_error_of_the_sampler(
    documented: DocumentedServer, served_sglang: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[dict[str, Any]] = [
        {"text": "hello"},
        {
            "meta_info": {
                "completion_tokens": 2,
                "finish_reason": {"type": "stop"},
                "output_token_logprobs": [[-1.0, 3, None]],
            }
        },
        {"meta_info": {"completion_tokens": 0, "finish_reason": {"type": "abort", "message": "overload"}}},
    ]
    for answer, complaint in zip(answers, ("another form", "1 log-probabilities for 2", "on its own"), strict=True):
        monkeypatch.setattr(documented, "_answer", lambda *_, answer=answer: answer)
        with pytest.raises(SamplerError, match=complaint):
            served_sglang.run(served_sglang.sampler.generate([1], SamplingParams(max_tokens=4)))


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with closing(make_sglang(tmp_path, "http://127.0.0.1:9")) as client:
        with pytest.raises(SamplerError, match=r"127\.0\.0\.1:9 does not answer") as caught:
            asyncio.run(client.update(in_folder(tmp_path)(0, make_weights(0))))
        assert "\n" not in str(caught.value)
        first, second = asyncio.run(client.health()), asyncio.run(client.health())
        assert second["stalled_seconds"] > first["stalled_seconds"] > 0
        assert "127.0.0.1:9 answered nothing" in second["stalled"]


def test_a_server_that_loads_weights_is_not_taken_for_one_that_is_gone(
    documented: DocumentedServer, served_sglang: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "HEALTH_SECONDS", 0.05)
    loading, update = asyncio.Event(), documented._sampler.update

    async def slowly(publication: Publication) -> int:
        loading.set()
        await asyncio.sleep(0.5)
        return await update(publication)  # type: ignore[no-any-return]

    async def use() -> tuple[dict[str, Any], Generation]:
        monkeypatch.setattr(documented._sampler, "update", slowly)
        publishing = asyncio.ensure_future(served_sglang.publish())
        while not loading.is_set():
            await asyncio.sleep(0.001)
        generation, health = await asyncio.gather(
            served_sglang.sampler.generate([1], SamplingParams(max_tokens=1)), served_sglang.sampler.health()
        )
        await publishing
        return health, generation

    health, generation = served_sglang.run(use())
    assert health["alive"] and health["stalled_seconds"] < 0.05
    assert generation.versions.tolist() == [served_sglang.version], "it did not wait for the update"


def test_weights_of_somebody_else_are_noticed_and_replaced(
    documented: DocumentedServer, served_sglang: Served, tmp_path: Path
) -> None:
    async def use() -> tuple[bool, Generation]:
        with closing(make_sglang(tmp_path, documented.url)) as other:
            await other.update(in_folder(tmp_path)(9999, make_weights(1)))
        with pytest.raises(SamplerLost, match=f"weights '9999', expected version {served_sglang.version}"):
            await served_sglang.sampler.generate([1], SamplingParams(max_tokens=4))
        alive = (await served_sglang.sampler.health())["alive"]
        await served_sglang.publish()
        return alive, await served_sglang.sampler.generate([1, 2, 3], SamplingParams(max_tokens=8))

    alive, generation = served_sglang.run(use())
    assert not alive and served_sglang.run(served_sglang.sampler.health())["alive"]
    assert served_sglang.worst_difference(np.array([1, 2, 3]), generation) <= TOLERANCE


def test_a_server_that_stayed_paused_is_told_again_to_go_on(
    documented: DocumentedServer, served_sglang: Served
) -> None:
    async def use() -> Generation:
        version = served_sglang.version + 1
        served_sglang.version, served_sglang.weights[version] = version, make_weights(version)
        publication = served_sglang.publication(version, served_sglang.weights[version])
        documented.broken.add("/continue_generation")
        try:
            with pytest.raises(SamplerError, match="continue_generation with status 500"):
                await served_sglang.sampler.update(publication)
        finally:
            documented.broken.clear()
        assert await served_sglang.sampler.update(publication) == version
        return await served_sglang.sampler.generate([1, 2, 3], SamplingParams(max_tokens=8))

    generation = served_sglang.run(use())
    assert served_sglang.worst_difference(np.array([1, 2, 3]), generation) <= TOLERANCE


def test_under_drain_the_server_is_waited_for_and_never_interrupted(
    documented: DocumentedServer, served_sglang: Served, tmp_path: Path
) -> None:
    with closing(make_sglang(tmp_path, documented.url, on_update="drain")) as client:

        async def update_in_flight() -> tuple[Generation, Generation]:
            await client.update(in_folder(tmp_path)(0, make_weights(0)))
            first = asyncio.ensure_future(client.generate([3] * 5, SamplingParams(max_tokens=100)))
            await client.generate([4], SamplingParams(max_tokens=5))
            update = asyncio.ensure_future(client.update(in_folder(tmp_path)(1, make_weights(1))))
            while client._open.is_set():
                await asyncio.sleep(0.001)
            later = asyncio.ensure_future(client.generate([4], SamplingParams(max_tokens=5)))
            outcomes = await asyncio.gather(first, later, update)
            return outcomes[0], outcomes[1]

        before = len(documented.asked)
        first, later = asyncio.run(asyncio.wait_for(update_in_flight(), 60))
        asked = documented.asked[before:]
        served_sglang.run(served_sglang.publish())  # the server is not the drained client's alone
        assert (set(first.versions.tolist()), set(later.versions.tolist())) == ({0}, {1})
        assert not any(path == "/pause_generation" for path, _ in asked)


def test_continue_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use recompute or drain"):
        make_sglang(tmp_path, "http://127.0.0.1:9", on_update="continue")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SglangJaxServer, Served]]:
    """SGLang-Jax's own server, and a client that reaches it."""
    folder = tmp_path_factory.mktemp("real")
    server = SglangJaxServer(write_checkpoint(folder), folder / "server.log")
    try:
        server.wait()
        client_folder = tmp_path_factory.mktemp("real-client")
        with (
            closing(ForwardingServer(server.url)) as front,
            closing(make_sglang(client_folder, front.url, slots=8)) as client,
        ):
            yield server, Served(client, in_folder(client_folder))
    finally:
        server.kill()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_real_server_gives_the_logprobs_of_an_independent_forward_pass(
    real: tuple[SglangJaxServer, Served], random: np.random.Generator, temperature: float
) -> None:
    _, served = real
    prompts = [random.integers(0, CONFIG.vocab_size, length).astype(np.int32) for length in (1, 2, 31, 33, 40)]
    params = SamplingParams(max_tokens=110, temperature=temperature)  # it sends its answer in parts of 50

    async def sample() -> list[Generation]:
        return await asyncio.gather(*(served.sampler.generate(prompt, params) for prompt in prompts))

    for prompt, generation in zip(prompts, served.run(sample()), strict=True):
        assert len(generation.tokens) == 110
        assert served.worst_difference(prompt, generation, temperature) <= TOLERANCE


def test_a_real_server_stops_and_aborts(real: tuple[SglangJaxServer, Served]) -> None:
    _, served = real

    async def sample() -> tuple[Generation, Generation, Generation]:
        greedy = await served.sampler.generate([5, 6], SamplingParams(max_tokens=20, temperature=0.0))
        stops = (int(greedy.tokens[9]),)
        stopped = await served.sampler.generate(
            [5, 6], SamplingParams(max_tokens=20, temperature=0.0, stop_tokens=stops)
        )
        late = SamplingParams(max_tokens=150, deadline_seconds=0.05)
        return greedy, stopped, await served.sampler.generate([7], late)

    greedy, stopped, late = served.run(sample())
    reference_TV = served.reference(0, np.concatenate([[5, 6], greedy.tokens]))
    np.testing.assert_array_equal(greedy.tokens, reference_TV[1:-1].argmax(axis=-1))
    end = greedy.tokens.tolist().index(greedy.tokens[9])
    np.testing.assert_array_equal(stopped.tokens, greedy.tokens[: end + 1])
    assert stopped.stop_reason is StopReason.STOP
    assert late.stop_reason is StopReason.ABORTED
    assert len(late.tokens) == len(late.logprobs) < 150
    assert served.worst_difference(np.array([7]), late) <= TOLERANCE


def test_a_real_server_is_paused_around_an_update(real: tuple[SglangJaxServer, Served]) -> None:
    _, served = real

    async def update_in_flight() -> list[Generation]:
        params = SamplingParams(max_tokens=150)
        calls = [asyncio.ensure_future(served.sampler.generate([token], params)) for token in range(7)]
        await served.sampler.generate([7], SamplingParams(max_tokens=20))  # by then the others have tokens, too
        served.version += 1
        served.weights[served.version] = served.weights[0]  # the server in front says so, and changes nothing
        await served.sampler.update(served.publication(served.version, served.weights[0]))
        return await asyncio.gather(*calls)

    generations = served.run(update_in_flight())
    assert all(len(generation.tokens) == 150 for generation in generations)
    assert len(np.unique(np.concatenate([generation.versions for generation in generations]))) == 2
    assert max(served.worst_difference(np.array([token]), each) for token, each in enumerate(generations)) <= TOLERANCE


def test_a_server_killed_while_it_samples_fails_its_requests(real: tuple[SglangJaxServer, Served]) -> None:
    server, served = real

    async def kill_in_flight() -> list[Any]:
        params = SamplingParams(max_tokens=150)
        calls = [asyncio.ensure_future(served.sampler.generate([token], params)) for token in range(4)]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(server.kill)
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = served.run(kill_in_flight())
    assert all(isinstance(outcome, SamplerError) and "\n" not in str(outcome) for outcome in outcomes)
