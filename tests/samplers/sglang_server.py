"""Servers for the HTTP client: SGLang-Jax's own, and one in the shapes that SGLang documents for what only a GPU has.

What the second answers was written down from docs/advanced_features/sglang_for_rl.md of sgl-project/sglang: pause,
continue, abort, new weights from a folder. What it samples comes from our local engine, so that log-probabilities and
versions can be checked all the way through the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession, web
from safetensors.numpy import load_file

from actors.samplers.contract import Generation, RequestError, SamplingParams, StopReason, UpdateError
from actors.samplers.publication import Publication
from actors.samplers.serving import _Abort, _resolve, _Sample


class DocumentedServer:
    """Listens on loopback, in a thread of its own, from the moment it is made.

    Attributes:
        url: where.
        asked: path and body of every request so far.
        eos: token that ends a reply besides those asked for, as a model's own does; None for none.
        broken: paths that are answered with status 500.
        reads_text: whether it finds stop strings; a server misses those that a sample writes with many tokens.
    """

    def __init__(self, sampler: Any) -> None:
        """Serve what ``sampler`` samples; it is closed with the server."""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.eos: int | None = None
        self.broken: set[str] = set()
        self.reads_text = True
        self._sampler = sampler
        self._samples: dict[str, _Sample] = {}
        self._versions = 0
        self._weight_version = "default"
        self._loop = asyncio.new_event_loop()
        self._running = asyncio.Event()
        self._running.set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def close(self) -> None:
        """Cut every connection, as a server that dies does."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._sampler.close()

    async def _listen(self) -> str:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        for path, handle in {
            "/generate": self._generate,
            "/abort_request": self._abort_request,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
        }.items():
            app.router.add_post(path, partial(self._noted, handle))
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _noted(self, handle: Any, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append((request.path, body))
        if request.path in self.broken:
            return web.Response(status=500, text="something is broken")
        return await handle(body)

    async def _health(self, _: web.Request) -> web.Response:
        await self._running.wait()  # it tries whether it can generate
        return web.Response()

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        await self._running.wait()
        wanted, rid = body["sampling_params"], body["rid"]
        stops = (
            [] if wanted["ignore_eos"] else [*wanted["stop_token_ids"], *([self.eos] if self.eos is not None else [])]
        )
        params = SamplingParams(
            max_tokens=wanted["max_new_tokens"],
            temperature=wanted["temperature"],
            stop_tokens=tuple(stops),
            stop_strings=tuple(wanted["stop"]) if self.reads_text else (),
            seed=wanted["sampling_seed"] + len(body["input_ids"]) * 2**32,  # as a server's, it depends on the position
        )
        future: asyncio.Future[Generation] = self._loop.create_future()
        sample = _Sample(self._loop, partial(_resolve, future), body["input_ids"], params)
        self._samples[rid] = sample
        self._sampler._post(sample)
        try:
            generation = await future
        except RequestError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        except asyncio.CancelledError:
            self._sampler._post(_Abort(sample))
            raise
        finally:
            del self._samples[rid]
        return web.json_response(self._answer(rid, body, generation))

    def _answer(self, rid: str, body: dict[str, Any], generation: Generation) -> dict[str, Any]:
        tokens = generation.tokens.tolist()
        finish: dict[str, Any] = {
            StopReason.STOP: {"type": "stop", "matched": tokens[-1] if tokens else None},
            StopReason.LENGTH: {"type": "length", "length": len(tokens)},
            StopReason.ABORTED: {"type": "abort", "message": "Unknown error", "status_code": None, "err_type": None},
        }[generation.stop_reason]
        meta = {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": self._weight_version,
            "input_token_logprobs": [],
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "e2e_latency": 0.0,
        }
        if tokens:  # an aborted request that never ran has none
            logprobs = generation.logprobs.tolist()
            meta["output_token_logprobs"] = [[p, token, None] for p, token in zip(logprobs, tokens, strict=True)]
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    async def _abort_request(self, body: dict[str, Any]) -> web.Response:
        sample = self._samples.get(body["rid"])
        if sample is not None:
            self._sampler._post(_Abort(sample))
        return web.Response()

    async def _pause(self, body: dict[str, Any]) -> web.Response:
        assert body == {"mode": "abort"}
        self._running.clear()
        while self._samples:
            for sample in self._samples.values():
                self._sampler._post(_Abort(sample))
            await asyncio.sleep(0.01)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: dict[str, Any]) -> web.Response:
        self._running.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update(self, body: dict[str, Any]) -> web.Response:
        assert not self._samples, "an update came while requests were running"
        try:
            weights = load_file(Path(body["model_path"]) / "model.safetensors")
            await self._sampler.update(Publication.of(self._versions, weights))
        except (OSError, UpdateError) as error:
            message = f"Failed to update weights: {error}. Rolling back to original weights."
            return web.json_response({"success": False, "message": message, "num_paused_requests": 0}, status=400)
        self._versions += 1
        self._weight_version = body["weight_version"]
        return web.json_response(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )


class SglangJaxServer:
    """SGLang-Jax's own HTTP server, in a process of its own."""

    def __init__(self, model: Path, log: Path) -> None:
        """Serve the checkpoint folder ``model`` once ``wait`` returned."""
        self.url = f"http://127.0.0.1:{_free_port()}"
        command = [sys.executable, "-m", "sgl_jax.launch_server", "--model-path", str(model), *_OPTIONS]
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--port", self.url.rpartition(":")[2]],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # paused, it ignores SIGTERM; the group is ended as a whole
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )

    def wait(self, seconds: float = 270.0) -> None:
        """Return when it answers."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.5)
        raise AssertionError(f"the server did not come up: {self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        """End it at once, as an out-of-memory killer does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)


class ForwardingServer(DocumentedServer):
    """SGLang-Jax's server with the one endpoint that it lacks: new weights, which are those it has, and a version."""

    def __init__(self, url: str) -> None:
        """Stand before the server at ``url``."""
        self._behind = url
        super().__init__(sampler=None)

    def close(self) -> None:
        """Cut every connection; the server behind goes on."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _noted(self, handle: Any, request: web.Request) -> web.StreamResponse:
        if request.path == "/update_weights_from_disk":
            return web.json_response({"success": True, "message": "", "num_paused_requests": 0})
        async with ClientSession() as session:
            try:
                async with session.post(
                    self._behind + request.path, data=await request.read(), headers=_JSON
                ) as answer:
                    body, kind = await answer.read(), answer.content_type
                    return web.Response(body=body, status=answer.status, content_type=kind)
            except ClientError as error:
                return web.Response(status=502, text=str(error))


_JSON = {"Content-Type": "application/json"}
_OPTIONS = [
    *("--skip-tokenizer-init", "--skip-server-warmup", "--disable-overlap-schedule", "--disable-radix-cache"),
    *("--device", "cpu", "--dtype", "float32", "--context-length", "160", "--host", "127.0.0.1", "--random-seed", "3"),
    *("--max-running-requests", "8", "--max-total-tokens", "2560", "--max-prefill-tokens", "256"),
    *("--chunked-prefill-size", "256", "--precompile-token-paddings", "64", "256", "--precompile-bs-paddings", "8"),
    *("--grammar-backend", "none", "--log-level", "warning"),
]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
