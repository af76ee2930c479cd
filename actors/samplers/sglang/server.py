"""SGLang's native HTTP protocol, as far as a sampler needs it: https://docs.sglang.io, "SGLang for RL Systems".

Generation is the same for SGLang and SGLang-Jax; new weights are taken by SGLang alone.

Axes: P = prompt tokens, N = sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from actors.samplers.contract import RequestError, SamplerError, SamplerLost, UpdateError

CONTROL_SECONDS = 60.0
"""Longest that a server may take to pause, to go on or to abort."""


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """What a server answers to one request.

    Attributes:
        tokens: int32[N].
        logprobs: float32[N], of the temperature-scaled distribution.
        finish: ``stop``, ``length`` or ``abort``.
        weight_version: name of the weights, as it was given to ``update_weights``; None if the server has no names.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    finish: str
    weight_version: str | None = None


class SglangServer:
    """One server. Everything belongs to one event loop."""

    def __init__(self, url: str) -> None:
        """Talk to the server at ``url``, such as ``http://gpu-0:30000``; nothing is sent yet."""
        self.url = url
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, rid: str, prompt_P: np.ndarray, sampling_params: dict[str, Any]) -> Reply:
        """Sample a continuation; ``rid`` names the request and must never have been used before.

        Raises:
            RequestError: the server refuses the request.
            SamplerLost: it does not answer.
            SamplerError: it does not answer with what was asked for.
        """
        answer = await self._post(
            "/generate",
            {
                "rid": rid,
                "input_ids": prompt_P.tolist(),
                "sampling_params": sampling_params,
                "return_logprob": True,
                "logprob_start_len": -1,
                "return_text_in_logprobs": False,
                "stream": False,
            },
            seconds=None,
        )
        return self._reply(answer)

    async def abort(self, rid: str) -> None:
        """End a request: its ``generate`` then answers with what was sampled."""
        await self._post("/abort_request", {"rid": rid}, seconds=CONTROL_SECONDS)

    async def pause(self) -> None:
        """End all requests, each with what was sampled, and hold up later ones until ``resume``."""
        await self._post("/pause_generation", {"mode": "abort"}, seconds=CONTROL_SECONDS)

    async def resume(self) -> None:
        """Take up generation again."""
        await self._post("/continue_generation", {}, seconds=CONTROL_SECONDS)

    async def update_weights(self, folder: Path, version: int, seconds: float) -> None:
        """Load the checkpoint in ``folder``, which the server must see under the same path, as ``version``.

        Raises:
            UpdateError: the server could not use it.
            SamplerLost: it does not answer within ``seconds``.
        """
        asked = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        answer = await self._post("/update_weights_from_disk", asked, seconds=seconds)
        if answer.get("success") is not True:
            raise UpdateError(f"the SGLang server at {self.url} did not take {folder}: {answer.get('message')}")

    async def healthy(self, seconds: float) -> bool:
        """Whether the server answers."""
        try:
            async with self._open().get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(seconds)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def _post(self, path: str, body: dict[str, Any], *, seconds: float | None) -> dict[str, Any]:
        """The answer to a request; no limit on its time if ``seconds`` is None.

        A server's refusal of a request is status 400. Some say in plain text that all went well: that is no answer
        to read from, and an empty one here.
        """
        try:
            timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONTROL_SECONDS)
            async with self._open().post(self.url + path, json=body, timeout=timeout) as response:
                text = await response.text()
                if response.status == 400 and path == "/generate":
                    raise RequestError(f"the SGLang server at {self.url} refuses the request: {_line(text)}")
                if response.status == 400 and path == "/update_weights_from_disk" and response.content_type == _JSON:
                    return dict(await response.json())  # it says there why
                if response.status >= 400:
                    raise SamplerError(
                        f"the SGLang server at {self.url} answers {path} with status {response.status} "
                        f"({_line(text)}); expected 200: is it SGLang, and not too old?"
                    )
                answer = await response.json() if response.content_type == _JSON else {}
                return answer if isinstance(answer, dict) else {}
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            raise SamplerLost(
                f"the SGLang server at {self.url} does not answer {path} "
                f"({type(error).__name__}: {_line(str(error))}); start it again, or take it out of sampler.urls"
            ) from error

    def _reply(self, answer: dict[str, Any]) -> Reply:
        try:
            meta = answer["meta_info"]
            count, finish = int(meta["completion_tokens"]), str(meta["finish_reason"]["type"])
            # SGLang-Jax repeats what it has sent already: the last ones are all of them. Its output_ids are not read,
            # because with a tokenizer it leaves out some and repeats others.
            entries = meta.get("output_token_logprobs", [])[-count:] if count else []
            tokens = np.array([entry[1] for entry in entries], np.int32)
            logprobs = np.array([entry[0] for entry in entries], np.float32)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise SamplerError(
                f"the SGLang server at {self.url} answers in another form ({type(error).__name__}: {error}); expected "
                "meta_info with completion_tokens, finish_reason and output_token_logprobs"
            ) from error
        if len(tokens) != count or not np.isfinite(logprobs).all():
            raise SamplerError(
                f"the SGLang server at {self.url} gives {len(tokens)} log-probabilities for {count} tokens, or one "
                "that is not finite; expected one for each"
            )
        version = meta.get("weight_version")
        return Reply(tokens, logprobs, finish, None if version is None else str(version))


_JSON = "application/json"


def _line(text: str) -> str:
    """``text`` in one line of readable length."""
    return " ".join(text.split())[:300]
