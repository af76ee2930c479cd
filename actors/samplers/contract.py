"""The sampler contract: what every sampler promises, whatever runs behind it.

* Log-probabilities are those of the distribution really sampled from: temperature is
  applied to the logits, and nothing else is.
* Every token carries the policy version that sampled it. ``update`` swaps weights between
  two decode steps; what is in flight goes on with the new weights.
* A sampler refuses to sample before it holds a version, and verifies one before it holds it.

Axes: P = prompt tokens, N = sampled tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from actors.samplers.publication import Publication


class StopReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """A stop token was sampled; it is the last entry of ``tokens``."""
    LENGTH = "length"
    """``max_tokens`` or the context length was reached."""
    ABORTED = "aborted"
    """The request was aborted or its deadline passed; ``tokens`` holds what was sampled until then."""


class OnUpdate(StrEnum):
    """What new weights do to the requests in flight. No later prompt reuses keys of older weights."""

    RECOMPUTE = "recompute"
    """They prefill what they have so far again, then go on."""
    CONTINUE = "continue"
    """They go on with the keys they have: cheaper, but their log-probabilities then mix versions."""
    DRAIN = "drain"
    """The update waits until they have ended, and later requests wait for the update: each has one version."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        max_tokens: most tokens to sample, at least 1.
        temperature: divides the logits; 0 means greedy (log-probabilities are then those at temperature 1).
        stop_tokens: token ids that end the generation; the one sampled is kept.
        seed: makes the sample a function of (weights, prompt, seed) alone; None draws one.
        deadline_seconds: the request is aborted this long after it was accepted.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    seed: int | None = None
    deadline_seconds: float = 120.0


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What a sampler returns for one request.

    Attributes:
        tokens: int32[N], the sampled tokens, a final stop token included.
        logprobs: float32[N], log-probability of each under the distribution it was sampled from.
        versions: int32[N], the policy version that sampled each.
        stop_reason: why the generation ended.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    stop_reason: StopReason


class SamplerError(RuntimeError):
    """The sampler could not serve the request; the policy is not at fault."""


class RequestError(ValueError):
    """The request can never be served: it names the value, the expectation and the remedy."""


class UpdateError(RuntimeError):
    """The weights do not fit the served model; the old version goes on serving."""


type Tokens = Sequence[int] | np.ndarray
"""A prompt: flat token ids, int32[P]."""

type Outcome = Generation | RequestError | SamplerError
"""How one request of several ended."""


class Sampler(Protocol):
    """An asynchronous sampler with many requests in flight."""

    async def generate(self, tokens: Tokens, params: SamplingParams) -> Generation:
        """Sample a continuation of ``tokens`` (int32[P]); cancelling the call aborts the request.

        Raises:
            RequestError: the request is malformed or longer than the context.
            SamplerError: no version is held yet, or the engine failed.
        """
        ...

    def generate_many(
        self, requests: Sequence[tuple[Tokens, SamplingParams]]
    ) -> AsyncIterator[list[tuple[int, Outcome]]]:
        """Sample for several prompts in one call, for callers to whom a call is expensive.

        Yields:
            As soon as requests end, those that ended, as (index in ``requests``, outcome): a long one holds up no
            short one. A request that fails yields its error and leaves the others alone. Closing the iterator
            aborts the rest.
        """
        ...

    async def update(self, publication: Publication) -> int:
        """Serve published weights from the next decode step on, once they are verified.

        Returns:
            The version now served: that of the publication, or a newer one already held.

        Raises:
            UpdateError: they are not what its manifest says, or do not fit the model; the old version goes on serving.
        """
        ...

    async def status(self) -> dict[str, Any]:
        """Version, requests in flight, tokens sampled, compilations after warm-up."""
        ...
