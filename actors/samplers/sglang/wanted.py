"""A request to an SGLang server that updates may cut into pieces, and what has been sampled for it so far.

Axes: P = prompt tokens, N = sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.samplers.contract import Generation, SamplingParams, StopReason
from actors.samplers.sglang.server import Reply
from actors.samplers.stops import StopStrings


@dataclass(slots=True, eq=False)
class Wanted:
    """A request and what has been sampled for it so far.

    Attributes:
        prompt_P: int32.
        params: how to sample.
        stop_strings: finds those of ``params``.
        most: most tokens to sample.
        seed: 0..2**31-1.
        deadline: in seconds of the loop's clock.
        tokens_N, logprobs_N, versions_N: sampled so far.
        stop_string: the one that the last token completes.
    """

    prompt_P: np.ndarray
    params: SamplingParams
    stop_strings: StopStrings | None
    most: int
    seed: int
    deadline: float
    tokens_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    versions_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    stop_string: str | None = None

    @property
    def known(self) -> np.ndarray:
        """Prompt and what was sampled behind it."""
        return np.concatenate([self.prompt_P, self.tokens_N])

    def sampling_params(self) -> dict[str, Any]:
        """In the words of the protocol; what a server's defaults might change is said."""
        return {
            "max_new_tokens": self.most - len(self.tokens_N),
            "temperature": self.params.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop": list(self.params.stop_strings),
            "skip_special_tokens": False,  # they are part of the text that stop strings are looked for in
            "stop_token_ids": list(self.params.stop_tokens),
            "ignore_eos": not self.params.stop_tokens,  # it would make a server ignore stop_token_ids, too
            "sampling_seed": self.seed,
        }

    def take(self, reply: Reply, version: int) -> None:
        """Append what was sampled under ``version``, up to a stop string.

        The server looks for stop strings, too, but not in what it had sampled before an update, and only in so many
        tokens as it would write them with: what it finds late is cut off here.
        """
        before = len(self.tokens_N)
        self.tokens_N = np.concatenate([self.tokens_N, reply.tokens])
        self.logprobs_N = np.concatenate([self.logprobs_N, reply.logprobs])
        self.versions_N = np.concatenate([self.versions_N, np.full(len(reply.tokens), version, np.int32)])
        if self.stop_strings is None or not self.params.stop_strings:
            return
        for end in range(before + 1, len(self.tokens_N) + 1):
            if int(self.tokens_N[end - 1]) in self.params.stop_tokens:
                return
            self.stop_string = self.stop_strings.completed(self.tokens_N[:end], self.params.stop_strings)
            if self.stop_string is not None:
                self.tokens_N, self.logprobs_N = self.tokens_N[:end], self.logprobs_N[:end]
                self.versions_N = self.versions_N[:end]
                return

    def reason(self, reply: Reply, now: float) -> StopReason | None:
        """Why the request is over; None if it is not: an update came between, or an end that only the server knows."""
        if self.stop_string is not None or (len(reply.tokens) and int(reply.tokens[-1]) in self.params.stop_tokens):
            return StopReason.STOP
        if len(self.tokens_N) >= self.most or reply.finish == "length":
            return StopReason.LENGTH
        return StopReason.ABORTED if now >= self.deadline else None

    def generation(self, reason: StopReason) -> Generation:
        """The answer to the caller."""
        return Generation(self.tokens_N, self.logprobs_N, self.versions_N, reason, self.stop_string)
