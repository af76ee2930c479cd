"""Samplers and environments whose behaviour a test writes down beforehand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import gymnasium
import numpy as np
from gymnasium.spaces import Text

from actors.chat import Chat
from actors.environments.frozen_lake import MOVES
from actors.samplers.contract import Generation, SamplerError, StopReason


class ScriptedSampler:
    """Keeps the sampler contract, but takes its replies from ``reply(prompt text) -> text``."""

    name = "scripted"

    def __init__(self, folder, reply: Callable[[str], str], *, version: int = 0, seconds: float = 0.0) -> None:
        self.chat = Chat(folder)
        self.reply = reply
        self.version = version
        self.seconds = seconds
        self.running = 0
        self.most_running = 0
        self.requests: list[tuple[np.ndarray, object]] = []

    async def generate(self, tokens, params) -> Generation:
        self.requests.append((np.array(tokens), params))
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await asyncio.sleep(self.seconds)
            reply = self.chat.encode_reply(self.reply(self.chat.decode_reply(tokens)))
        finally:
            self.running -= 1
        stop = StopReason.STOP if len(reply) <= params.max_tokens else StopReason.LENGTH
        reply = reply[: params.max_tokens]
        logprobs = -np.arange(1, len(reply) + 1, dtype=np.float32)
        return Generation(reply, logprobs, np.full(len(reply), self.version, np.int32), stop)


class FailingSampler:
    """Every request fails."""

    name = "failing"

    async def generate(self, tokens, params) -> Generation:
        raise SamplerError("the engine is gone")


def walk(prompt: str) -> str:
    """A policy that walks right along the first row, then down: reads the last grid of the prompt."""
    grid = prompt.split("<|user|>")[-1].split("<|end|>")[0].splitlines()
    return "R" if grid and "A" in grid[0][:-1] else "D"


class Counting(gymnasium.Env[str, str]):
    """Says how often it was reset; the action chooses what happens: ok, done, cut, raise, nan, number, hang."""

    made = 0
    closed = 0
    release = threading.Event()

    def __init__(self) -> None:
        type(self).made += 1
        self.observation_space = Text(20, charset="reset step0123456789 ")
        self.action_space = Text(20)
        self.resets = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets += 1
        if seed == 13:
            raise RuntimeError("unlucky seed")
        return f"reset {self.resets}", {}

    def step(self, action):
        if action == "raise":
            raise RuntimeError("the simulator crashed")
        if action == "hang":
            assert type(self).release.wait(60)
        observation = 5 if action == "number" else "step"
        reward = float("nan") if action == "nan" else 0.5
        return observation, reward, action == "done", action == "cut", {}

    def close(self) -> None:
        type(self).closed += 1


class BlindEnv(gymnasium.Env[str, int]):
    def __init__(self) -> None:
        self.observation_space = Text(10)
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))


gymnasium.register("scripted/Counting-v0", entry_point=Counting)
gymnasium.register("scripted/Blind-v0", entry_point=BlindEnv)
