"""The sampler contract: what every sampler promises, whatever runs behind it.

* Log-probabilities are those of the distribution really sampled from: temperature is applied to
  the logits, and what ``top_k``, ``top_p`` and ``min_p`` leave is normalised again. Only a sampler
  made for evaluation takes these: what is trained on must have been drawn from the whole policy.
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
    """A stop token was sampled, or a token that completes a stop string; it is the last entry of ``tokens``."""
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
        top_k: sample only from so many of the likeliest tokens; None: from all.
        top_p: of these, only from the fewest that hold this share of their probability, above 0; 1: from all.
        min_p: of these, only from what is at least this times as likely as the likeliest; 0: from all. In this order,
            behind the temperature; a greedy request has no use for them and ignores them.
        stop_tokens: token ids that end the generation; the one sampled is kept.
        stop_strings: texts that end the generation as soon as the text of the sampled tokens contains one; the tokens
            are kept up to the one that completes it. They must not hold U+FFFD, which stands for half a character.
        seed: makes the sample a function of (weights, prompt, seed) alone; None draws one.
        deadline_seconds: the request is aborted this long after it was accepted.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    deadline_seconds: float = 120.0

    @property
    def filters(self) -> bool:
        """Whether some tokens are kept from being sampled."""
        return self.temperature > 0 and (self.top_k is not None or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What a sampler returns for one request.

    Attributes:
        tokens: int32[N], the sampled tokens, a final stop token included.
        logprobs: float32[N], log-probability of each under the distribution it was sampled from.
        versions: int32[N], the policy version that sampled each.
        stop_reason: why the generation ended.
        stop_string: the stop string that ended it, the first of those completed by the same token; None if none did.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    stop_reason: StopReason
    stop_string: str | None = None


class SamplerError(RuntimeError):
    """The sampler could not serve the request; the policy is not at fault."""


class SamplerLost(SamplerError):
    """The sampler serves nobody any more, or cannot be reached: another can be asked the same."""


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
