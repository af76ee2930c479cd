"""The local engine: continuous batching of many requests over the learner's own transformer.

One thread owns an engine. Each ``step`` gives free slots to waiting requests and runs one
compiled call, a prefill or a decoding step of all that can be batched; the two take turns
when both have work, so that neither starves. The token behind a prompt comes from the
prefill call itself.

Axes: R = rows of a call, T = tokens of a row, S = cache slots, C = positions of a slot,
N = sampled tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import jax
import numpy as np

from actors.samplers.contract import (
    Generation,
    OnUpdate,
    SamplerError,
    SamplingParams,
    StopReason,
    Tokens,
    UpdateError,
)
from actors.samplers.engine import Counters
from actors.samplers.filters import EVERY_TOKEN, bounds
from actors.samplers.local.cache import SlotCache
from actors.samplers.local.program import BLOCK, Program, ladder
from actors.samplers.local.requests import Request, make_request
from actors.samplers.requests import check_params, checked_prompt, most_tokens
from actors.samplers.stops import StopStrings
from learner.models.compilations import CompilationCounter
from learner.models.config import ModelConfig, ModelError
from learner.models.weights import abstract_model, from_hf, to_hf

_NO_TOKEN = -1


class Engine:
    """Samples for many requests at once, over a fixed number of cache slots.

    ``prepare`` may be called from any thread; everything else belongs to one thread.

    Attributes:
        version: the policy version served; None before the first ``swap``.
        counters: totals since the start.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        context_length: int,
        on_update: OnUpdate | str,
        seed: int,
        filters: bool = False,
        stop_strings: StopStrings | None = None,
    ) -> None:
        """Allocate the cache; ``warm_up`` compiles.

        Args:
            config: the model's shape.
            slots: requests that run at once.
            context_length: most tokens of a request, prompt and sampled.
            on_update: what becomes of the keys of requests in flight when the weights change; under ``drain`` the
                owner swaps only when there are none.
            seed: where requests without a seed of their own draw one from.
            filters: serve top-k, top-p and min-p, for evaluation; otherwise they are refused, and the compiled program
                has nothing of them.
            stop_strings: finds those of the requests; None refuses requests that have any.
        """
        if not 2 <= context_length <= config.max_position_embeddings:
            raise ValueError(
                f"context_length is {context_length}; expected 2..{config.max_position_embeddings}, "
                "the positions the model was made for (max_position_embeddings)"
            )
        if slots < 1:
            raise ValueError(f"slots is {slots}; expected at least 1")
        self.config = config
        self.version: int | None = None
        self.counters = Counters()
        self._context_length = context_length
        self._on_update = OnUpdate(on_update)
        self._random = np.random.default_rng(seed)
        self._filters, self._stop_strings = filters, stop_strings
        shapes = ladder(slots)
        longest = max(shape.chunk for shape in shapes)
        self._cache = SlotCache(config, slots=slots, context_length=context_length, padding=longest + BLOCK)
        self._program = Program(config, self._cache, shapes, filters=filters)
        self._leaves: list[jax.Array] = []
        self._compilations = CompilationCounter()
        self._compilations_at_warm_up = 0
        self._numbers = 0
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        """By slot."""
        capacity = self._cache.tokens_SC.shape[1]
        self._logprobs_SC = np.zeros((slots, capacity), np.float32)
        self._versions_SC = np.zeros((slots, capacity), np.int32)
        self._numbers_S = np.zeros(slots, np.int64)
        self._limits_S = np.zeros(slots, np.int32)
        self._seeds_S2 = np.zeros((slots, 2), np.uint32)
        self._temperatures_S = np.ones(slots, np.float32)
        self._top_ks_S = np.full(slots, EVERY_TOKEN, np.int32)
        self._top_ps_S = np.ones(slots, np.float32)
        self._min_ps_S = np.zeros(slots, np.float32)
        self._watched_S = np.zeros(slots, bool)
        """Whose text is looked at for stop strings."""
        self._stops_SX: np.ndarray = np.full((slots, 1), _NO_TOKEN, np.int32)
        self._deadlines_S = np.full(slots, np.inf)
        self._prefilled_last = False

    @property
    def running(self) -> int:
        """Requests that own a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot, or for a prefix that another one computes."""
        return len(self._waiting)

    @property
    def compilations_after_warm_up(self) -> int:
        """XLA compilations of this process since ``warm_up`` ended; anything but 0 is a fault."""
        return self._compilations.count - self._compilations_at_warm_up

    def warm_up(self) -> None:
        """Compile all shapes; afterwards nothing compiles."""
        _, abstract = abstract_model(self.config)
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
        # By the way that real weights take, so that whatever compiles there compiles now.
        self._program.warm_up(self.prepare(to_hf(self.config, zeros)))
        self._compilations_at_warm_up = self._compilations.count

    def limit(self, tokens: Tokens, params: SamplingParams) -> int:
        """As ``Engine.limit``."""
        return most_tokens(self._checked(tokens, params), params, self._context_length)

    def submit(self, tokens: Tokens, params: SamplingParams, *, asked_at: float | None = None) -> int:
        """As ``Engine.submit``."""
        request = make_request(
            self._numbers,
            self._checked(tokens, params),
            params,
            asked_at=time.monotonic() if asked_at is None else asked_at,
            context_length=self._context_length,
            random=self._random,
        )
        self._numbers += 1
        self._waiting.append(request)
        return request.number

    def abort(self, number: int) -> None:
        """End a request; the next ``step`` reports it with what was sampled. An ended one is left alone."""
        for request in self._waiting:
            if request.number == number:
                request.deadline = -np.inf
        for slot, request in self._running.items():
            if request.number == number:
                self._deadlines_S[slot] = -np.inf

    def prepare(self, weights: Mapping[str, np.ndarray]) -> list[jax.Array]:
        """Bring verified weights to the device, beside whatever the engine is doing; they never change afterwards.

        Raises:
            UpdateError: names, shapes or dtypes do not fit the model.
        """
        try:
            leaves = jax.tree.leaves(from_hf(self.config, weights, borrow=True))
        except ModelError as error:
            raise UpdateError(f"the weights do not fit the served model: {error}") from error
        return jax.block_until_ready(leaves)

    def swap(self, version: int, leaves: list[jax.Array]) -> int:
        """Serve prepared weights as ``version`` from the next step on; returns the version now served.

        A version that is not newer than the one held changes nothing.

        Raises:
            UpdateError: ``version`` is no version.
        """
        if not isinstance(version, int) or version < 0:
            raise UpdateError(f"version is {version!r}; expected an integer of at least 0")
        if self.version is None or version > self.version:
            self._leaves, self.version = leaves, version
            if self._on_update is OnUpdate.RECOMPUTE:
                self._requeue_running()
            self._cache.forget()
        return self.version

    def step(self) -> list[tuple[int, Generation]]:
        """Run one call; returns the requests that ended, each under its number.

        Raises:
            SamplerError: the weights give log-probabilities that are not finite.
        """
        started = time.monotonic()
        ended = self._end_late(started)
        self._admit()
        slots_R, chunk = self._choose()
        if len(slots_R):
            ended += self._run(slots_R, chunk)
            self.counters.busy_seconds += time.monotonic() - started
        return ended

    def _checked(self, tokens: Tokens, params: SamplingParams) -> np.ndarray:
        """The prompt of a request that can be served, int32[P]."""
        self._held_version()
        check_params(params, self.config.vocab_size, filters=self._filters, reads_text=self._stop_strings is not None)
        return checked_prompt(tokens, self.config.vocab_size, self._context_length)

    def _held_version(self) -> int:
        if self.version is None:
            raise SamplerError("no policy version is held yet; publish weights with update before sampling")
        return self.version

    def _end_late(self, now: float) -> list[tuple[int, Generation]]:
        ended = []
        for slot in np.flatnonzero(self._deadlines_S < now):
            ended.append(self._end(int(slot), StopReason.ABORTED))
        if any(request.deadline < now for request in self._waiting):
            late = [request for request in self._waiting if request.deadline < now]
            self._waiting = deque(request for request in self._waiting if request.deadline >= now)
            ended += [(request.number, request.generation(StopReason.ABORTED)) for request in late]
        return ended

    def _admit(self) -> None:
        """Give slots to waiting requests, oldest first."""
        held_back: list[Request] = []
        while self._waiting and len(self._running) < self._cache.slots:
            request = self._waiting.popleft()
            known = request.known
            placement = self._cache.place(known)
            if placement is None:
                held_back.append(request)
                continue
            if placement.donor is not None:
                self._program.copy_slot(placement.donor, placement.slot)
            self._cache.take(placement, known)
            self._occupy(placement.slot, request)
            self.counters.tokens_reused += placement.reused
        self._waiting.extendleft(reversed(held_back))

    def _occupy(self, slot: int, request: Request) -> None:
        self._running[slot] = request
        sampled = slice(len(request.prompt_P), len(request.prompt_P) + len(request.tokens_N))
        self._logprobs_SC[slot, sampled] = request.logprobs_N
        self._versions_SC[slot, sampled] = request.versions_N
        self._numbers_S[slot] = request.number
        self._limits_S[slot] = request.limit
        self._seeds_S2[slot] = request.seed_2
        self._deadlines_S[slot] = request.deadline
        self._watched_S[slot] = bool(request.params.stop_strings)
        self._temperatures_S[slot] = request.params.temperature
        self._top_ks_S[slot], self._top_ps_S[slot], self._min_ps_S[slot] = bounds(request.params)
        stops = request.params.stop_tokens
        if len(stops) > self._stops_SX.shape[1]:
            wider = ((0, 0), (0, len(stops) - self._stops_SX.shape[1]))
            self._stops_SX = np.pad(self._stops_SX, wider, constant_values=_NO_TOKEN)
        self._stops_SX[slot] = _NO_TOKEN
        self._stops_SX[slot, : len(stops)] = stops

    def _choose(self) -> tuple[np.ndarray, int]:
        """The slots and the chunk of the next call: decoding and prefill take turns, prefill oldest first."""
        pending_S = np.where(self._cache.busy_S, self._cache.length_S - self._cache.cached_S, 0)
        decoding, prefilling = np.flatnonzero(pending_S == 1), np.flatnonzero(pending_S > 1)
        self._prefilled_last = bool(prefilling.size) and not (decoding.size and self._prefilled_last)
        if not self._prefilled_last:
            return decoding, 1
        by_age = prefilling[self._numbers_S[prefilling].argsort()]
        chunk = self._program.chunk_for(int(pending_S[by_age[0]]))
        alike = [slot for slot in by_age if self._program.chunk_for(int(pending_S[slot])) == chunk]
        return np.array(alike[: self._program.most_rows(chunk)]), chunk

    def _run(self, slots_R: np.ndarray, chunk: int) -> list[tuple[int, Generation]]:
        cache = self._cache
        starts_R = cache.cached_S[slots_R]
        known_R = cache.length_S[slots_R]
        counts_R = np.minimum(known_R - starts_R, chunk)
        shape = self._program.shape_for(len(slots_R), chunk)
        rows = self._program.empty_rows(shape)
        live = slice(len(slots_R))
        rows.tokens_RT[live] = cache.tokens_SC[slots_R[:, None], starts_R[:, None] + np.arange(chunk)]
        rows.slots_R[live] = slots_R
        rows.starts_R[live] = starts_R
        rows.counts_R[live] = counts_R
        rows.seeds_R2[live] = self._seeds_S2[slots_R]
        rows.temperatures_R[live] = self._temperatures_S[slots_R]
        rows.top_ks_R[live] = self._top_ks_S[slots_R]
        rows.top_ps_R[live] = self._top_ps_S[slots_R]
        rows.min_ps_R[live] = self._min_ps_S[slots_R]
        token_R, logprob_R = self._program.extend(self._leaves, shape, rows)
        cache.cached_S[slots_R] = starts_R + counts_R
        whole_R = starts_R + counts_R == known_R
        self.counters.calls += 1
        self.counters.tokens_prefilled += int(counts_R.sum() - whole_R.sum())
        return self._record(slots_R[whole_R], token_R[live][whole_R], logprob_R[live][whole_R])

    def _record(self, slots_R: np.ndarray, token_R: np.ndarray, logprob_R: np.ndarray) -> list[tuple[int, Generation]]:
        """Append the sampled tokens; returns the requests that end with them."""
        if not np.isfinite(logprob_R).all():
            raise SamplerError(
                f"version {self.version} gives log-probabilities that are not finite; publish weights that do"
            )
        cache = self._cache
        position_R = cache.length_S[slots_R]
        cache.tokens_SC[slots_R, position_R] = token_R
        cache.length_S[slots_R] = position_R + 1
        self._logprobs_SC[slots_R, position_R] = logprob_R
        self._versions_SC[slots_R, position_R] = self._held_version()
        self.counters.tokens_sampled += len(slots_R)
        stopped_R = (self._stops_SX[slots_R] == token_R[:, None]).any(axis=1)
        full_R = position_R + 1 == self._limits_S[slots_R]
        strings = self._completed_strings(slots_R[self._watched_S[slots_R] & ~stopped_R].tolist())
        if strings:
            stopped_R |= np.isin(slots_R, list(strings))
        ended_R = np.flatnonzero(stopped_R | full_R)
        return [
            self._end(slot, StopReason.STOP if stopped else StopReason.LENGTH, strings.get(slot))
            for slot, stopped in zip(slots_R[ended_R].tolist(), stopped_R[ended_R], strict=True)
        ]

    def _completed_strings(self, slots: list[int]) -> dict[int, str]:
        """The stop strings that the newest tokens of these slots complete, by slot."""
        completed: dict[int, str] = {}
        for slot in slots:
            assert self._stop_strings is not None, "a request with stop strings was to be refused"
            request = self._running[slot]
            tokens_N = self._cache.tokens_SC[slot, len(request.prompt_P) : self._cache.length_S[slot]]
            string = self._stop_strings.completed(tokens_N, request.params.stop_strings)
            if string is not None:
                completed[slot] = string
        return completed

    def _end(self, slot: int, reason: StopReason, stop_string: str | None = None) -> tuple[int, Generation]:
        request = self._vacate(slot)
        return request.number, request.generation(reason, stop_string)

    def _vacate(self, slot: int) -> Request:
        """Take the slot from its request, which keeps what was sampled."""
        request = self._running.pop(slot)
        sampled = slice(len(request.prompt_P), int(self._cache.length_S[slot]))
        request.tokens_N = self._cache.tokens_SC[slot, sampled].copy()
        request.logprobs_N = self._logprobs_SC[slot, sampled].copy()
        request.versions_N = self._versions_SC[slot, sampled].copy()
        request.deadline = float(self._deadlines_S[slot])
        self._deadlines_S[slot] = np.inf
        self._cache.release(slot)
        return request

    def _requeue_running(self) -> None:
        """Put requests in flight back at the head of the queue, oldest first.

        They are admitted like new ones, so that a prefix they share is computed again only once.
        """
        slots = sorted(self._running, key=lambda slot: self._numbers_S[slot], reverse=True)
        self._waiting.extendleft([self._vacate(slot) for slot in slots])
