"""SGLang-Jax behind the interface of our engines: its scheduler, stepped by our own thread.

The package runs its scheduler in a loop of its own and talks to it through sockets. Here each
``step`` is one turn of that loop, so that what matters for training is exact by construction:
weights change between two steps, every token carries the version that was held while its step
ran, and tokens and log-probabilities are read from the scheduler's own records of a request.

Axes: P = prompt tokens, N = sampled tokens.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from actors.samplers.contract import (
    Generation,
    OnUpdate,
    SamplerError,
    SamplingParams,
    Tokens,
    UpdateError,
)
from actors.samplers.engine import Counters
from actors.samplers.requests import check_params, checked_prompt, drawn_seed, most_tokens
from actors.samplers.sglang.corrections import correct_package, correct_scheduler
from actors.samplers.sglang.release import check_model
from actors.samplers.sglang.requests import Request, asked, name_of
from actors.samplers.sglang.weights import WeightTable
from actors.samplers.stops import StopStrings

_PREFILL_TOKENS = (64, 128, 256, 512)
"""Ladder of compiled prefill sizes; the last bounds how long decoding waits for a prefill."""
_FEW_REQUESTS = 8
"""Requests of the smallest compiled decoding step."""
_CACHED_PER_SLOT = 4
"""Conversations of full length whose keys a CPU has room for, for each request that runs at once."""
_NEVER_SECONDS = 1e9
"""The engine's watchdog ends processes; ``health`` says what it would have found."""


