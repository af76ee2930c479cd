"""The local sampler: the engine in a thread of its own behind the asynchronous contract.

A plain class; ``ray.remote(LocalSampler)`` makes it an actor. Callers and the engine meet in
an inbox, and all answers of one step reach a caller's event loop in one call. If the engine
fails, every request fails with it and ``status`` says why: nobody waits for a dead thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from actors.samplers.contract import (
    Generation,
    Outcome,
    RequestError,
    SamplerError,
    SamplingParams,
    Tokens,
    UpdateError,
)
from actors.samplers.local.engine import Engine, OnUpdate
from learner.models.config import ModelConfig, read_config

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
    number: int | None = None
    """The engine's name for it, once accepted."""


@dataclass(slots=True, eq=False)
class _Swap(_Errand):
    version: int
    leaves: list[jax.Array]


@dataclass(slots=True, eq=False)
class _Abort:
    sample: _Sample


class LocalSampler:
    """Samples with the learner's own transformer; see ``actors.samplers.contract.Sampler``.

    As an actor it wants ``max_concurrency`` above the number of its callers' requests, lest an update queue
    behind generations: ``ray.remote(max_concurrency=1000, concurrency_groups={"health": 1})(LocalSampler)``, and
    ``actor.health.options(concurrency_group="health")`` for a health check that waits for nobody.
    """

    def __init__(
        self,
        *,
        model: ModelConfig | Path | str,
        slots: int,
        context_length: int,
        on_update: OnUpdate | str,
        seed: int,
        name: str,
    ) -> None:
        """Allocate, compile every shape and start the engine's thread: constructed means ready for ``update``.

        Args:
            model: the model's shape, or a checkpoint folder whose ``config.json`` gives it. Its weights are not
                read: those come with ``update``.
            slots: requests that run at once; below the number of episodes in flight, prefixes are lost to others.
            context_length: most tokens of a request, prompt and sampled.
            on_update: ``recompute`` or ``continue``: what becomes of the keys of requests in flight when the weights
                change. Finished ones' keys are dropped in either case.
            seed: where requests without a seed of their own draw one from.
            name: shown in errors and status.
        """
        config = model if isinstance(model, ModelConfig) else read_config(Path(model))
        self.name = name
        self._engine = Engine(config, slots=slots, context_length=context_length, on_update=on_update, seed=seed)
        self._engine.warm_up()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._inbox: deque[_Errand | _Abort] = deque()
        self._accepted: dict[int, _Sample] = {}
        self._failure: SamplerError | None = None
        self._closing = False
        self._progress_at = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name=f"{name}-engine", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"LocalSampler({self.name})"

    async def generate(self, tokens: Tokens, params: SamplingParams) -> Generation:
        """Sample a continuation of ``tokens`` (int32[P]); cancelling the call aborts the request.

        Raises:
            RequestError: the request is malformed or longer than the context.
            SamplerError: no version is held yet, or the engine failed.
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

    async def update(self, version: int, weights: Mapping[str, np.ndarray]) -> int:
        """Serve ``weights`` (Hugging Face tensor names) as ``version`` from the next step on.

        The weights are checked and brought to the device beside the running requests; only the swap itself
        happens between two steps.

        Returns:
            The version now served: ``version``, or a newer one already held.

        Raises:
            UpdateError: names, shapes or dtypes do not fit; the old version goes on serving.
            SamplerError: the engine failed.
        """
        leaves = await asyncio.to_thread(self._engine.prepare, weights)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        self._post(_Swap(loop, partial(_resolve, future), version, leaves))
        return await future

    async def status(self) -> dict[str, Any]:
        """Version, requests in flight, totals since the start; rates are differences of two readings."""
        engine, counters = self._engine, self._engine.counters
        return {
            "name": self.name,
            "version": engine.version,
            "running": engine.running,
            "waiting": engine.waiting,
            "tokens_sampled": counters.tokens_sampled,
            "tokens_prefilled": counters.tokens_prefilled,
            "tokens_reused": counters.tokens_reused,
            "calls": counters.calls,
            "busy_seconds": counters.busy_seconds,
            "tokens_per_busy_second": counters.tokens_sampled / max(counters.busy_seconds, 1e-9),
            "compilations_after_warmup": engine.compilations_after_warm_up,
            "failure": str(self._failure) if self._failure else None,
        }

    async def health(self) -> dict[str, Any]:
        """Whether the engine serves, and for how long it has owed an answer without finishing a step.

        Safe to call from another event loop: give it a concurrency group of its own in an actor.
        """
        owing = bool(self._inbox or self._accepted)
        return {
            "alive": self._failure is None and self._thread.is_alive(),
            "stalled_seconds": time.monotonic() - self._progress_at if owing else 0.0,
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
                self._inbox.extend(errands)
        if failure is None:
            self._wake.set()
        else:
            _deliver([(errand, failure) for errand in errands if isinstance(errand, _Errand)])

    def _serve(self) -> None:
        """The engine's thread."""
        try:
            while not self._closing:
                if not (self._engine.running or self._engine.waiting):
                    self._wake.wait()
                    self._progress_at = time.monotonic()
                self._wake.clear()
                _deliver(self._take_in())
                ended = self._engine.step()
                _deliver([(self._accepted.pop(number), generation) for number, generation in ended])
                self._progress_at = time.monotonic()
            self._fail(SamplerError(f"sampler {self.name} was closed; send requests to another one"))
        except Exception as error:
            _log.exception("sampler %s: the engine failed", self.name)
            reason = f"{type(error).__name__}: {error}"
            self._fail(SamplerError(f"sampler {self.name}: the engine failed ({reason}); restart the sampler"))

    def _take_in(self) -> list[tuple[_Errand, Any]]:
        """Give the engine what is in the inbox; returns the answers that are known at once."""
        answers: list[tuple[_Errand, Any]] = []
        while self._inbox:
            match self._inbox.popleft():
                case _Sample() as sample:
                    try:
                        sample.number = self._engine.submit(sample.tokens, sample.params)
                        self._accepted[sample.number] = sample
                    except (RequestError, SamplerError) as error:
                        answers.append((sample, error))
                case _Swap() as swap:
                    try:
                        answers.append((swap, self._engine.swap(swap.version, swap.leaves)))
                    except UpdateError as error:
                        answers.append((swap, error))
                case _Abort(sample):
                    if sample.number is not None:
                        self._engine.abort(sample.number)
        return answers

    def _fail(self, error: SamplerError) -> None:
        """Answer everyone with ``error``, now and from now on."""
        with self._lock:
            self._failure = error
            left = [errand for errand in self._inbox if isinstance(errand, _Errand)]
            self._inbox.clear()
        left += self._accepted.values()
        self._accepted.clear()
        _deliver([(errand, error) for errand in left])


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
