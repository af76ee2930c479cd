import asyncio

import numpy as np
import pytest
import scripted

from actors.environments import FROZEN_LAKE
from actors.environments.frozen_lake import demonstrate
from actors.environments.pool import EnvironmentPool
from actors.episode import Agent, Place, Sampling, run_episode
from actors.samplers.contract import Generation, RequestError, StopReason
from buffer.trajectory import NOT_SAMPLED, Status

AGENT = Agent(system_prompt=None, max_turns=12, max_tokens_per_turn=3, context_length=384, request_timeout_seconds=30.0)


def play(chat, sampler, *, environment=FROZEN_LAKE, seed=0, step_timeout_seconds=30.0, **changes):
    agent = Agent(**{**{name: getattr(AGENT, name) for name in AGENT.__slots__}, **changes})

    async def episode():
        pool = EnvironmentPool(environment, {}, threads=2, step_timeout_seconds=step_timeout_seconds)
        place = Place(task=7, seed=seed, group="g", index=3)
        try:
            return await run_episode(
                place,
                agent=agent,
                chat=chat,
                environments=pool,
                sampler=sampler,
                sampling=Sampling(0.7),
            )
        finally:
            pool.close()

    return asyncio.run(episode())


def hasty(seed):
    demonstration = demonstrate(seed, {}, noise=0.0, rng=np.random.default_rng(0), max_turns=12)
    moves = iter([m["content"] for m in demonstration.messages if m["role"] == "assistant"])
    return demonstration, lambda _: next(moves)


@pytest.mark.parametrize(("seed", "success"), [(0, False), (1, False), (2, True)])
def test_an_episode_of_the_hasty_walker_has_the_tokens_and_mask_of_its_demonstration(
    chat, character_folder, seed, success
):
    demonstration, reply = hasty(seed)
    trajectory = play(chat, scripted.ScriptedSampler(character_folder, reply, version=5), seed=seed)
    tokens, loss_mask = chat.supervised(demonstration.messages)
    assert trajectory.tokens.tolist() == tokens.tolist()
    assert trajectory.loss_mask.tolist() == loss_mask.tolist()
    assert trajectory.status is Status.COMPLETED
    assert demonstration.success == success
    assert trajectory.reward == float(success)
    assert trajectory.rewards.tolist() == [0.0] * (len(trajectory.rewards) - 1) + [float(success)]
    assert (trajectory.task, trajectory.group, trajectory.index, trajectory.sampler) == (7, "g", 3, "scripted")
    turns = len(trajectory.rewards)
    assert trajectory.metadata == {"seed": seed, "success": success, "turns": turns, "invalid_moves": 0}
    assert set(trajectory.timings) == {"sampler", "environment", "total"}


def test_every_sampled_token_keeps_its_own_log_probability_and_version(chat, character_folder):
    sampler = scripted.ScriptedSampler(character_folder, lambda _: "LL")

    async def generate(tokens, params, plain=sampler.generate):
        sampler.version += 1
        return await plain(tokens, params)

    sampler.generate = generate
    trajectory = play(chat, sampler, max_turns=3)
    assert trajectory.logprobs[trajectory.loss_mask].tolist() == [-1, -2, -3] * 3
    assert trajectory.versions[trajectory.loss_mask].tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert set(trajectory.versions[~trajectory.loss_mask]) == {NOT_SAMPLED}
    assert not trajectory.logprobs[~trajectory.loss_mask].any()
    assert trajectory.metadata["invalid_moves"] == 3
    assert trajectory.oldest_version == 1


def test_every_request_continues_the_stream_exactly_as_it_was_sampled(chat, character_folder):
    sampler = scripted.ScriptedSampler(character_folder, lambda _: "abcdef")  # cut after three tokens
    trajectory = play(chat, sampler, max_turns=4, stop=("</move>",))
    for tokens, params in sampler.requests:
        assert not params.filters and params.stop_strings == ("</move>",)
        assert tokens.tolist() == trajectory.tokens[: len(tokens)].tolist()
        assert (params.temperature, params.stop_tokens, params.max_tokens) == (0.7, chat.stop_tokens, 3)
    (first, _), (second, _) = sampler.requests[:2]
    reply = second[len(first) : len(first) + 4].tolist()
    assert reply == [*chat.encode_reply("abc")]
    # The end token was not sampled, so it is given and not trained on.
    assert trajectory.loss_mask[len(first) : len(first) + 4].tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("changes", "turns"),
    [({"max_turns": 2}, 2), ({"context_length": 60}, 2), ({"context_length": 61}, 2)],
)
def test_turns_and_context_length_truncate(chat, character_folder, changes, turns):
    sampler = scripted.ScriptedSampler(character_folder, lambda _: "LL")
    trajectory = play(chat, sampler, **changes)
    assert trajectory.status is Status.TRUNCATED and trajectory.status.trainable
    assert len(trajectory.rewards) == turns
    assert trajectory.loss_mask[-1]
    assert len(trajectory.tokens) <= changes.get("context_length", 384)


