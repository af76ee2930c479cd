"""Which sampler serves an episode, and how it is called: as an object here or as a Ray actor elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.samplers.contract import Generation, Sampler, SamplerError, SamplingParams

GATHER_SECONDS = 0.002
"""How long requests to one Ray actor are gathered before they are sent together."""
AVOID_SECONDS = 5.0
"""How long a sampler that failed is chosen only if all others failed too."""
ANSWER_SECONDS = 20.0
"""How long after a request's own deadline a Ray actor may take to say that it passed."""


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
        """As ``Sampler.generate``; whatever Ray reports becomes a ``SamplerError`` of one line.

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
            failure = SamplerError(f"sampler {self._name} does not answer ({type(error).__name__})")
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


class Router:
    """Spreads episodes over samplers. An episode stays with one, because that one caches its tokens."""

    def __init__(self, samplers: Mapping[str, Any]) -> None:
        """Route to ``samplers``: by name, handles of Ray actors or objects that keep the sampler contract.

        Raises:
            ValueError: there is no sampler.
        """
        if not samplers:
            raise ValueError("a router got no samplers; expected at least one: set sampler.replicas to 1 or more")
        self._samplers: dict[str, Any] = {
            name: RemoteSampler(name, sampler) if hasattr(sampler.generate, "remote") else sampler
            for name, sampler in samplers.items()
        }
        self._episodes = dict.fromkeys(samplers, 0)
        self._avoided_until = dict.fromkeys(samplers, 0.0)

    @contextmanager
    def route(self) -> Iterator[tuple[str, Sampler]]:
        """Name and sampler for one episode: the one with the fewest episodes among those that work."""
        now = time.monotonic()
        name = min(self._samplers, key=lambda n: (self._avoided_until[n] > now, self._episodes[n]))
        self._episodes[name] += 1
        try:
            yield name, self._samplers[name]
        finally:
            self._episodes[name] -= 1

    def avoid(self, name: str) -> None:
        """Note that ``name`` failed, lest its few episodes make it everybody's choice."""
        self._avoided_until[name] = time.monotonic() + AVOID_SECONDS
