import asyncio
import subprocess
import sys
import threading

import gymnasium
import numpy as np
import pytest
import scripted
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from actors.environments import FROZEN_LAKE, EnvironmentSetupError, make
from actors.environments.frozen_lake import MOVES, FrozenLakeText, demonstrate
from actors.environments.pool import EnvironmentFailure, EnvironmentPool, EnvironmentTimeout
from actors.environments.threads import CallThreads, CallTimeout


@pytest.mark.parametrize("seed", range(10))
def test_frozen_lake_plays_as_gymnasium_does_on_the_same_map(seed):
    rng = np.random.default_rng(seed)
    board = generate_random_map(size=4, p=0.8, seed=seed)
    reference = gymnasium.make("FrozenLake-v1", desc=board, is_slippery=False)
    state, _ = reference.reset(seed=0)
    environment = make(FROZEN_LAKE, {"size": 4, "p": 0.8})
    observation, _ = environment.reset(seed=seed)
    ended = False
    while not ended:
        expected = [list(row.replace("S", ".").replace("F", ".")) for row in board]
        expected[state // 4][state % 4] = "A"
        assert observation == "\n".join("".join(row) for row in expected)
        assert environment.observation_space.contains(observation)
        move = int(rng.integers(4))
        state, reward, ended, _, _ = reference.step(move)
        observation, own_reward, own_ended, _, info = environment.step(MOVES[move])
        assert (own_reward, own_ended) == (reward, ended)
        assert info["success"] == (reward == 1)


@pytest.mark.parametrize("action", ["", "X", "LD", "l", "Left", "<|user|>", "\n"])
def test_an_invalid_move_changes_nothing_and_is_said(action):
    environment = FrozenLakeText()
    first, _ = environment.reset(seed=1)
    observation, reward, terminated, truncated, info = environment.step(action)
    assert observation == "invalid\n" + first
    assert environment.observation_space.contains(observation)
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"success": False, "invalid_move": True}


def test_the_seed_alone_chooses_the_map():
    environment = FrozenLakeText()
    maps = [environment.reset(seed=seed)[0] for seed in range(40)]
    assert len(set(maps)) > 20
    assert [FrozenLakeText().reset(seed=seed)[0] for seed in range(40)] == maps
    environment.reset(seed=5)
    unseeded = [environment.reset()[0] for _ in range(40)]
    assert len(set(unseeded)) > 20


def test_no_evaluation_map_occurs_in_training_whatever_the_seeds():
    def maps(split, seeds):
        environment = make(FROZEN_LAKE, {"split": split})
        return [environment.reset(seed=seed)[0] for seed in seeds]

    train, held_out = maps("train", range(3000)), maps("evaluation", range(300))
    assert not set(train) & set(held_out)
    assert len(set(train)) > 500 and len(set(held_out)) > 60
    everything = maps("all", range(3000))
    assert 0.1 < np.mean([board in set(held_out) for board in everything]) < 0.3
    holes = [np.mean([board.count("H") for board in boards]) for boards in (train, held_out, everything)]
    assert np.ptp(holes) < 0.3, "the splits should be equally hard"


@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_the_maps_of_a_split_follow_from_the_seed(split):
    def play():
        environment = FrozenLakeText(split=split)
        return [environment.reset(seed=seed)[0] for seed in range(40)] + [environment.reset()[0] for _ in range(40)]

    maps = play()
    assert play() == maps
    assert len(set(maps[:40])) > 20 and len(set(maps[40:])) > 20


def test_demonstrations_keep_to_the_split():
    def first_maps(split):
        played = [
            demonstrate(seed, {"split": split}, noise=0.5, rng=np.random.default_rng(0), max_turns=1)
            for seed in range(300)
        ]
        return {demonstration.messages[0]["content"] for demonstration in played}

    assert not first_maps("train") & first_maps("evaluation")


