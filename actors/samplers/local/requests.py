"""One request inside the engine, and the checks it passes before it gets there.

Axes: P = prompt tokens, N = sampled tokens.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from actors.samplers.contract import Generation, RequestError, SamplingParams, StopReason, Tokens

_LARGEST_SEED = 2**64 - 1


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

    def generation(self, reason: StopReason) -> Generation:
        """The answer to the caller."""
        return Generation(self.tokens_N, self.logprobs_N, self.versions_N, reason)


def make_request(
    number: int,
    tokens: Tokens,
    params: SamplingParams,
    *,
    vocabulary: int,
    context_length: int,
    random: np.random.Generator,
) -> Request:
    """Check a request and prepare it.

    Raises:
        RequestError: it can never be served.
    """
    prompt_P = _prompt(tokens, vocabulary, context_length)
    _check_params(params, vocabulary)
    drawn = random.integers(_LARGEST_SEED, dtype=np.uint64, endpoint=True) if params.seed is None else params.seed
    seed = int(drawn)
    return Request(
        number=number,
        prompt_P=prompt_P,
        params=params,
        seed_2=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        limit=min(len(prompt_P) + params.max_tokens, context_length),
        deadline=time.monotonic() + params.deadline_seconds,
    )


def _prompt(tokens: Tokens, vocabulary: int, context_length: int) -> np.ndarray:
    try:
        given = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise RequestError(f"tokens are no array ({error}); expected a non-empty flat list of token ids") from error
    if given.ndim != 1 or given.size == 0 or not np.issubdtype(given.dtype, np.integer):
        raise RequestError(
            f"tokens have shape {list(given.shape)} and type {given.dtype}; expected a non-empty flat list of token ids"
        )
    if given.min() < 0 or given.max() >= vocabulary:
        wrong = given[(given < 0) | (given >= vocabulary)][0]
        raise RequestError(
            f"token id {wrong} is outside the vocabulary of {vocabulary}; tokenise with the served model's tokenizer"
        )
    if given.size >= context_length:
        raise RequestError(
            f"the prompt has {given.size} tokens; expected at most {context_length - 1}, which leaves room for one: "
            "shorten it or raise the sampler's context_length"
        )
    return given.astype(np.int32)


def _check_params(params: SamplingParams, vocabulary: int) -> None:
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params is a {type(params).__name__}; expected SamplingParams")
    expectations = (
        ("max_tokens", params.max_tokens, _is_int(params.max_tokens, 1), "an integer of at least 1"),
        ("temperature", params.temperature, _is_real(params.temperature, 0.0), "a finite number of at least 0"),
        ("seed", params.seed, params.seed is None or _is_int(params.seed, 0, _LARGEST_SEED), "None or 0..2**64-1"),
        (
            "stop_tokens",
            params.stop_tokens,
            isinstance(params.stop_tokens, tuple)
            and all(_is_int(token, 0, vocabulary - 1) for token in params.stop_tokens),
            f"a tuple of token ids below {vocabulary}",
        ),
        (
            "deadline_seconds",
            params.deadline_seconds,
            _is_real(params.deadline_seconds, 0.0) and params.deadline_seconds > 0,
            "a finite number of seconds above 0",
        ),
    )
    for name, value, fits, expectation in expectations:
        if not fits:
            raise RequestError(f"{name} is {value!r}; expected {expectation}")


def _is_int(value: object, least: int, most: int | None = None) -> bool:
    if type(value) is bool or not isinstance(value, int | np.integer):
        return False
    return int(value) >= least and (most is None or int(value) <= most)


def _is_real(value: object, least: float) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and math.isfinite(value) and float(value) >= least
