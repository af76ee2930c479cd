"""One request on its way through SGLang-Jax's scheduler.

Axes: P = prompt tokens, N = sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from actors.samplers.contract import Generation, SamplingParams, StopReason
from actors.samplers.filters import EVERY_TOKEN, bounds
from actors.samplers.requests import folded_seed
from actors.samplers.stops import StopStrings


@dataclass(slots=True, eq=False)
class Request:
    """A request that the scheduler has.

    Attributes:
        request: the scheduler's record of it.
        params: how it is sampled.
        deadline: in seconds of ``time.monotonic``.
        versions: the policy version that sampled each token so far.
        aborted: whether its end was asked for.
        stop_string: the one that its newest token completes.
    """

    request: Any
    params: SamplingParams
    deadline: float
    versions: list[int] = field(default_factory=list)
    aborted: bool = False
    stop_string: str | None = None

    def watch(self, stop_strings: StopStrings) -> None:
        """Let the scheduler end the request with the token that completes a stop string.

        The engine's own search reaches back as many tokens as it would write the string with; samples may take more.
        """
        self.request.check_finished = partial(self._check_finished, stop_strings, self.request.check_finished)

    def generation(self) -> Generation:
        """The answer to the caller, once the request is over."""
        if self._stopped or self.stop_string is not None:
            reason = StopReason.STOP
        else:
            reason = StopReason.ABORTED if self.aborted else StopReason.LENGTH
        return Generation(
            np.array(self.request.output_ids, np.int32),
            np.array(self.request.output_token_logprobs_val, np.float32),
            np.array(self.versions, np.int32),
            reason,
            self.stop_string,
        )

    @property
    def _stopped(self) -> bool:
        """Whether the newest token is a stop token."""
        tokens = self.request.output_ids
        return bool(tokens) and tokens[-1] in self.params.stop_tokens

    def _check_finished(self, stop_strings: StopStrings, check: Callable[..., None], *arguments: Any) -> None:
        from sgl_jax.srt.managers.schedule_batch import FINISH_MATCHED_STR

        check(*arguments)
        if not self._stopped:
            self.stop_string = stop_strings.completed(self.request.output_ids, self.params.stop_strings)
            if self.stop_string is not None and not self.request.finished():
                self.request.finished_reason = FINISH_MATCHED_STR(matched=self.stop_string)


def name_of(number: int) -> str:
    """The scheduler's name of a request."""
    # It aborts whatever begins with the name it is given: all are equally long.
    return f"{number:020d}"


def asked(rid: str, prompt_P: np.ndarray, params: SamplingParams, seed: int) -> Any:
    """A request in the words of the scheduler."""
    from sgl_jax.srt.managers.io_struct import TokenizedGenerateReqInput
    from sgl_jax.srt.sampling.sampling_params import SamplingParams as EngineParams

    wanted = EngineParams(
        max_new_tokens=params.max_tokens,
        temperature=params.temperature,
        stop_token_ids=list(params.stop_tokens),
        sampling_seed=folded_seed(seed) - 2**31,  # it holds them as int32,
    )
    if params.temperature > 0:  # the engine takes temperatures below 1e-6 for greedy and forgets them
        wanted.temperature = params.temperature
        wanted.top_k, wanted.top_p, wanted.min_p = bounds(params)
        if wanted.top_k == 1:  # which means greedy to it; a min-p of 1 keeps the same tokens
            wanted.top_k, wanted.min_p = EVERY_TOKEN, 1.0
    wanted.normalize(None)
    return TokenizedGenerateReqInput(
        rid=rid,
        text="",
        input_ids=prompt_P.tolist(),
        sampling_params=wanted,
        return_logprob=False,
        return_output_logprob_only=True,
        top_logprobs_num=0,
    )
