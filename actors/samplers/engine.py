"""What our serving thread asks of an engine, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from actors.samplers.contract import Generation, SamplingParams, Tokens


@dataclass(slots=True)
class Counters:
    """What an engine has done so far."""

    tokens_sampled: int = 0
    tokens_prefilled: int = 0
    """Tokens run only for their keys, whether new or computed again after an update."""
    tokens_reused: int = 0
    """Prompt tokens whose keys were already cached."""
    calls: int = 0
    busy_seconds: float = 0.0
    """Seconds spent in steps that ran a call."""
    swaps: int = 0
    """Times that other weights took the place of those served."""
    swap_seconds: float = 0.0
    """Seconds that no step could run because of that."""


class Engine(Protocol):
    """Samples for many requests at once, step by step.

    ``prepare`` may be called from any thread; everything else belongs to one thread.

    Attributes:
        version: the policy version served; None before the first ``swap``.
        counters: totals since the start.
    """

    version: int | None
    counters: Counters

    @property
    def running(self) -> int:
        """Requests that are being sampled for."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that wait for a place among these."""
        ...

    @property
    def compilations_after_warm_up(self) -> int:
        """Anything but 0 is a fault."""
        ...

    def limit(self, tokens: Tokens, params: SamplingParams) -> int:
        """Most tokens that a request may come to hold: its prompt and all that may be sampled behind it.

        Raises:
            RequestError: it can never be served.
            SamplerError: no version is held yet.
        """
        ...

    def submit(self, tokens: Tokens, params: SamplingParams, *, asked_at: float | None = None) -> int:
        """Queue a request; returns the number under which ``step`` reports it.

        Args:
            tokens: the prompt.
            params: how to sample.
            asked_at: when the request's deadline began to count, in seconds of ``time.monotonic``; None: now.

        Raises:
            RequestError: the request can never be served.
            SamplerError: no version is held yet.
        """
        ...

    def abort(self, number: int) -> None:
        """End a request; ``step`` reports it with what was sampled. An ended one is left alone."""
        ...

    def prepare(self, weights: Mapping[str, np.ndarray]) -> list[jax.Array]:
        """Bring verified weights to the device, beside whatever the engine is doing; they never change afterwards.

        Raises:
            UpdateError: names, shapes or dtypes do not fit the model.
        """
        ...

    def swap(self, version: int, leaves: list[jax.Array]) -> int:
        """Serve prepared weights as ``version`` from the next step on; returns the version now served.

        A version that is not newer than the one held changes nothing.

        Raises:
            UpdateError: ``version`` is no version.
        """
        ...

    def step(self) -> list[tuple[int, Generation]]:
        """Run one call; returns the requests that ended, each under its number.

        Raises:
            SamplerError: the engine can serve nobody any more.
        """
        ...
