"""Which sampler serves an episode, and how it is called: as an object here or as a Ray actor elsewhere.

Samplers come and go while episodes are played. An episode whose sampler left asks another one for its next reply, and
a reply that was lost with its sampler is asked for again: the prompt holds all that the episode has so far.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from actors.samplers.contract import Generation, Sampler, SamplerError, SamplerLost, SamplingParams

GATHER_SECONDS = 0.002
"""How long requests to one Ray actor are gathered before they are sent together."""
AVOID_SECONDS = 5.0
"""How long a sampler that failed is chosen only if all others failed too."""
ANSWER_SECONDS = 20.0
"""How long after a request's own deadline a Ray actor may take to say that it passed."""
REST_SECONDS = 5.0
"""How long a sampler that was lost is asked nothing, unless another process takes its place before."""
OUTAGE_SECONDS = 600.0
"""How long a reply waits for a sampler to serve: the only one may be started anew, and then compiles."""
MOST_LOST = 3
"""Samplers that may be lost over one reply: it may be what ends them."""


class RemoteSampler:
    """A sampler that is a Ray actor with ``generate_many``, an asynchronous generator.

    A Ray call costs more than what small requests take, so requests that come within a few milliseconds travel in
    one call; its answers come back as they are done, so a long reply holds up no short one. A call whose answers
    nobody waits for any more is cancelled.
    """

    def __init__(self, name: str, handle: Any) -> None:
        """Call the actor ``handle``; ``name`` is what errors call it."""
        self._name = name
        self._handle = handle  # keeps the actor alive: a method of a handle does not
        self._generate_many = handle.generate_many.options(num_returns="streaming")
        self._gathered: list[_Request] = []
        self._calls: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly

    async def generate(self, tokens: Sequence[int] | np.ndarray, params: SamplingParams) -> Generation:
        """As ``Sampler.generate``; what Ray reports becomes a ``SamplerError`` of one line, a death ``SamplerLost``.

        An actor that is frozen or cut off reports nothing: it has ``ANSWER_SECONDS`` beyond the request's deadline.
        """
        loop = asyncio.get_running_loop()
        request = _Request(tokens, params, loop.create_future())
        self._gathered.append(request)
        if len(self._gathered) == 1:
            loop.call_later(GATHER_SECONDS, self._send)
        limit = params.deadline_seconds + ANSWER_SECONDS
        try:
            async with asyncio.timeout(limit):
                return await request.answer
        except TimeoutError as error:
            raise SamplerError(
                f"sampler {self._name} gave no answer within {limit:g} s; expected one by the request's deadline of "
                f"{params.deadline_seconds:g} s: restart the sampler if it is frozen"
            ) from error

    def _send(self) -> None:
        requests, self._gathered = [request for request in self._gathered if not request.answer.done()], []
        if not requests:
            return
        call = asyncio.get_running_loop().create_task(self._call(requests))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

        def stop_if_unwanted(_: asyncio.Future[Generation]) -> None:
            # Only what was given up leaves the actor with work: a call that answered everyone ends by itself.
            if all(request.answer.done() for request in requests) and any(r.answer.cancelled() for r in requests):
                call.cancel()

        for request in requests:
            request.answer.add_done_callback(stop_if_unwanted)

    async def _call(self, requests: list[_Request]) -> None:
        import ray  # there if and only if a Ray handle is
        from ray.exceptions import RayError, RayTaskError

        failure: Exception = SamplerError(f"sampler {self._name} ended a call without an answer; restart the sampler")
        pieces = self._generate_many.remote([(request.tokens, request.params) for request in requests])
        try:
            async for piece in pieces:
                for index, outcome in await piece:
                    requests[index].resolve(outcome)
        except asyncio.CancelledError:
            ray.cancel(pieces)  # dropping the generator would leave the actor sampling
            raise
        except RayTaskError as error:
            failure = SamplerError(f"sampler {self._name} failed: {error.cause!r}")
        except RayError as error:
            failure = SamplerLost(f"sampler {self._name} does not answer ({type(error).__name__})")
        finally:
            for request in requests:
                request.resolve(failure)


@dataclass(slots=True, eq=False)
class _Request:
    tokens: Sequence[int] | np.ndarray
    params: SamplingParams
    answer: asyncio.Future[Generation]

    def resolve(self, outcome: Generation | Exception) -> None:
        """Answer, unless it was answered before or its caller went away."""
        if self.answer.done():
            return
        if isinstance(outcome, Exception):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


