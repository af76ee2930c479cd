"""A sampler that is an SGLang server elsewhere, on GPUs as a rule, reached over HTTP.

The server cannot say which token came from which weights, so no request is left running across
an update: under ``recompute`` it is interrupted with what it has and asked for the rest
afterwards, under ``drain`` it is waited for. Every token is then sampled under a known version.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from actors.samplers.contract import (
    Generation,
    OnUpdate,
    Outcome,
    RequestError,
    SamplerError,
    SamplerLost,
    SamplingParams,
    StopReason,
    Tokens,
    UpdateError,
)
from actors.samplers.publication import FolderParts, Publication, verified
from actors.samplers.requests import check_params, checked_prompt, drawn_seed, folded_seed
from actors.samplers.sglang.server import Reply, SglangServer
from actors.samplers.sglang.wanted import Wanted
from actors.samplers.stops import StopStrings

ABORT_SECONDS = 5.0
"""How long an aborted request may take to answer with what it has; it is given up afterwards."""
PAUSE_SECONDS = 1.0
"""How long what a pause has ended may take to arrive; what does not is asked anew."""
LOAD_SECONDS = 600.0
"""Longest that a server may take to load new weights."""
HEALTH_SECONDS = 5.0
"""Longest that a server may take to say that it lives."""


class SglangClient:
    """Keeps the sampler contract with an SGLang server; see ``actors.samplers.contract.Sampler``.

    A plain class; ``ray.remote`` makes it an actor. It has an event loop of its own, so callers may come from any.
    """

    def __init__(
        self,
        *,
        url: str,
        model: Path | str,
        slots: int,
        context_length: int,
        on_update: OnUpdate | str,
        seed: int,
        name: str,
    ) -> None:
        """Start the client; nothing is asked of the server before ``update``.

        Args:
            url: of the server, which must serve the model's architecture.
            model: checkpoint folder of the model; shapes and vocabulary are read from it, and the tokenizer, if there
                is one: stop strings are found with it.
            slots: requests that the server is given at once; others wait here.
            context_length: most tokens of a request, prompt and sampled.
            on_update: ``recompute`` or ``drain``.
            seed: where requests without a seed of their own draw one from; servers honour seeds only under
                ``--enable-deterministic-inference``.
            name: shown in errors and status.

        Raises:
            ValueError: ``on_update`` is ``continue``.
            SamplerError: ``model`` is no checkpoint folder.
        """
        self.name = name
        self._on_update = OnUpdate(on_update)
        if self._on_update is OnUpdate.CONTINUE:
            raise ValueError(
                f"on_update is {on_update}: a server cannot tell which token came from which version; "
                "use recompute or drain"
            )
        self._server = SglangServer(url)
        self._stop_strings = StopStrings.of(Path(model))
        self._vocabulary = int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])
        self._context_length = context_length
        self._random = np.random.default_rng(seed)
        self._version: int | None = None
        self._tokens_sampled = self._calls = self._waiting = self._updates = self._swaps = 0
        self._swap_seconds = 0.0
        self._answered_at = time.monotonic()
        """When the server last answered anything."""
        self._failure: str | None = None
        self._asked: dict[str, asyncio.Task[Reply]] = {}
        """Requests that the server has, by name."""
        self._updating = asyncio.Lock()
        self._open = asyncio.Event()
        """Whether requests may be sent: not around an update."""
        self._open.set()
        self._places = asyncio.Semaphore(slots)
        self._farewells: set[asyncio.Task[None]] = set()  # a loop holds its tasks weakly
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name}-client", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"SglangClient({self.name})"

    async def generate(self, tokens: Tokens, params: SamplingParams) -> Generation:
        """As ``Sampler.generate``."""
        return await self._within(self._generate(tokens, params))

    async def generate_many(
        self, requests: Sequence[tuple[Tokens, SamplingParams]]
    ) -> AsyncIterator[list[tuple[int, Outcome]]]:
        """As ``Sampler.generate_many``."""
        tasks = {
            asyncio.ensure_future(self.generate(tokens, params)): index
            for index, (tokens, params) in enumerate(requests)
        }
        pending = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                yield [(tasks[task], _outcome(task)) for task in done]
        finally:
            for task in pending:
                task.cancel()

    async def update(self, publication: Publication) -> int:
        """As ``Sampler.update``, of a publication in a folder that the server sees: it is told to load that."""
        return await self._within(self._update(publication))

    async def status(self) -> dict[str, Any]:
        """Version, requests in flight, totals since the start."""
        return {
            "name": self.name,
            "version": self._version,
            "running": len(self._asked),
            "waiting": self._waiting,
            "tokens_sampled": self._tokens_sampled,
            "calls": self._calls,
            "swaps": self._swaps,
            "swap_seconds": self._swap_seconds,
            "compilations_after_warmup": 0,  # nothing is compiled here, and a server does not tell
            "failure": self._failure,
        }

    async def health(self) -> dict[str, Any]:
        """Whether the server serves our weights, and for how long it has answered nothing.

        It may be slow to say that it lives while it has much to do, and says nothing while it loads weights.
        """
        if await self._within(self._server.healthy(HEALTH_SECONDS)) or self._updating.locked():
            self._answered_at = time.monotonic()
        return {
            "alive": self._failure is None,
            "stalled_seconds": time.monotonic() - self._answered_at,
            "stalled": f"the SGLang server at {self._server.url} answered nothing",
        }

    def close(self, timeout_seconds: float = 10.0) -> None:
        """End the requests in flight and the client; the server goes on.

        Raises:
            TimeoutError: the client did not end in time.
        """
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(timeout_seconds)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_seconds)

    async def _within[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the client's own loop; cancelling the caller cancels it."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await asyncio.wrap_future(future)

    async def _generate(self, tokens: Tokens, params: SamplingParams) -> Generation:
        if self._version is None and not self._updating.locked():  # a request that comes during an update waits for it
            raise SamplerError("no policy version is held yet; publish weights with update before sampling")
        prompt_P = checked_prompt(tokens, self._vocabulary, self._context_length)
        check_params(params, self._vocabulary, filters=True, reads_text=self._stop_strings is not None)
        _refuse_filters(params)
        wanted = Wanted(
            prompt_P,
            params,
            self._stop_strings,
            most=min(params.max_tokens, self._context_length - len(prompt_P)),
            seed=folded_seed(drawn_seed(params, self._random)) >> 1,
            deadline=self._loop.time() + params.deadline_seconds,
        )
        self._waiting += 1
        try:
            while True:
                try:
                    async with asyncio.timeout_at(wanted.deadline):
                        await self._open.wait()
                        await self._places.acquire()
                except TimeoutError:
                    return wanted.generation(StopReason.ABORTED)
                reason = await self._ask(wanted)
                if reason is not None:
                    return wanted.generation(reason)
        finally:
            self._waiting -= 1

    async def _ask(self, wanted: Wanted) -> StopReason | None:
        """Ask the server for what is still wanted, in a place that is free again afterwards; None: there is a rest."""
        try:
            if not self._open.is_set():  # an update began while a place was waited for
                return None
            version, updates = self._held_version(), self._updates
            self._waiting -= 1
            try:
                reply = await self._reply(wanted)
            finally:
                self._waiting += 1
            self._check_version(reply, version)
            self._answered_at = time.monotonic()
            wanted.take(reply, version)
            self._calls += 1
            self._tokens_sampled += len(reply.tokens)
            reason = wanted.reason(reply, self._loop.time())
            interrupted = not self._open.is_set() or self._updates > updates
            if reason is None and not interrupted and not (reply.finish == "stop" and len(reply.tokens)):
                raise SamplerError(
                    f"the SGLang server at {self._server.url} ended a request with {reply.finish!r} on its own; "
                    "expected its end, or an update"
                )
            return reason
        finally:
            self._places.release()

    async def _reply(self, wanted: Wanted) -> Reply:
        """One answer of the server. Past the deadline, or if an update gives it up, what there is: nothing perhaps."""
        rid = uuid.uuid4().hex
        task = self._loop.create_task(self._server.generate(rid, wanted.known, wanted.sampling_params()))
        self._asked[rid] = task
        try:
            await asyncio.wait({task}, timeout=wanted.deadline - self._loop.time())
            if not task.done():
                await self._abort(rid)
                await asyncio.wait({task}, timeout=ABORT_SECONDS)
        except asyncio.CancelledError:
            farewell = self._loop.create_task(self._abort(rid))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)
            raise
        finally:
            del self._asked[rid]
            if not task.done():
                task.cancel()
        if task.cancelled() or not task.done():
            return Reply(np.empty(0, np.int32), np.empty(0, np.float32), "abort")
        return task.result()

    async def _abort(self, rid: str) -> None:
        with suppress(SamplerError):  # whoever waits for the request hears of a dead server
            await self._server.abort(rid)

    async def _update(self, publication: Publication) -> int:
        held = self._version
        if isinstance(publication, Publication) and held is not None and publication.manifest.version <= held:
            return held  # its folder may be gone already
        await asyncio.to_thread(verified, publication)
        version, parts = publication.manifest.version, publication.parts
        if not isinstance(version, int) or version < 0:
            raise UpdateError(f"version is {version!r}; expected an integer of at least 0")
        if not isinstance(parts, FolderParts):
            raise UpdateError(
                f"version {version} lies in {type(parts).__name__}; an SGLang server loads weights from a folder: "
                "publish with sampler.transport=folder"
            )
        async with self._updating:
            if self._version is not None and version <= self._version:
                return self._version
            self._open.clear()
            self._updates += 1
            is_first = self._version is None
            served, self._version = self._version, None  # unless the server says what it holds, nobody knows
            try:
                began = await self._quiesce()
                held, served = served, None
                try:
                    await self._server.update_weights(parts.folder, version, LOAD_SECONDS)
                    served = version
                except UpdateError:  # it went back to what it had
                    served = held
                    raise
            finally:
                try:
                    await self._server.resume()
                    self._version = served
                    self._failure = None
                finally:
                    self._open.set()
            if not is_first:
                self._swaps += 1
                self._swap_seconds += self._loop.time() - began
            return version

    def _check_version(self, reply: Reply, version: int) -> None:
        """Whoever else tells the server to load weights, or starts it anew, changes what it samples from.

        Raises:
            SamplerLost: it has other weights than those that it took from us.
        """
        if reply.weight_version not in (None, str(version)) and len(reply.tokens):
            self._version = None
            self._failure = (
                f"the SGLang server at {self._server.url} samples from weights {reply.weight_version!r}, expected "
                f"version {version}: it was started anew, or another run uses it"
            )
            raise SamplerLost(self._failure)

    async def _quiesce(self) -> float:
        """Return when the server has no request of ours: later tokens come from later weights.

        The answer is when it was kept from sampling, in seconds of the loop.
        """
        paused_at = self._loop.time()
        if self._on_update is OnUpdate.RECOMPUTE:
            await self._server.pause()
            if self._asked:
                # What came too late for the pause waits at the server until it is over: it is asked anew.
                _, late = await asyncio.wait(self._asked.values(), timeout=PAUSE_SECONDS)
                for task in late:
                    task.cancel()
        while self._asked:
            await asyncio.wait(self._asked.values())
            await asyncio.sleep(0)  # their callers take them out
        return paused_at if self._on_update is OnUpdate.RECOMPUTE else self._loop.time()

    def _held_version(self) -> int:
        if self._version is None:
            raise SamplerError(f"the SGLang server at {self._server.url} holds no known version; publish weights again")
        return self._version

    async def _end(self) -> None:
        own = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.close()


def _refuse_filters(params: SamplingParams) -> None:
    """Refuse top-k, top-p and min-p, of which the log-probabilities that SGLang reports know nothing.

    It gives those of the temperature-scaled distribution, whatever is filtered afterwards. Source: pull request 5961
    of sgl-project/sglang.
    """
    if params.filters:
        raise RequestError(
            f"top_k, top_p, min_p are {params.top_k}, {params.top_p:g}, {params.min_p:g}; expected None, 1, 0: SGLang "
            "reports log-probabilities of the unfiltered distribution; use sampler.kind=local or sglang_jax"
        )


def _outcome(task: asyncio.Future[Generation]) -> Outcome:
    try:
        return task.result()
    except (RequestError, SamplerError) as error:
        return error
