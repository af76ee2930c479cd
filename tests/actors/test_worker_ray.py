"""The rollout worker as the cluster runs it: a Ray actor that calls a sampler in another Ray actor."""

import asyncio
import os
from pathlib import Path

import pytest
import ray
import scripted
from test_worker import AGENT, LIMITS

from actors.environments import FROZEN_LAKE
from actors.routing import RemoteSampler
from actors.samplers.contract import RequestError, SamplerError, SamplingParams
from actors.worker import RolloutWorker
from buffer import Buffer, EmbeddedRedis

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def local_ray():
    paths = os.pathsep.join([str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield
    ray.shutdown()


class WalkingSampler(scripted.ScriptedSampler):
    """The walker as an actor. The number of tokens asked for chooses another behaviour: see ``answer``."""

    def __init__(self, folder):
        super().__init__(folder, scripted.walk)
        self.calls = 0

    async def answer(self, index, tokens, params):
        if params.max_tokens == 1:
            return index, RequestError("one token is too few")
        if params.max_tokens == 2:
            raise ZeroDivisionError("a bug")
        if params.max_tokens == 4:
            await asyncio.sleep(600)
        return index, await self.generate(tokens, params)

    async def generate_many(self, requests):
        self.calls += 1
        if any(params.max_tokens == 3 for _, params in requests):
            return  # forgets to answer
        answers = [asyncio.create_task(self.answer(i, *request)) for i, request in enumerate(requests)]
        for answer in asyncio.as_completed(answers):
            yield [await answer]

    async def count_calls(self):
        return self.calls


@pytest.fixture(scope="module")
def sampler(local_ray, character_folder):
    return ray.remote(num_cpus=0)(WalkingSampler).remote(character_folder)


def test_a_worker_actor_feeds_the_learner_and_evaluates(sampler, character_folder, tmp_path):
    with EmbeddedRedis(tmp_path / "redis") as server:
        buffer = Buffer(server.url, "ray", timeout_seconds=20.0)
        buffer.open(LIMITS)
        epoch = buffer.begin_epoch()
        worker = ray.remote(num_cpus=0)(RolloutWorker).remote(
            name="worker-0",
            buffer_url=server.url,
            run="ray",
            buffer_timeout_seconds=20.0,
            buffer_outage_seconds=20.0,
            samplers={"sampler-0": sampler},
            model_folder=character_folder,
            environment_id=FROZEN_LAKE,
            environment_kwargs={},
            step_timeout_seconds=30.0,
            threads=2,
            agent=AGENT,
            temperature=1.0,
            episodes_in_flight=6,
            max_episode_attempts=2,
            train_seed_start=0,
            train_tasks=100,
        )
        run = worker.run.remote()
        for version in range(2):
            lease = buffer.lease(epoch, version, 60)
            assert [len(group) for group in lease.groups] == [3, 3]
            assert all(t.sampler == "sampler-0" and t.status == "completed" for group in lease.groups for t in group)
            buffer.ack(lease, version + 1)
        results = ray.get(worker.evaluate.remote([7, 8, 9], 0.0), timeout=60)
        assert [result["seed"] for result in results] == [7, 8, 9]
        ray.get(worker.drain.remote(5.0), timeout=60)
        ray.get(run, timeout=60)
        status = ray.get(worker.status.remote(), timeout=60)
        assert status["errors"] == {} and status["running"] == 0
        assert buffer.stats().reserved == 0 and buffer.stats().unaccounted == 0
        ray.kill(worker)


def generate(handle, *sizes, waited=None):
    """Answers to requests for ``sizes`` tokens, sent together; ``waited`` of them are waited for."""

    async def call():
        sampler = RemoteSampler("s0", handle)
        requests = [asyncio.create_task(sampler.generate([2, 3], SamplingParams(max_tokens=size))) for size in sizes]
        async with asyncio.timeout(60):
            return await asyncio.gather(*requests[:waited], return_exceptions=True)

    return asyncio.run(call())


def test_requests_that_come_together_travel_together(sampler):
    before = ray.get(sampler.count_calls.remote(), timeout=60)
    answers = generate(sampler, *range(5, 25))
    assert len(answers) == 20 and all(answer.tokens[-1] == 1 for answer in answers)
    assert ray.get(sampler.count_calls.remote(), timeout=60) == before + 1


def test_a_long_reply_holds_up_no_short_one(sampler):
    (answer,) = generate(sampler, 5, 4, waited=1)
    assert answer.tokens[-1] == 1


def test_errors_of_a_sampler_actor_arrive_as_the_contract_has_them(sampler):
    rejected, good = generate(sampler, 1, 5)
    assert isinstance(rejected, RequestError) and str(rejected) == "one token is too few"
    assert good.tokens[-1] == 1
    (broken,) = generate(sampler, 2)
    assert isinstance(broken, SamplerError) and str(broken) == "sampler s0 failed: ZeroDivisionError('a bug')"
    (forgotten,) = generate(sampler, 3)
    assert isinstance(forgotten, SamplerError) and "without an answer" in str(forgotten)


def test_a_dead_sampler_actor_is_a_sampler_error(local_ray, character_folder):
    handle = ray.remote(num_cpus=0)(WalkingSampler).remote(character_folder)
    ray.kill(handle)
    (answer,) = generate(handle, 5)
    assert isinstance(answer, SamplerError) and "sampler s0 does not answer" in str(answer)
