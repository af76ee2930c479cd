"""Rollout workers against a real Redis. Samplers and environments are scripted, so that every ending can be made."""

import asyncio
import contextlib
import math
import os
import signal
import socket

import pytest
import scripted

from actors.environments import FROZEN_LAKE
from actors.episode import Agent, Sampling
from actors.samplers.contract import SamplerError
from actors.worker import RolloutWorker
from buffer import Buffer, BufferUnavailable, EmbeddedRedis, Limits
from buffer.trajectory import Status

AGENT = Agent(
    system_prompt=None, max_turns=12, max_tokens_per_turn=10, context_length=384, request_timeout_seconds=30.0
)
LIMITS = Limits(
    max_staleness=1,
    max_age_seconds=math.inf,
    groups_per_batch=2,
    group_size=3,
    max_bytes=10**8,
    slot_seconds=30.0,
    max_attempts=2,
    max_member_attempts=2,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as redis:
        yield redis


@pytest.fixture
def run(request):
    return request.node.name.replace("[", "-").replace("]", "")[:100]


def open_buffer(server, run, **limits):
    buffer = Buffer(server.url, run, timeout_seconds=20.0)
    buffer.open(Limits(**{**{name: getattr(LIMITS, name) for name in LIMITS.__slots__}, **limits}))
    return buffer


def make_worker(url, run, folder, samplers, **changes):
    arguments = {
        "name": "worker-0",
        "buffer_url": url,
        "payload_urls": (),
        "run": run,
        "buffer_timeout_seconds": 20.0,
        "buffer_outage_seconds": 20.0,
        "samplers": samplers,
        "model_folder": folder,
        "environment_id": FROZEN_LAKE,
        "environment_kwargs": {},
        "evaluation_kwargs": {},
        "step_timeout_seconds": 30.0,
        "threads": 2,
        "agent": AGENT,
        "temperature": 1.0,
        "episodes_in_flight": 8,
        "max_episode_attempts": 2,
        "train_seed_start": 1000,
        "train_tasks": 3,
    }
    return RolloutWorker(**{**arguments, **changes})


@contextlib.asynccontextmanager
async def running(worker, seconds=5.0):
    task = asyncio.create_task(worker.run())
    try:
        yield task
        await worker.drain(seconds)
        await asyncio.wait_for(task, 30)
    finally:
        task.cancel()


async def until(condition):
    """Wait until ``condition`` holds; pytest's own limit ends a wait that never does."""
    while not await condition():
        await asyncio.sleep(0.01)


def test_groups_flow_to_the_learner_and_every_group_is_accounted_for(server, run, character_folder):
    buffer = open_buffer(server, run, max_staleness=8)  # more than there will be versions: nothing is lost to age
    sampler = scripted.ScriptedSampler(character_folder, scripted.walk)
    worker = make_worker(server.url, run, character_folder, {"s": sampler})
    tasks = []

    async def scenario():
        epoch = await asyncio.to_thread(buffer.begin_epoch)
        async with running(worker):
            for version in range(4):
                lease = await asyncio.to_thread(buffer.lease, epoch, version, 30)
                assert len(lease.groups) == 2
                for group in lease.groups:
                    assert [t.index for t in group] == [0, 1, 2]
                    assert {t.metadata["seed"] for t in group} == {1000 + group[0].task % 3}
                    assert len({tuple(t.tokens) for t in group}) == 1  # the same map, and a policy without chance
                    assert {t.sampler for t in group} == {"s"}
                    tasks.append(group[0].task)
                sampler.version = version + 1
                await asyncio.to_thread(buffer.ack, lease, version + 1)
        return await worker.status()

    status = asyncio.run(scenario())
    stats = buffer.stats()
    assert len(set(tasks)) == 8
    assert stats.counters["acked"] == 8 and stats.reserved == 0 and stats.unaccounted == 0
    assert status["running"] == status["groups"] == 0 and status["draining"]
    assert status["episodes"][Status.COMPLETED] == status["commits"]["accepted"]
    assert status["tokens_sampled"] > 0 and status["errors"] == {}


def test_as_many_episodes_as_allowed_run_at_the_same_time_and_no_more(server, run, character_folder):
    open_buffer(server, run, groups_per_batch=20)
    sampler = scripted.ScriptedSampler(character_folder, scripted.walk, seconds=0.01)
    worker = make_worker(server.url, run, character_folder, {"s": sampler}, episodes_in_flight=7)

    async def scenario():
        async with running(worker):
            await until(lambda: enough(worker, "episodes", Status.COMPLETED, 40))

    asyncio.run(scenario())
    assert sampler.most_running == 7


async def enough(worker, counter, name, count):
    return (await worker.status())[counter].get(name, 0) >= count


class Flaky:
    """Fails the first request of every ``period`` requests."""

    def __init__(self, sampler, period):
        self.sampler = sampler
        self.period = period
        self.count = 0

    async def generate(self, tokens, params):
        self.count += 1
        if self.count % self.period == 1:
            raise SamplerError("hiccup")
        return await self.sampler.generate(tokens, params)


def test_a_failed_episode_is_tried_again_and_its_failure_counted(server, run, character_folder):
    buffer = open_buffer(server, run)
    sampler = Flaky(scripted.ScriptedSampler(character_folder, scripted.walk), 40)
    worker = make_worker(server.url, run, character_folder, {"s": sampler})

    async def scenario():
        async with running(worker):
            await until(lambda: asyncio.to_thread(lambda: buffer.stats().ready == 4))
        return await worker.status()

    status = asyncio.run(scenario())
    assert status["episodes"][Status.SAMPLER_ERROR] == status["errors"][Status.SAMPLER_ERROR] >= 1
    assert "hiccup" in status["last_error"]
    assert status["abandoned"] == {} and status["commits"]["accepted"] == 12


def test_a_group_whose_member_keeps_failing_is_abandoned_with_the_reason(server, run, character_folder):
    buffer = open_buffer(server, run)
    worker = make_worker(server.url, run, character_folder, {"s": scripted.FailingSampler()})

    async def scenario():
        async with running(worker):
            await until(lambda: enough(worker, "abandoned", Status.SAMPLER_ERROR, 4))
        return await worker.status()

    status = asyncio.run(scenario())
    stats = buffer.stats()
    abandoned = sum(status["abandoned"].values())
    assert stats.counters["abandoned"] == stats.counters["reserved"] == abandoned
    assert stats.counters["abandoned:sampler_error"] >= 4
    assert stats.counters["tasks_given_up"] >= 1
    assert stats.outstanding == 0 and stats.unaccounted == 0


def test_a_group_does_without_a_member_that_keeps_failing(server, run, character_folder):
    buffer = open_buffer(server, run, max_staleness=3, max_member_attempts=1, min_group_size=2)
    scripted.Counting.release.clear()
    count = iter(range(10**6))
    # Every ninth episode hangs, so no group of three has two of them; each has one turn.
    sampler = scripted.ScriptedSampler(character_folder, lambda _: "done" if next(count) % 9 else "hang")
    worker = make_worker(
        server.url,
        run,
        character_folder,
        {"s": sampler},
        environment_id="scripted/Counting-v0",
        step_timeout_seconds=0.3,
    )

    async def scenario():
        epoch = await asyncio.to_thread(buffer.begin_epoch)
        async with running(worker):
            await until(lambda: asyncio.to_thread(lambda: buffer.stats().ready == 8))
            lease = await asyncio.to_thread(buffer.lease, epoch, 0, 1)
        scripted.Counting.release.set()
        return lease

    lease = asyncio.run(scenario())
    counters = buffer.stats().counters
    assert counters["short_groups"] == counters["failed:timeout"] >= 1
    assert {len(group) for group in lease.groups} <= {2, 3}


def test_an_environment_that_hangs_costs_its_own_groups_only(server, run, character_folder):
    buffer = open_buffer(server, run, max_staleness=3, max_member_attempts=1)
    scripted.Counting.release.clear()
    count = iter(range(10**6))
    # Every eighth episode hangs; each has one turn.
    sampler = scripted.ScriptedSampler(character_folder, lambda _: "done" if next(count) % 8 else "hang")
    worker = make_worker(
        server.url,
        run,
        character_folder,
        {"s": sampler},
        environment_id="scripted/Counting-v0",
        step_timeout_seconds=0.3,
    )

    async def scenario():
        async with running(worker):
            await until(lambda: asyncio.to_thread(lambda: buffer.stats().ready == 8))
        scripted.Counting.release.set()
        return await worker.status()

    status = asyncio.run(scenario())
    assert status["abandoned"][Status.TIMEOUT] >= 1
    assert buffer.stats().counters["abandoned:timeout"] >= 1
    assert buffer.stats().unaccounted == 0


def test_episodes_go_to_the_sampler_that_works(server, run, character_folder):
    buffer = open_buffer(server, run, groups_per_batch=4)
    good = scripted.ScriptedSampler(character_folder, scripted.walk)
    worker = make_worker(server.url, run, character_folder, {"bad": scripted.FailingSampler(), "good": good})

    async def scenario():
        async with running(worker):
            await until(lambda: asyncio.to_thread(lambda: buffer.stats().ready == 8))
        return await worker.status()

    status = asyncio.run(scenario())
    assert 1 <= status["episodes"][Status.SAMPLER_ERROR] <= 8  # those that started before the failure was known
    assert status["episodes"][Status.COMPLETED] >= 24


def test_a_drain_ends_long_episodes_and_gives_their_slots_back(server, run, character_folder):
    buffer = open_buffer(server, run)
    sampler = scripted.ScriptedSampler(character_folder, scripted.walk, seconds=600.0)
    worker = make_worker(server.url, run, character_folder, {"s": sampler})

    async def scenario():
        async with running(worker, seconds=0.1):
            await until(lambda: asyncio.to_thread(lambda: buffer.stats().reserved == 3))  # room for 8 = 2 2/3 groups
        return await worker.status()

    status = asyncio.run(scenario())
    stats = buffer.stats()
    assert status["episodes"] == {Status.CANCELLED: 8}
    assert stats.counters["abandoned:drained"] == 3 and stats.outstanding == 0 and stats.unaccounted == 0


def test_a_group_whose_slot_is_gone_is_stopped(server, run, character_folder):
    buffer = open_buffer(server, run, slot_seconds=1.0, groups_per_batch=1, max_staleness=0)
    sampler = scripted.ScriptedSampler(character_folder, scripted.walk, seconds=600.0)
    worker = make_worker(server.url, run, character_folder, {"s": sampler})

    async def scenario():
        epoch = await asyncio.to_thread(buffer.begin_epoch)
        async with running(worker, seconds=0.1):
            await until(lambda: asyncio.to_thread(lambda: buffer.stats().reserved == 1))
            await asyncio.to_thread(buffer.advance, epoch, 5)  # whatever was sampled for version 0 is stale now
            await until(lambda: enough(worker, "episodes", Status.CANCELLED, 3))
        return await worker.status()

    status = asyncio.run(scenario())
    stats = buffer.stats()
    assert stats.counters["stale"] == 1 and stats.unaccounted == 0
    assert status["abandoned"].keys() <= {"drained"}  # the slot that went stale was not given back a second time


class OneFast:
    """Answers the first request at once, for version 0, and the others after ten minutes."""

    def __init__(self, sampler):
        self.sampler = sampler
        self.go_on = asyncio.Event()
        self.count = 0

    async def generate(self, tokens, params):
        self.count += 1
        if self.count > 1:
            await asyncio.sleep(600)
        await self.go_on.wait()
        return await self.sampler.generate(tokens, params)


def test_a_stale_member_stops_the_other_episodes_of_its_group(server, run, character_folder):
    # Slots live so long that a renewal cannot be what stops the group.
    buffer = open_buffer(server, run, groups_per_batch=1, max_staleness=0, slot_seconds=3000.0)
    sampler = OneFast(scripted.ScriptedSampler(character_folder, lambda _: "R"))
    worker = make_worker(
        server.url, run, character_folder, {"s": sampler}, episodes_in_flight=3, agent=Agent(None, 1, 10, 384, 30.0)
    )

    async def scenario():
        epoch = await asyncio.to_thread(buffer.begin_epoch)
        async with running(worker, seconds=0.1):
            await until(lambda: asyncio.to_thread(lambda: sampler.count == 3))
            await asyncio.to_thread(buffer.advance, epoch, 5)
            sampler.go_on.set()
            await until(lambda: enough(worker, "episodes", Status.CANCELLED, 2))
        return await worker.status()

    status = asyncio.run(scenario())
    assert status["commits"] == {"stale": 1}
    assert buffer.stats().counters["stale"] == 1 and buffer.stats().unaccounted == 0


def test_slots_are_renewed_while_their_episodes_run(server, run, character_folder):
    buffer = open_buffer(server, run, slot_seconds=1.0, groups_per_batch=1, max_staleness=0)
    sampler = scripted.ScriptedSampler(character_folder, lambda _: "R", seconds=3.0)
    worker = make_worker(
        server.url, run, character_folder, {"s": sampler}, agent=Agent(None, 1, 10, 384, 30.0)
    )  # one turn, three times as long as a slot

    async def scenario():
        async with running(worker):
            await until(lambda: asyncio.to_thread(lambda: buffer.stats().ready == 1))

    asyncio.run(scenario())
    assert buffer.stats().counters["expired"] == 0


@contextlib.contextmanager
def frozen(server):
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_a_worker_goes_on_when_redis_comes_back(server, run, character_folder):
    buffer = open_buffer(server, run, groups_per_batch=4)
    sampler = scripted.ScriptedSampler(character_folder, scripted.walk, seconds=0.05)
    worker = make_worker(server.url, run, character_folder, {"s": sampler}, buffer_timeout_seconds=0.3)

    async def scenario():
        async with running(worker):
            await until(lambda: enough(worker, "commits", "accepted", 3))
            with frozen(server):
                await until(lambda: enough(worker, "errors", "buffer", 2))
            await until(lambda: asyncio.to_thread(lambda: buffer.stats().ready == 8))

    asyncio.run(scenario())
    assert buffer.stats().unaccounted == 0


def test_a_worker_fails_clearly_when_redis_stays_away(server, run, character_folder):
    open_buffer(server, run)
    sampler = scripted.ScriptedSampler(character_folder, scripted.walk, seconds=0.05)
    worker = make_worker(
        server.url, run, character_folder, {"s": sampler}, buffer_timeout_seconds=0.3, buffer_outage_seconds=1.0
    )

    async def scenario():
        task = asyncio.create_task(worker.run())
        await until(lambda: enough(worker, "commits", "accepted", 1))
        with frozen(server), pytest.raises(BufferUnavailable, match=r"worker worker-0 could not \w+ for 1.0 s"):
            await task

    asyncio.run(scenario())


def test_evaluation_needs_no_buffer_and_keeps_the_order_of_the_seeds(character_folder):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{unused.getsockname()[1]}/0"
        sampler = scripted.ScriptedSampler(character_folder, scripted.walk, version=4, seconds=0.001)
        worker = make_worker(url, "evaluation", character_folder, {"s": sampler}, episodes_in_flight=5)
        results = asyncio.run(worker.evaluate(range(500, 540), Sampling(0.8, top_k=7, top_p=0.9, min_p=0.1)))
    assert [result["seed"] for result in results] == list(range(500, 540))
    assert sampler.most_running == 5
    asked = {(params.temperature, params.top_k, params.top_p, params.min_p) for _, params in sampler.requests}
    assert asked == {(0.8, 7, 0.9, 0.1)}
    assert {result["version"] for result in results} == {4}
    for result in results:
        assert result["success"] == (result["reward"] == 1.0)
        assert result["status"] == "completed" and result["trainable"]
        assert result["tokens"] == 2 * result["turns"]
    assert 0 < sum(result["success"] for result in results) < 40  # some maps have a hole on this policy's way


def test_evaluation_plays_its_own_environment_and_training_the_other(server, run, character_folder):
    buffer = open_buffer(server, run, groups_per_batch=10)
    sampler = scripted.ScriptedSampler(character_folder, scripted.walk)
    worker = make_worker(
        server.url,
        run,
        character_folder,
        {"s": sampler},
        environment_kwargs={"size": 3, "split": "train"},
        evaluation_kwargs={"split": "evaluation"},
        train_tasks=1000,
    )

    def first_prompts():
        prompts = {sampler.chat.decode_reply(tokens) for tokens, _ in sampler.requests}
        sampler.requests.clear()
        return {prompt for prompt in prompts if "assistant" not in prompt.removesuffix("<|assistant|>")}

    async def scenario():
        async with running(worker):
            await until(lambda: asyncio.to_thread(lambda: buffer.stats().ready == 20))
        trained = first_prompts()
        await worker.evaluate(range(60), Sampling(0.0))
        return trained, first_prompts()

    trained, evaluated = asyncio.run(scenario())
    assert len(trained) > 5 and len(evaluated) > 5 and not trained & evaluated


def test_evaluation_reports_what_failed(character_folder):
    worker = make_worker("redis://127.0.0.1:1/0", "evaluation", character_folder, {"s": scripted.FailingSampler()})
    (result,) = asyncio.run(worker.evaluate([3], Sampling(0.0)))
    assert result["status"] == "sampler_error" and not result["trainable"] and not result["success"]
    assert "the engine is gone" in result["error"]


def test_a_worker_without_samplers_is_refused(character_folder):
    with pytest.raises(ValueError, match="at least one"):
        make_worker("redis://127.0.0.1:1/0", "r", character_folder, {})