def test_the_last_reply_is_cut_to_the_room_that_the_context_leaves(chat, character_folder):
    sampler = scripted.ScriptedSampler(character_folder, lambda _: "L" * 30)
    trajectory = play(chat, sampler, max_tokens_per_turn=50, context_length=33)
    assert len(trajectory.tokens) == 33
    assert trajectory.status is Status.TRUNCATED


def test_a_prompt_without_room_for_a_reply_is_not_blamed_on_the_policy(chat, character_folder):
    trajectory = play(chat, scripted.ScriptedSampler(character_folder, lambda _: "L"), context_length=10)
    assert trajectory.status is Status.ENV_ERROR
    assert "context_length" in trajectory.metadata["error"]
    assert len(trajectory.tokens) == 0


@pytest.mark.parametrize(
    ("reply", "seed", "status", "error"),
    [
        ("done", 0, Status.COMPLETED, None),
        ("cut", 0, Status.TRUNCATED, None),
        ("raise", 0, Status.ENV_ERROR, "the simulator crashed"),
        ("nan", 0, Status.ENV_ERROR, "reward nan"),
        ("hang", 0, Status.TIMEOUT, "longer than 0.3 s"),
        ("done", 13, Status.ENV_ERROR, "unlucky seed"),
    ],
)
def test_the_status_says_how_the_environment_ended_the_episode(chat, character_folder, reply, seed, status, error):
    scripted.Counting.release.clear()
    sampler = scripted.ScriptedSampler(character_folder, lambda _: reply)
    trajectory = play(
        chat,
        sampler,
        environment="scripted/Counting-v0",
        seed=seed,
        step_timeout_seconds=0.3,
        max_tokens_per_turn=20,
    )
    scripted.Counting.release.set()
    assert trajectory.status is status
    if error is None:
        assert "error" not in trajectory.metadata
        assert trajectory.metadata["success"]  # the environment says nothing, the total reward is positive
    else:
        assert error in trajectory.metadata["error"]
        assert not trajectory.status.trainable


class Rejecting:
    name = "scripted"

    async def generate(self, tokens, params):
        raise RequestError("too long")


class GivingUp:
    name = "scripted"

    async def generate(self, tokens, params):
        nothing = np.zeros(0, np.int32)
        return Generation(nothing, nothing.astype(np.float32), nothing, StopReason.ABORTED)


@pytest.mark.parametrize(
    ("sampler", "error"),
    [
        (scripted.FailingSampler(), "the engine is gone"),
        (Rejecting(), "too long"),
        (GivingUp(), "request_timeout_seconds"),
    ],
)
def test_a_failing_sampler_is_data_with_its_reason(chat, sampler, error):
    trajectory = play(chat, sampler)
    assert trajectory.status is Status.SAMPLER_ERROR
    assert error in trajectory.metadata["error"]
    assert not trajectory.loss_mask.any()


def test_text_that_the_tokenizer_cannot_express_is_an_environment_error(chat, character_folder):
    sampler = scripted.ScriptedSampler(character_folder, lambda _: "L")
    trajectory = play(chat, sampler, system_prompt="Bonne journée")
    assert trajectory.status is Status.ENV_ERROR
    assert "cannot encode" in trajectory.metadata["error"]


def test_cancellation_passes_through_and_loses_no_environment(chat, character_folder):
    async def cancelled():
        scripted.Counting.made = 0
        pool = EnvironmentPool("scripted/Counting-v0", {}, threads=1, step_timeout_seconds=30.0)
        sampler = scripted.ScriptedSampler(character_folder, lambda _: "ok", seconds=60.0)
        arguments = {"agent": AGENT, "chat": chat, "environments": pool, "sampling": Sampling(1.0)}
        episode = asyncio.create_task(run_episode(Place(0, 0, "g", 0), sampler=sampler, **arguments))
        while not sampler.running:
            await asyncio.sleep(0.001)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        async with pool.session() as session:
            assert await session.reset(0) == "reset 2"
        pool.close()

    asyncio.run(cancelled())
    assert scripted.Counting.made == 1