def test_the_hasty_walker_goes_straight_for_the_goal_and_into_a_hole_if_one_is_there():
    successes = 0
    for seed in range(100):
        demonstration = demonstrate(seed, {}, noise=0.0, rng=np.random.default_rng(seed), max_turns=50)
        moves = [m["content"] for m in demonstration.messages if m["role"] == "assistant"]
        assert set(moves) <= {"D", "R"}
        assert all(abs(moves[:n].count("D") - moves[:n].count("R")) <= 1 for n in range(7))
        board = generate_random_map(size=4, p=0.8, seed=seed)
        assert board[moves.count("D")][moves.count("R")] == ("G" if demonstration.success else "H")
        successes += demonstration.success
    assert 20 < successes < 50, "the walker should be a weak player, but not a hopeless one"


def test_noise_makes_the_walker_weaker_down_to_random_play():
    def successes(noise):
        rng = np.random.default_rng(0)
        return sum(demonstrate(seed, {}, noise=noise, rng=rng, max_turns=12).success for seed in range(400))

    steady, half, random = successes(0.0), successes(0.5), successes(1.0)
    assert steady > half > random
    assert random < 40


def test_a_demonstration_is_a_conversation_that_ends_with_a_move():
    demonstration = demonstrate(0, {}, noise=1.0, rng=np.random.default_rng(3), max_turns=3, system_prompt="Play.")
    roles = [message["role"] for message in demonstration.messages]
    assert roles[0] == "system" and roles[-1] == "assistant"
    assert roles[1:] == ["user", "assistant"] * (len(roles) // 2)
    assert len(roles) <= 7


def test_frozen_lake_needs_no_pygame():
    code = (
        "import sys; from actors.environments import make; e = make('headrace/FrozenLakeText-v0', {}); "
        "e.reset(seed=0); e.step('R'); e.close(); assert 'pygame' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("identifier", "kwargs", "complaint"),
    [
        ("headrace/FrozenLake-v0", {}, "FrozenLake"),
        ("no_such_module:X-v0", {}, "no_such_module"),
        (FROZEN_LAKE, {"sise": 4}, "sise"),
        (FROZEN_LAKE, {"size": 1}, "size=1"),
        (FROZEN_LAKE, {"split": "test"}, "split='test'; expected one of all, train, evaluation"),
        (FROZEN_LAKE, {"p": 1.0, "split": "evaluation"}, "no evaluation map of size=4, p=1.0"),
        ("CartPole-v1", {}, "observation_space Box"),
        ("scripted:scripted/Blind-v0", {}, "action_space Discrete"),
    ],
)
def test_what_is_no_text_environment_is_refused_with_the_reason(identifier, kwargs, complaint):
    with pytest.raises(EnvironmentSetupError, match=complaint):
        make(identifier, kwargs)


def counting_pool(*, threads=2, step_timeout_seconds=30.0):
    scripted.Counting.made = scripted.Counting.closed = 0
    return EnvironmentPool("scripted/Counting-v0", {}, threads=threads, step_timeout_seconds=step_timeout_seconds)


def test_an_environment_is_used_again_by_the_next_episode():
    async def episodes():
        pool = counting_pool()
        observations = []
        for seed in range(3):
            async with pool.session() as session:
                observations.append(await session.reset(seed))
                step = await session.step("done")
                assert step.terminated and session.seconds > 0
        pool.close()
        return observations

    assert asyncio.run(episodes()) == ["reset 1", "reset 2", "reset 3"]
    assert scripted.Counting.made == scripted.Counting.closed == 1


def test_episodes_at_the_same_time_have_an_environment_each():
    async def both():
        pool = counting_pool()
        async with pool.session() as first, pool.session() as second:
            observations = [await first.reset(0), await second.reset(0)]
        pool.close()
        return observations

    assert asyncio.run(both()) == ["reset 1", "reset 1"]
    assert scripted.Counting.made == scripted.Counting.closed == 2


@pytest.mark.parametrize(
    ("action", "complaint"),
    [("raise", "the simulator crashed"), ("nan", "reward nan"), ("number", "type int; expected str")],
)
def test_a_broken_environment_is_reported_and_replaced(action, complaint):
    async def episodes():
        pool = counting_pool()
        async with pool.session() as session:
            await session.reset(0)
            with pytest.raises(EnvironmentFailure, match=complaint):
                await session.step(action)
        async with pool.session() as session:
            observation = await session.reset(0)
        pool.close()
        return observation

    assert asyncio.run(episodes()) == "reset 1"
    assert scripted.Counting.made == 2


def test_hung_environments_hold_up_no_other_episode_and_are_closed_when_they_return():
    async def episodes():
        pool = counting_pool(threads=2, step_timeout_seconds=0.3)
        scripted.Counting.release.clear()

        async def play(action):
            async with pool.session() as session:
                await session.reset(0)
                return await session.step(action)

        answers = await asyncio.gather(*[play(a) for a in ["hang", "hang", "hang", "ok", "ok"]], return_exceptions=True)
        assert [isinstance(answer, EnvironmentTimeout) for answer in answers] == [True, True, True, False, False]
        scripted.Counting.release.set()
        pool.close()
        while scripted.Counting.closed < scripted.Counting.made:
            await asyncio.sleep(0.01)

    asyncio.run(episodes())


def run_calls(scenario, *, count=1, timeout_seconds=30.0):
    async def with_threads():
        threads = CallThreads(count, timeout_seconds=timeout_seconds)
        try:
            await scenario(threads)
        finally:
            threads.close()

    asyncio.run(with_threads())


def test_a_cancelled_call_is_disposed_of_in_whatever_state_it_is():
    begun, go_on = threading.Event(), threading.Event()
    ran, disposed = [], []

    def slow():
        begun.set()
        assert go_on.wait(60)
        ran.append("running")

    async def scenario(threads):
        names = {"running": slow, "waiting": lambda: ran.append("waiting"), "next": lambda: ran.append("next")}
        calls = [
            asyncio.create_task(threads.call(function, lambda _, name=name: disposed.append(name)))
            for name, function in names.items()
        ]
        await asyncio.to_thread(begun.wait, 60)
        calls[0].cancel()
        calls[1].cancel()
        await asyncio.wait(calls[:2])
        go_on.set()
        await calls[2]
        ended = asyncio.create_task(threads.call(lambda: ran.append("ended"), lambda _: disposed.append("ended")))
        while "ended" not in ran:
            await asyncio.to_thread(int)
        ended.cancel()  # at the latest now: its result may be on the way
        await asyncio.wait([ended])
        await threads.call(lambda: None, lambda _: None)
        assert ("ended" in disposed) == ended.cancelled()

    run_calls(scenario)
    assert ran == ["running", "next", "ended"]
    assert disposed[:2] == ["running", "waiting"] and "next" not in disposed


def test_calls_run_at_the_same_time_up_to_the_count_and_in_order():
    barrier = threading.Barrier(3, timeout=60)  # passes only if three calls run at once

    async def scenario(threads):
        calls = [asyncio.create_task(threads.call(barrier.wait, lambda _: None)) for _ in range(9)]
        assert all(call.error is None for call in await asyncio.gather(*calls))
        order = []
        single = CallThreads(1, timeout_seconds=30.0)
        await asyncio.gather(*[single.call(lambda i=i: order.append(i), lambda _: None) for i in range(200)])
        single.close()
        assert order == list(range(200))

    run_calls(scenario, count=3)


@pytest.mark.parametrize("count", [1, 2])
def test_every_hung_call_ends_though_hung_calls_outnumber_the_threads(count):
    release = threading.Event()

    async def scenario(threads):
        calls = [threads.call(lambda: release.wait(60), lambda _: None) for _ in range(5)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(answer, CallTimeout) for answer in answers)
        call = await threads.call(lambda: "alive", lambda _: None)
        assert call.result == "alive"
        release.set()

    run_calls(scenario, count=count, timeout_seconds=0.1)