@dataclass(slots=True, eq=False)
class _Member:
    """A sampler that the router knows, or knew: it stays what it is until its last request has ended."""

    name: str
    handle: Any
    sampler: Sampler | RemoteSampler
    episodes: int = 0
    requests: int = 0
    avoided_until: float = 0.0
    """It failed an episode: others are preferred."""
    rests_until: float = 0.0
    """It was lost: nothing is asked of it."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def request(self) -> Iterator[Sampler | RemoteSampler]:
        """Its sampler, for one request."""
        self.requests += 1
        self.idle.clear()
        try:
            yield self.sampler
        finally:
            self.requests -= 1
            if not self.requests:
                self.idle.set()


class Router:
    """Spreads episodes over samplers. An episode stays with one, because that one caches its tokens.

    Attributes:
        asked_again: requests that were lost with their sampler and asked again.
    """

    def __init__(self, samplers: Mapping[str, Any]) -> None:
        """Route to ``samplers``: by name, handles of Ray actors or objects that keep the sampler contract.

        Raises:
            ValueError: there is no sampler.
        """
        if not samplers:
            raise ValueError("a router got no samplers; expected at least one: set sampler.replicas to 1 or more")
        self.asked_again = 0
        self._members = {name: _member(name, handle) for name, handle in samplers.items()}
        self._changed = asyncio.Event()

    async def set_samplers(self, samplers: Mapping[str, Any]) -> None:
        """Route to ``samplers`` from now on: perhaps to none, until the next call.

        A name whose handle is another one is another sampler. Returns when those that left have no request of ours
        any more; each of these ends by its own deadline.
        """
        before, self._members = self._members, {}
        for name, handle in samplers.items():
            known = before.get(name)
            self._members[name] = known if known is not None and known.handle == handle else _member(name, handle)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for member in before.values():
            if member is not self._members.get(member.name) and member.requests:
                await member.idle.wait()

    @contextmanager
    def route(self) -> Iterator[Route]:
        """A sampler for one episode."""
        route = Route(self)
        try:
            yield route
        finally:
            route.leave()

    def choose(self, before: _Member | None) -> _Member | None:
        """The one of ``before`` if it serves, else the one with the fewest episodes among those that work."""
        now = time.monotonic()
        if before is not None and self._members.get(before.name) is before and before.rests_until <= now:
            return before
        serving = [member for member in self._members.values() if member.rests_until <= now]
        return min(serving, key=lambda member: (member.avoided_until > now, member.episodes), default=None)

    async def change(self, seconds: float) -> None:
        """Wait until it may choose otherwise than now, at most ``seconds``."""
        rests = [member.rests_until - time.monotonic() for member in self._members.values()]
        try:
            async with asyncio.timeout(max(0.0, min([seconds, *rests]))):
                await self._changed.wait()
        except TimeoutError:
            pass


class Route:
    """The sampler of one episode: keeps the contract by asking one sampler as long as that one serves."""

    def __init__(self, router: Router) -> None:
        """Begin with the sampler that ``router`` chooses, if one serves."""
        self._router = router
        self._member: _Member | None = None
        self._asked = ""
        self._answering: list[str] = []
        self._move(router.choose(None))

    @property
    def name(self) -> str:
        """Of the sampler that was asked and not lost, of all if there were several; of the last one lost otherwise."""
        return ", ".join(self._answering) or self._asked

    async def generate(self, tokens: Sequence[int] | np.ndarray, params: SamplingParams) -> Generation:
        """As ``Sampler.generate``. The time that no sampler serves is not the request's: its deadline stands still.

        Raises:
            RequestError: the request is malformed or longer than the context.
            SamplerError: the sampler failed; or the request was lost with several, or until its deadline; or no
                sampler served for ``OUTAGE_SECONDS``.
        """
        lost: set[_Member] = set()
        seconds, patience = params.deadline_seconds, OUTAGE_SECONDS
        while True:
            asked = time.monotonic()
            member = self._router.choose(self._member)
            if member is None:
                if patience <= 0:
                    raise SamplerError(
                        f"no sampler serves for {OUTAGE_SECONDS:g} s; expected one to be started anew by then: the "
                        "run says what ends them"
                    )
                await self._router.change(patience)
                patience -= time.monotonic() - asked
                continue
            self._move(member)
            if is_new := member.name not in self._answering:
                self._answering.append(member.name)
            try:
                with member.request() as sampler:
                    return await sampler.generate(tokens, replace(params, deadline_seconds=seconds))
            except SamplerLost:
                if is_new:
                    self._answering.remove(member.name)
                seconds -= time.monotonic() - asked
                member.rests_until = time.monotonic() + REST_SECONDS
                lost.add(member)
                if seconds <= 0 or len(lost) >= MOST_LOST:
                    raise
                self._router.asked_again += 1

    def avoid(self) -> None:
        """Note that the sampler failed, lest its few episodes make it everybody's choice."""
        if self._member is not None:
            self._member.avoided_until = time.monotonic() + AVOID_SECONDS

    def leave(self) -> None:
        """End the episode."""
        self._move(None)

    def _move(self, member: _Member | None) -> None:
        if self._member is not None:
            self._member.episodes -= 1
        self._member = member
        if member is not None:
            self._asked = member.name
            member.episodes += 1


def _member(name: str, handle: Any) -> _Member:
    return _Member(name, handle, RemoteSampler(name, handle) if hasattr(handle.generate, "remote") else handle)
