"""The checks that a request passes before any engine sees it: what can never be served is refused by name.

Axes: P = prompt tokens.
"""

from __future__ import annotations

import math

import numpy as np

from actors.samplers.contract import RequestError, SamplingParams, Tokens
from actors.samplers.stops import HALF_CHARACTER

LARGEST_SEED = 2**64 - 1


def drawn_seed(params: SamplingParams, random: np.random.Generator) -> int:
    """The request's own seed, or one drawn from ``random``: 0..2**64-1."""
    if params.seed is not None:
        return int(params.seed)
    return int(random.integers(LARGEST_SEED, dtype=np.uint64, endpoint=True))


def folded_seed(seed: int) -> int:
    """64 bits of seed in 32, all of which count, for engines that take no more.

    Source: the finaliser of SplitMix64 (Steele et al. 2014).
    """
    seed = (seed + 0x9E3779B97F4A7C15) & LARGEST_SEED
    seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & LARGEST_SEED
    seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & LARGEST_SEED
    return (seed ^ (seed >> 31)) >> 32


def checked_prompt(tokens: Tokens, vocabulary: int, context_length: int) -> np.ndarray:
    """The prompt as int32[P].

    Args:
        tokens: what the caller gave.
        vocabulary: token ids are below it.
        context_length: most tokens of a request, prompt and sampled.

    Raises:
        RequestError: it is no flat list of token ids that leaves room for one more.
    """
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


def most_tokens(prompt_P: np.ndarray, params: SamplingParams, context_length: int) -> int:
    """Most tokens that a request may come to hold, its prompt and what is sampled behind it."""
    return min(len(prompt_P) + params.max_tokens, context_length)


def check_params(params: SamplingParams, vocabulary: int, *, filters: bool, reads_text: bool) -> None:
    """Find out whether ``params`` can be served.

    Args:
        params: what the caller gave.
        vocabulary: token ids are below it.
        filters: whether the sampler was made to serve top-k, top-p and min-p.
        reads_text: whether the sampler has a tokenizer, without which it finds no stop string.

    Raises:
        RequestError: a value is outside its range.
    """
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params is a {type(params).__name__}; expected SamplingParams")
    expectations = (
        ("max_tokens", params.max_tokens, _is_int(params.max_tokens, 1), "an integer of at least 1"),
        ("temperature", params.temperature, _is_real(params.temperature, 0.0), "a finite number of at least 0"),
        ("top_k", params.top_k, params.top_k is None or _is_int(params.top_k, 1), "None or an integer of at least 1"),
        (
            "top_p",
            params.top_p,
            _is_real(params.top_p, 0.0) and 0 < params.top_p <= 1,
            "a number above 0 and at most 1",
        ),
        ("min_p", params.min_p, _is_real(params.min_p, 0.0) and params.min_p <= 1, "a number of 0 to 1"),
        ("seed", params.seed, params.seed is None or _is_int(params.seed, 0, LARGEST_SEED), "None or 0..2**64-1"),
        (
            "stop_tokens",
            params.stop_tokens,
            isinstance(params.stop_tokens, tuple)
            and all(_is_int(token, 0, vocabulary - 1) for token in params.stop_tokens),
            f"a tuple of token ids below {vocabulary}",
        ),
        (
            "stop_strings",
            params.stop_strings,
            isinstance(params.stop_strings, tuple) and all(map(_is_text, params.stop_strings)),
            "a tuple of strings, none empty and none with U+FFFD",
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
    if params.filters and not filters:
        raise RequestError(
            f"top_k, top_p and min_p are {params.top_k}, {params.top_p:g} and {params.min_p:g}; expected None, 1 and 0 "
            "in training: a filtered policy is another one than that which is trained; set evaluation.top_k, top_p or "
            "min_p for evaluation"
        )
    if params.stop_strings and not reads_text:
        raise RequestError(
            f"stop_strings is {params.stop_strings!r}; this sampler was made without a tokenizer: start it from a "
            "model folder that holds tokenizer.json, or use stop_tokens"
        )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and HALF_CHARACTER not in value


def _is_int(value: object, least: int, most: int | None = None) -> bool:
    if type(value) is bool or not isinstance(value, int | np.integer):
        return False
    return int(value) >= least and (most is None or int(value) <= most)


def _is_real(value: object, least: float) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and math.isfinite(value) and float(value) >= least
