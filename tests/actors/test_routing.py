"""Which sampler is asked, and what becomes of a request whose sampler is lost or leaves."""

import asyncio

import pytest
import scripted

from actors import routing
from actors.routing import Router
from actors.samplers.contract import SamplerError, SamplerLost, SamplingParams

PARAMS = SamplingParams(max_tokens=5, deadline_seconds=20.0)
PROMPT = [2, 3]


class DyingSampler:
    """Loses every request, after a while."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.asked = 0

    async def generate(self, tokens, params):
        self.asked += 1
        await asyncio.sleep(self.seconds)
        raise SamplerLost("the process is gone")


@pytest.fixture
def make(character_folder):
    return lambda **changes: scripted.ScriptedSampler(character_folder, lambda _: "R", **changes)


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 30))


def test_episodes_go_to_the_sampler_with_the_fewest_and_stay_there(make):
    samplers = {name: make() for name in "abc"}

    async def scenario():
        router = Router(samplers)
        with router.route() as first, router.route() as second, router.route() as third:
            for route in (first, second, third, first, second, first):
                await route.generate(PROMPT, PARAMS)
            names = [first.name, second.name, third.name]
        with router.route() as again:
            return [*names, again.name]

    assert run(scenario()) == ["a", "b", "c", "a"]
    assert [len(sampler.requests) for sampler in samplers.values()] == [3, 2, 1]


def test_a_lost_request_is_asked_of_another_sampler_within_what_is_left_of_its_deadline(make):
    dying, good = DyingSampler(seconds=0.2), make()

    async def scenario():
        router = Router({"dying": dying, "good": good})
        with router.route() as route:
            answer = await route.generate(PROMPT, PARAMS)
            await route.generate(PROMPT, PARAMS)  # it stays where it is now
        return answer, route.name, router.asked_again

    answer, name, asked_again = run(scenario())
    assert answer.tokens[-1] == 1
    assert (name, asked_again, dying.asked) == ("good", 1, 1)
    (prompt, first), (_, second) = good.requests
    assert prompt.tolist() == PROMPT
    assert first.deadline_seconds <= PARAMS.deadline_seconds - 0.2
    assert second.deadline_seconds == PARAMS.deadline_seconds


def test_a_request_waits_for_a_sampler_to_serve_and_its_deadline_stands_still(make):
    dying, good = DyingSampler(), make()

    async def scenario():
        router = Router({"s": dying})
        with router.route() as route:
            reply = asyncio.create_task(route.generate(PROMPT, PARAMS))
            while not router.asked_again:
                await asyncio.sleep(0.01)
            await router.set_samplers({})
            await asyncio.sleep(0.5)
            assert not reply.done()
            await router.set_samplers({"s": good})  # the same name, another process
            return await reply

    assert run(scenario()).tokens[-1] == 1
    [(_, params)] = good.requests
    assert params.deadline_seconds > PARAMS.deadline_seconds - 0.5
    assert dying.asked == 1, "a lost sampler was asked again at once"


def test_a_sampler_that_was_lost_is_asked_again_after_a_rest_if_nobody_takes_its_place(make, monkeypatch):
    monkeypatch.setattr(routing, "REST_SECONDS", 0.1)
    good = make()

    class Hiccup(DyingSampler):
        async def generate(self, tokens, params):
            return await (super() if self.asked < 2 else good).generate(tokens, params)

    sampler = Hiccup()

    async def scenario():
        with Router({"s": sampler}).route() as route:
            return await route.generate(PROMPT, PARAMS)

    assert run(scenario()).tokens[-1] == 1
    assert sampler.asked == 2


def test_an_outage_of_all_samplers_has_an_end(monkeypatch):
    monkeypatch.setattr(routing, "OUTAGE_SECONDS", 0.2)

    async def scenario():
        with Router({"s": DyingSampler()}).route() as route:
            await route.generate(PROMPT, PARAMS)

    with pytest.raises(SamplerError, match=r"no sampler serves for 0\.2 s"):
        run(scenario())


def test_a_request_that_ends_every_sampler_it_meets_is_given_up():
    samplers = {str(number): DyingSampler() for number in range(routing.MOST_LOST + 2)}

    async def scenario():
        with Router(samplers).route() as route:
            await route.generate(PROMPT, PARAMS)

    with pytest.raises(SamplerLost):
        run(scenario())
    assert sum(sampler.asked for sampler in samplers.values()) == routing.MOST_LOST


def test_a_sampler_that_leaves_finishes_what_it_was_asked_and_is_asked_no_more(make):
    leaving, staying = make(seconds=0.3), make()

    async def scenario():
        router = Router({"leaving": leaving, "staying": staying})
        with router.route() as route:
            assert route.name == "leaving"
            reply = asyncio.create_task(route.generate(PROMPT, PARAMS))
            while not leaving.running:
                await asyncio.sleep(0.01)
            await router.set_samplers({"staying": staying})
            assert not leaving.running, "it was said to owe nothing while it did"
            await reply
            await route.generate(PROMPT, PARAMS)
            await route.generate(PROMPT, PARAMS)
            assert route.name == "leaving, staying", "a record would blame one for the tokens of the other"
            with router.route() as other:
                await other.generate(PROMPT, PARAMS)
        return router.asked_again

    assert run(scenario()) == 0
    assert (len(leaving.requests), len(staying.requests)) == (1, 3)