class SglangEngine:
    """Samples for many requests at once with SGLang-Jax; see ``actors.samplers.engine.Engine``.

    Attributes:
        version: the policy version served; None before the first ``swap``.
        counters: totals since the start.
    """

    def __init__(
        self,
        model: Path,
        *,
        slots: int,
        context_length: int,
        on_update: OnUpdate | str,
        seed: int,
        dtype: str,
        tensor: int,
        filters: bool = False,
    ) -> None:
        """Start the scheduler without weights and compile every shape.

        Args:
            model: checkpoint folder; of it, ``config.json`` is read, and ``tokenizer.json`` if there is one: stop
                strings are found with it.
            slots: requests that run at once.
            context_length: most tokens of a request, prompt and sampled.
            on_update: what becomes of requests in flight when the weights change.
            seed: where requests without a seed of their own draw one from.
            dtype: of weights, activations and cache: ``float32`` or ``bfloat16``.
            tensor: devices that share the heads and the feed-forward channels of every layer.
            filters: serve top-k, top-p and min-p, for evaluation; otherwise they are refused.

        Raises:
            ReleaseError: another release than the corrected one, or a model that it does not serve.
        """
        described = json.loads((model / "config.json").read_text())
        head_dim = described.get("head_dim") or described["hidden_size"] // described["num_attention_heads"]
        check_model(described["model_type"], head_dim)
        correct_package()
        self.version: int | None = None
        self.counters = Counters()
        self._context_length = context_length
        self._on_update = OnUpdate(on_update)
        self._random = np.random.default_rng(seed)
        self._filters, self._stop_strings = filters, StopStrings.of(model)
        self._held: dict[str, Request] = {}
        self._dropped: list[str] = []
        self._numbers = 0
        self._cache_misses = 0
        self._scheduler = _start(model, self._dropped, slots, context_length, dtype, tensor)
        self._runner = self._scheduler.tp_worker.model_runner
        self._vocabulary = int(self._runner.model_config.vocab_size)
        self._table = WeightTable(self._runner)
        self._warm_up(slots)

    @property
    def running(self) -> int:
        """Requests with keys in the cache."""
        return len(self._held) - self.waiting

    @property
    def waiting(self) -> int:
        """Requests that wait for a place among these."""
        return len(self._scheduler.waiting_queue)

    @property
    def compilations_after_warm_up(self) -> int:
        """Calls since the warm-up that found no compiled program, by the engine's own count."""
        return self._cache_misses

    def limit(self, tokens: Tokens, params: SamplingParams) -> int:
        """As ``Engine.limit``."""
        return most_tokens(self._checked(tokens, params), params, self._context_length)

    def submit(self, tokens: Tokens, params: SamplingParams, *, asked_at: float | None = None) -> int:
        """As ``Engine.submit``."""
        prompt_P = self._checked(tokens, params)
        number = self._numbers
        self._numbers += 1
        rid = name_of(number)
        self._scheduler.process_input_requests(
            self._scheduler.select_dp_for_request([asked(rid, prompt_P, params, drawn_seed(params, self._random))])
        )
        request = self._scheduler.waiting_queue[-1]
        # What ends a reply is the caller's business alone, not that of a generation_config.json.
        request.eos_token_ids = None
        request.extra_key = str(self.version)
        accepted = time.monotonic() if asked_at is None else asked_at
        held = self._held[rid] = Request(request, params, accepted + params.deadline_seconds)
        if self._stop_strings is not None and params.stop_strings:
            held.watch(self._stop_strings)
        return number

    def abort(self, number: int) -> None:
        """End a request; ``step`` reports it with what was sampled. An ended one is left alone."""
        held = self._held.get(name_of(number))
        if held is not None:
            held.deadline = -np.inf

    def prepare(self, weights: Mapping[str, np.ndarray]) -> list[jax.Array]:
        """Bring verified weights to the devices, beside whatever the engine is doing.

        Raises:
            UpdateError: names, shapes or dtypes do not fit the model, or a value is not finite.
        """
        return self._table.leaves(weights)

    def swap(self, version: int, leaves: list[jax.Array]) -> int:
        """Serve prepared weights as ``version`` from the next step on; returns the version now served.

        A version that is not newer than the one held changes nothing.

        Raises:
            UpdateError: ``version`` is no version.
        """
        if not isinstance(version, int) or version < 0:
            raise UpdateError(f"version is {version!r}; expected an integer of at least 0")
        if self.version is None or version > self.version:
            self._serve(leaves)
            self.version = version
            if self._on_update is OnUpdate.RECOMPUTE:
                self._retract()
            # Every version has a part of the prefix tree of its own: who has yet to prefill finds no older keys.
            for request in self._scheduler.waiting_queue:
                request.extra_key = str(version)
        return self.version

    def step(self) -> list[tuple[int, Generation]]:
        """Run one prefill or decoding step; returns the requests that ended, each under its number.

        Raises:
            SamplerError: the weights give log-probabilities that are not finite, or the engine dropped a request.
        """
        started = time.monotonic()
        ended = self._end_late(started)
        scheduler = self._scheduler
        batch = scheduler.get_next_batch_to_run()
        scheduler.cur_batch = batch
        if batch:
            requests = [request for info in batch.reqs_info for request in info.reqs or ()]
            self._count(batch)
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
            scheduler.last_batch = batch
            self._cache_misses += batch.cache_miss_count
            ended += self._record(requests)
            self.counters.busy_seconds += time.monotonic() - started
        else:
            scheduler.last_batch = None
            scheduler.on_idle()
        return ended + self._take_dropped()

    def _checked(self, tokens: Tokens, params: SamplingParams) -> np.ndarray:
        """The prompt of a request that can be served, int32[P]."""
        if self.version is None:
            raise SamplerError("no policy version is held yet; publish weights with update before sampling")
        check_params(params, self._vocabulary, filters=self._filters, reads_text=self._stop_strings is not None)
        return checked_prompt(tokens, self._vocabulary, self._context_length)

    def _warm_up(self, slots: int) -> None:
        """Run every kind of request once: what the engine's own warm-up left uncompiled is compiled here."""
        self._serve(self.prepare(self._table.zeros()))
        self.version = -1
        for temperature in (1.0, 0.0):
            for count in sorted({1, slots}):
                params = SamplingParams(max_tokens=3, temperature=temperature)
                for _ in range(count):
                    self.submit([0], params)
                while self._held:
                    self.step()
        self.version, self._cache_misses, self.counters = None, 0, Counters()

    def _serve(self, leaves: list[jax.Array]) -> None:
        """Put ``leaves`` in place of those in use; the model object would otherwise keep the first ones alive."""
        from flax import nnx

        self._runner.model_state_leaves = leaves
        nnx.update(self._runner.model, jax.tree_util.tree_unflatten(self._runner._model_state_def, leaves))

    def _retract(self) -> None:
        """Take their keys from the requests in flight; they prefill what they have again, before anybody new."""
        from sgl_jax.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        scheduler = self._scheduler
        waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        scheduler.continue_generation(ContinueGenerationReqInput())
        scheduler.waiting_queue += waiting

    def _end_late(self, now: float) -> list[tuple[int, Generation]]:
        """Ask for the end of the requests whose deadline passed; those without keys end at once."""
        from sgl_jax.srt.managers.io_struct import AbortReq

        for rid, held in self._held.items():
            if held.deadline < now and not held.aborted:
                held.aborted = True
                self._scheduler.abort_request(AbortReq(rid=rid))
        return self._take_dropped()

    def _take_dropped(self) -> list[tuple[int, Generation]]:
        """End what the scheduler took out of its queue; anything else than what was aborted is a failure."""
        dropped, self._dropped[:] = list(self._dropped), []
        ended = []
        for rid in dropped:
            held = self._held.pop(rid, None)
            if held is None:
                continue
            if not held.aborted:
                raise SamplerError(
                    f"the engine dropped request {rid}: its cache is too small for one request; lower slots"
                )
            ended.append((int(rid), held.generation()))
        return ended

    def _count(self, batch: Any) -> None:
        self.counters.calls += 1
        if batch.forward_mode.is_extend():
            self.counters.tokens_prefilled += int(sum(sum(info.extend_lens or ()) for info in batch.reqs_info))
            self.counters.tokens_reused += int(sum(sum(info.prefix_lens or ()) for info in batch.reqs_info))

    def _record(self, requests: list[Any]) -> list[tuple[int, Generation]]:
        """Stamp the tokens of the step that just ran; returns the requests that ended with them."""
        version = self.version
        assert version is not None, "a request is accepted only under a version"
        ended = []
        for request in requests:
            held = self._held[request.rid]
            new = len(request.output_ids) - len(held.versions)
            held.versions += [version] * new
            self.counters.tokens_sampled += new
            if not np.isfinite(request.output_token_logprobs_val[-new:] if new else 0.0).all():
                raise SamplerError(
                    f"version {version} gives log-probabilities that are not finite; publish weights that do"
                )
            if request.finished():
                del self._held[request.rid]
                ended.append((int(request.rid), held.generation()))
        return ended


