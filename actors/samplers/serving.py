"""An engine in a thread of its own behind the asynchronous contract.

Callers and the engine meet in an inbox, and all answers of one step reach a caller's event
loop in one call. The engine is given requests up to a number of tokens; the others wait in
line. If the engine fails, every request fails with it and ``status`` says why: nobody waits
for a dead thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from actors.samplers.admission import Admission
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
from actors.samplers.engine import Engine
from actors.samplers.publication import Publication, verified

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Errand:
    """Something for the engine's thread; the answer goes to ``deliver`` on ``loop``."""

    loop: asyncio.AbstractEventLoop
    deliver: Callable[[Any], None]


@dataclass(slots=True, eq=False)
class _Sample(_Errand):
    tokens: Tokens
    params: SamplingParams
    asked_at: float = field(default_factory=time.monotonic)
    limit: int = 0
    """Most tokens that it may come to hold."""
    number: int | None = None
    """The engine's name for it, once accepted."""


@dataclass(slots=True, eq=False)
class _Swap(_Errand):
    version: int
    leaves: list[jax.Array]


@dataclass(slots=True, eq=False)
class _Abort:
    sample: _Sample


class EngineSampler:
    """Keeps the sampler contract with an engine; see ``actors.samplers.contract.Sampler``.

    A plain class: ``ray.remote`` makes an actor of a subclass. As one it wants ``max_concurrency`` above the number
    of its callers' requests, lest an update queue behind generations:
    ``ray.remote(max_concurrency=1000, concurrency_groups={"health": 1})(LocalSampler)``, and
    ``actor.health.options(concurrency_group="health")`` for a health check that waits for nobody.
    """

    def __init__(self, engine: Engine, *, on_update: OnUpdate | str, tokens_in_flight: int, name: str) -> None:
        """Start the engine's thread: constructed means ready for ``update``.

        Args:
            engine: warmed up; it belongs to the sampler from now on.
            on_update: under ``drain`` an update waits for the requests before it, and those after it for the update;
                anything else is the engine's business.
            tokens_in_flight: most tokens, prompts and most new ones, of the requests that the engine is given; the
                others wait in line, until their deadlines.
            name: shown in errors and status.
        """
        self.name = name
        self._engine = engine
        self._drains = OnUpdate(on_update) is OnUpdate.DRAIN
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._inbox: deque[_Errand | _Abort] = deque()
        self._admission: Admission[_Sample] = Admission(tokens_in_flight)
        self._accepted: dict[int, _Sample] = {}
        self._in_hand: _Errand | _Abort | None = None
        """Taken from the inbox or the line, and not yet answered or with the engine."""
        self._failure: SamplerLost | None = None
        self._closing = False
        self._progress_at = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name=f"{name}-engine", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    async def generate(self, tokens: Tokens, params: SamplingParams) -> Generation:
        """Sample a continuation of ``tokens`` (int32[P]); cancelling the call aborts the request.

        Raises:
            RequestError: the request is malformed or longer than the context.
            SamplerError: no version is held yet.
            SamplerLost: the engine failed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generation] = loop.create_future()
        sample = _Sample(loop, partial(_resolve, future), tokens, params)
        self._post(sample)
        try:
            return await future
        except asyncio.CancelledError:
            self._post(_Abort(sample))
            raise

    async def generate_many(
        self, requests: Sequence[tuple[Tokens, SamplingParams]]
    ) -> AsyncIterator[list[tuple[int, Outcome]]]:
        """As ``Sampler.generate_many``: one call for several prompts, answers as they are done."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Queue[tuple[int, Outcome]] = asyncio.Queue()
        samples = [
            _Sample(loop, partial(_enqueue, ended, index), tokens, params)
            for index, (tokens, params) in enumerate(requests)
        ]
        self._post(*samples)
        open_indices = set(range(len(samples)))
        try:
            while open_indices:
                batch = [await ended.get()]
                while not ended.empty():
                    batch.append(ended.get_nowait())
                open_indices.difference_update(index for index, _ in batch)
                yield batch
        finally:
            if open_indices:
                self._post(*(_Abort(samples[index]) for index in open_indices))

    async def update(self, publication: Publication) -> int:
        """Serve published weights from the next step on.

        They are verified and brought to the device beside the running requests; only the swap itself happens between
        two steps.

        Returns:
            The version now served: that of the publication, or a newer one already held.

        Raises:
            UpdateError: they are not what its manifest says, or do not fit the model; the old version goes on serving.
            SamplerError: the engine failed.
        """
        leaves = await asyncio.to_thread(lambda: self._engine.prepare(verified(publication)))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        self._post(_Swap(loop, partial(_resolve, future), publication.manifest.version, leaves))
        return await future

    async def status(self) -> dict[str, Any]:
        """Version, requests and tokens in flight, totals since the start; rates are differences of two readings.

        A request is ``running``, ``waiting`` in the engine for a place among these, or ``in_line`` until the engine
        may be given more tokens.
        """
        engine, counters = self._engine, self._engine.counters
        return {
            "name": self.name,
            "version": engine.version,
            "running": engine.running,
            "waiting": engine.waiting,
            "in_line": len(self._admission),
            "tokens_in_flight": self._admission.tokens,
            "most_tokens_in_flight": self._admission.most_tokens,
            "tokens_sampled": counters.tokens_sampled,
            "tokens_prefilled": counters.tokens_prefilled,
            "tokens_reused": counters.tokens_reused,
            "calls": counters.calls,
            "busy_seconds": counters.busy_seconds,
            "tokens_per_busy_second": counters.tokens_sampled / max(counters.busy_seconds, 1e-9),
            "swaps": counters.swaps,
            "swap_seconds": counters.swap_seconds,
            "compilations_after_warmup": engine.compilations_after_warm_up,
            "failure": str(self._failure) if self._failure else None,
        }

    async def health(self) -> dict[str, Any]:
        """Whether the engine serves, and for how long it has owed an answer without finishing a step.

        Safe to call from another event loop: give it a concurrency group of its own in an actor.
        """
        owing = bool(self._inbox or self._admission or self._accepted)
        return {
            "alive": self._failure is None and self._thread.is_alive(),
            "stalled_seconds": time.monotonic() - self._progress_at if owing else 0.0,
            "stalled": "it finished no step while requests waited",
        }

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Stop the engine; requests in flight fail with SamplerError.

        Raises:
            TimeoutError: the engine did not finish its step in time.
        """
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TimeoutError(
                f"sampler {self.name}: the engine did not end its step within {timeout_seconds:.0f} s; "
                "end the process instead"
            )

    def _post(self, *errands: _Errand | _Abort) -> None:
        with self._lock:
            failure = self._failure
            if failure is None:
                if not (self._inbox or self._accepted):
                    self._progress_at = time.monotonic()  # it owed nothing until now, and was idle perhaps for long
                self._inbox.extend(errands)
        if failure is None:
            self._wake.set()
        else:
            _deliver([(errand, failure) for errand in errands if isinstance(errand, _Errand)])

    def _serve(self) -> None:
        """The engine's thread."""
        try:
            while not self._closing:
                if not (self._busy or self._inbox or self._admission):
                    self._wake.wait()
                    self._progress_at = time.monotonic()
                self._wake.clear()
                self._take_in()
                _deliver([self._end(number, generation) for number, generation in self._engine.step()])
                self._progress_at = time.monotonic()
            self._fail(SamplerLost(f"sampler {self.name} was closed; send requests to another one"))
        except Exception as error:
            _log.exception("sampler %s: the engine failed", self.name)
            reason = f"{type(error).__name__}: {error}"
            self._fail(SamplerLost(f"sampler {self.name}: the engine failed ({reason}); restart the sampler"))

    def _take_in(self) -> None:
        """Hear what is in the inbox, give the engine what it has room for, and answer what can be answered at once."""
        answers: list[tuple[_Errand, Any]] = []
        try:
            self._hear(answers)
        finally:
            _deliver(answers)

    def _hear(self, answers: list[tuple[_Errand, Any]]) -> None:
        held_up = False
        while self._inbox and not held_up:
            if self._drains and self._busy and isinstance(self._inbox[0], _Swap):
                answers += self._hear_aborts()
                held_up = True
                continue
            self._in_hand = self._inbox.popleft()
            match self._in_hand:
                case _Sample() as sample:
                    try:
                        sample.limit = self._engine.limit(sample.tokens, sample.params)
                        self._admission.join(sample, sample.limit, sample.asked_at + sample.params.deadline_seconds)
                    except (RequestError, SamplerError) as error:
                        answers.append((sample, error))
                case _Swap() as swap:
                    answers.append((swap, self._swap(swap)))
                case _Abort(sample):
                    answers += self._abort(sample)
            self._in_hand = None
        answers += [(sample, _nothing_sampled()) for sample in self._admission.late(time.monotonic())]
        if not held_up:  # the swap would have to wait for whoever enters before it
            self._let_in()

    def _swap(self, swap: _Swap) -> int | UpdateError:
        engine, held, started = self._engine, self._engine.version, time.perf_counter()
        try:
            version = engine.swap(swap.version, swap.leaves)
        except UpdateError as error:
            return error
        if held not in (None, version):
            engine.counters.swaps += 1
            engine.counters.swap_seconds += time.perf_counter() - started
        return version

    def _let_in(self) -> None:
        for sample in self._admission.enter():
            self._in_hand = sample
            sample.number = self._engine.submit(sample.tokens, sample.params, asked_at=sample.asked_at)
            self._accepted[sample.number] = sample
            self._in_hand = None

    def _end(self, number: int, generation: Generation) -> tuple[_Sample, Generation]:
        sample = self._accepted.pop(number)
        self._admission.leave(sample.limit)
        return sample, generation

    def _abort(self, sample: _Sample) -> list[tuple[_Errand, Any]]:
        """End a request; its answer is here if it was in line, and comes from the engine otherwise."""
        if sample.number is not None:
            self._engine.abort(sample.number)
            return []
        return [(sample, _nothing_sampled())] if self._admission.withdraw(sample) else []

    @property
    def _busy(self) -> bool:
        return bool(self._engine.running or self._engine.waiting)

    def _hear_aborts(self) -> list[tuple[_Errand, Any]]:
        """Take what was aborted out of the inbox, the line and the engine, whatever else has to wait for its turn."""
        with self._lock:
            aborted = [errand.sample for errand in self._inbox if isinstance(errand, _Abort)]
            unheard = [errand for errand in self._inbox if errand in aborted]
            self._inbox = deque(
                errand for errand in self._inbox if not isinstance(errand, _Abort) and errand not in aborted
            )
        answers = [answer for sample in aborted for answer in self._abort(sample)]
        return answers + [(sample, _nothing_sampled()) for sample in unheard]

    def _fail(self, error: SamplerLost) -> None:
        """Answer everyone with ``error``, now and from now on."""
        with self._lock:
            self._failure = error
            left = [errand for errand in (self._in_hand, *self._inbox) if isinstance(errand, _Errand)]
            self._inbox.clear()
        left += [*self._admission.clear(), *self._accepted.values()]
        self._accepted.clear()
        _deliver([(errand, error) for errand in left])


def _nothing_sampled() -> Generation:
    """The answer to a request that was aborted, or whose deadline passed, before the engine had it."""
    none = np.empty(0, np.int32)
    return Generation(none, np.empty(0, np.float32), none, StopReason.ABORTED)


def _deliver(answers: list[tuple[Any, Any]]) -> None:
    """Bring answers to their event loops, one call for each loop."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Errand, Any]]] = defaultdict(list)
    for errand, outcome in answers:
        by_loop[errand.loop].append((errand, outcome))
    for loop, theirs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_deliver_all, theirs)
        except RuntimeError:
            _log.info("dropped %d answers: the event loop of their callers is closed", len(theirs))


def _deliver_all(answers: list[tuple[_Errand, Any]]) -> None:
    for errand, outcome in answers:
        errand.deliver(outcome)


def _resolve(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():  # cancelled by its caller
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _enqueue(ended: asyncio.Queue[tuple[int, Outcome]], index: int, outcome: Outcome) -> None:
    ended.put_nowait((index, outcome))
