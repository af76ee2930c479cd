"""One request inside the engine.

Axes: P = prompt tokens, N = sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from actors.samplers.contract import Generation, SamplingParams, StopReason
from actors.samplers.requests import drawn_seed, most_tokens


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, how to sample behind it, and what has been sampled so far.

    Attributes:
        number: names the request within its engine; grows in the order of submission.
        prompt_P: int32, the prompt.
        params: how to sample.
        seed_2: uint32, the raw random key.
        limit: most tokens in all, prompt included.
        deadline: in seconds of ``time.monotonic``.
        tokens_N, logprobs_N, versions_N: what was sampled before the request last lost its slot.
    """

    number: int
    prompt_P: np.ndarray
    params: SamplingParams
    seed_2: np.ndarray
    limit: int
    deadline: float
    tokens_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    versions_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def known(self) -> np.ndarray:
        """All tokens whose keys the request needs, int32[P + N]."""
        return np.concatenate([self.prompt_P, self.tokens_N]) if self.tokens_N.size else self.prompt_P

    def generation(self, reason: StopReason, stop_string: str | None = None) -> Generation:
        """The answer to the caller."""
        return Generation(self.tokens_N, self.logprobs_N, self.versions_N, reason, stop_string)


def make_request(
    number: int,
    prompt_P: np.ndarray,
    params: SamplingParams,
    *,
    asked_at: float,
    context_length: int,
    random: np.random.Generator,
) -> Request:
    """Prepare a request that was checked."""
    seed = drawn_seed(params, random)
    return Request(
        number=number,
        prompt_P=prompt_P,
        params=params,
        seed_2=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        limit=most_tokens(prompt_P, params, context_length),
        deadline=asked_at + params.deadline_seconds,
    )
