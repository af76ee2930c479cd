"""The rollout worker as the cluster runs it: a Ray actor that calls a sampler in another Ray actor."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import ray
import scripted
from test_worker import AGENT, LIMITS

from actors import routing
from actors.environments import FROZEN_LAKE
from actors.episode import Sampling
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
        self.abandoned = 0

    async def answer(self, index, tokens, params):
        if params.max_tokens == 1:
            return index, RequestError("one token is too few")
        if params.max_tokens == 2:
            raise ZeroDivisionError("a bug")
        if params.max_tokens == 4:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                self.abandoned += 1
                raise
        return index, await self.generate(tokens, params)

    async def generate_many(self, requests):
        self.calls += 1
        if any(params.max_tokens == 3 for _, params in requests):
            return  # forgets to answer
        answers = [asyncio.create_task(self.answer(i, *request)) for i, request in enumerate(requests)]
        try:
            for answer in asyncio.as_completed(answers):
                yield [await answer]
        finally:
            for answer in answers:
                answer.cancel()

    async def count_calls(self):
        return self.calls

    async def count_abandoned(self):
        return self.abandoned

    async def process(self):
        return os.getpid()


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
            payload_urls=(),
            buffer_url=server.url,
            run="ray",
            buffer_timeout_seconds=20.0,
            buffer_outage_seconds=20.0,
            samplers={"sampler-0": sampler},
            model_folder=character_folder,
            environment_id=FROZEN_LAKE,
            environment_kwargs={},
            evaluation_kwargs={"split": "evaluation"},
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
        results = ray.get(worker.evaluate.remote([7, 8, 9], Sampling(0.0)), timeout=60)
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


def test_requests_that_nobody_waits_for_are_given_up_at_the_sampler(sampler):
    async def ask_and_leave():
        remote = RemoteSampler("s0", sampler)
        before = await sampler.count_abandoned.remote()
        calls = await sampler.count_calls.remote()
        requests = [asyncio.create_task(remote.generate([2, 3], SamplingParams(max_tokens=n))) for n in (4, 5, 4)]
        await requests[1]
        requests[0].cancel()
        while await sampler.count_calls.remote() == calls:
            await asyncio.sleep(0.01)
        assert await sampler.count_abandoned.remote() == before, "one of the call is still waited for"
        requests[2].cancel()
        while await sampler.count_abandoned.remote() < before + 2:
            await asyncio.sleep(0.01)

    async def bounded():
        await asyncio.wait_for(ask_and_leave(), 60)

    asyncio.run(bounded())


def test_a_request_cancelled_before_it_left_is_never_sent(sampler):
    async def ask_and_leave():
        remote = RemoteSampler("s0", sampler)
        before = await sampler.count_calls.remote()
        early, late = (asyncio.create_task(remote.generate([2, 3], SamplingParams(max_tokens=n))) for n in (3, 5))
        await asyncio.sleep(0)
        early.cancel()
        answer = await late  # together with the other it would have been forgotten
        alone = asyncio.create_task(remote.generate([2, 3], SamplingParams(max_tokens=5)))
        await asyncio.sleep(0)
        alone.cancel()
        await asyncio.sleep(10 * routing.GATHER_SECONDS)
        return answer, await sampler.count_calls.remote() - before

    answer, calls = asyncio.run(ask_and_leave())
    assert answer.tokens[-1] == 1 and calls == 1


def test_a_frozen_sampler_actor_is_a_sampler_error_once_the_deadline_passed(
    local_ray, character_folder, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(routing, "ANSWER_SECONDS", 0.5)
    handle = ray.remote(num_cpus=0)(WalkingSampler).remote(character_folder)
    process = ray.get(handle.process.remote(), timeout=60)
    os.kill(process, signal.SIGSTOP)
    params = SamplingParams(max_tokens=5, deadline_seconds=0.25)

    async def ask():
        return await asyncio.wait_for(RemoteSampler("s0", handle).generate([2, 3], params), 60)

    try:
        with pytest.raises(SamplerError, match=r"sampler s0 gave no answer within 0\.75 s"):
            asyncio.run(ask())
    finally:
        os.kill(process, signal.SIGCONT)
        ray.kill(handle)


def test_a_dead_sampler_actor_is_a_sampler_error(local_ray, character_folder):
    handle = ray.remote(num_cpus=0)(WalkingSampler).remote(character_folder)
    ray.kill(handle)
    (answer,) = generate(handle, 5)
    assert isinstance(answer, SamplerError) and "sampler s0 does not answer" in str(answer)