def _start(model: Path, dropped: list[str], slots: int, context_length: int, dtype: str, tensor: int) -> Any:
    """A scheduler with random weights and all shapes compiled; it writes to ``dropped`` whom it sends away."""
    logging.getLogger("sgl_jax").setLevel(logging.ERROR)
    from sgl_jax.srt.managers.communication import CommunicationBackend
    from sgl_jax.srt.managers.io_struct import AbortReq
    from sgl_jax.srt.managers.scheduler import Scheduler
    from sgl_jax.srt.server_args import ServerArgs

    class Outlet(CommunicationBackend):
        """Where the scheduler's messages end: results are read from its records instead."""

        def recv_requests(self) -> list[Any]:
            return []

        def send_pyobj(self, result: Any) -> None:
            if isinstance(result, AbortReq):
                dropped.append(str(result.rid))

    backend = jax.default_backend()
    if os.environ.get("JAX_PLATFORMS", backend) != backend:
        os.environ["JAX_PLATFORMS"] = backend  # it takes a list such as "tpu,cpu" for a mistake; JAX has read it by now
    longest = max(_PREFILL_TOKENS[-1], slots)
    arguments = ServerArgs(
        model_path=str(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        context_length=context_length,
        dtype=dtype,
        device=backend,
        tp_size=tensor,
        max_running_requests=slots,
        # A TPU's memory is the engine's to divide; of a host's it takes what caches the conversations of some slots.
        max_total_tokens=_CACHED_PER_SLOT * slots * context_length if backend == "cpu" else None,
        max_prefill_tokens=longest,
        chunked_prefill_size=longest,
        precompile_token_paddings=[tokens for tokens in _PREFILL_TOKENS if tokens >= slots],
        precompile_bs_paddings=sorted({min(rows, slots) for rows in (_FEW_REQUESTS, max(1, slots // 2), slots)}),
        disable_overlap_schedule=True,  # a step's tokens would be known one step later, under other weights perhaps
        enable_deterministic_sampling=True,
        grammar_backend="none",
        watchdog_timeout=_NEVER_SECONDS,
        random_seed=0,
        log_level="error",
    )
    scheduler = Scheduler(arguments, communication_backend=Outlet())
    correct_scheduler(scheduler, context_length)
    return scheduler
