"""One episode: an agent plays an environment, its replies come from a sampler, tokens in and tokens out.

An episode that goes wrong is data, not a crash: ``run_episode`` always returns a trajectory,
whose status says who ended it. Only cancellation passes through.

Axes: T = tokens of the trajectory, K = turns, F = tokens given to the policy at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from actors.chat import Chat, ChatError, Message
from actors.environments.pool import EnvironmentFailure, EnvironmentPool, EnvironmentTimeout, Session
from actors.samplers.contract import Generation, RequestError, SamplerError, SamplingParams, StopReason, Tokens
from buffer.limits import LEAST_WEIGHT, MOST_WEIGHT
from buffer.trajectory import NOT_SAMPLED, Status, Trajectory


@dataclass(frozen=True, slots=True)
class Agent:
    """How the policy is asked.

    Attributes:
        system_prompt: text of a first system message; None for none.
        max_turns: the episode is truncated after this many turns.
        max_tokens_per_turn: most tokens sampled for one reply.
        context_length: most tokens of an episode, given and sampled.
        request_timeout_seconds: deadline of one reply.
        stop: texts that end a reply, which they are part of, besides its end-of-turn token.
    """

    system_prompt: str | None
    max_turns: int
    max_tokens_per_turn: int
    context_length: int
    request_timeout_seconds: float
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How replies are drawn; see ``SamplingParams``. Training has a temperature and nothing else.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_k, top_p, min_p: filters, for evaluation.
    """

    temperature: float
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """What an episode is played for.

    Attributes:
        task: position of the task in its task set.
        seed: seed of the environment.
        group: identifier of the group.
        index: position within the group.
    """

    task: int
    seed: int
    group: str
    index: int


class Replier(Protocol):
    """Who replies: as much of a sampler as an episode needs."""

    @property
    def name(self) -> str:
        """For the record; of all that replied if there are several."""
        ...

    async def generate(self, tokens: Tokens, params: SamplingParams) -> Generation:
        """As ``Sampler.generate``."""
        ...


async def run_episode(
    place: Place,
    *,
    agent: Agent,
    chat: Chat,
    environments: EnvironmentPool,
    sampler: Replier,
    sampling: Sampling,
    on_sampled: Callable[[int], None] = lambda oldest_version: None,
) -> Trajectory:
    """Play one episode and record it.

    The trajectory ends with the last reply; an observation that nobody answered is not part of it.

    Args:
        place: what it is played for.
        agent: how the policy is asked.
        chat: turns messages into tokens.
        environments: where it is played.
        sampler: who replies; its name at the end goes into the record.
        sampling: how replies are drawn.
        on_sampled: called after each reply with the oldest version that sampled any token so far.

    Returns:
        A trajectory with status COMPLETED (the environment ended it), TRUNCATED (turns, context length or the
        environment's own limit), TIMEOUT or ENV_ERROR (the environment), or SAMPLER_ERROR. Its metadata holds
        ``seed, success, turns, invalid_moves``, where something failed ``error``, and where the environment's
        info names one, the last ``weight``: how much more often than others the trajectory should be trained on.
    """
    record = _Record(on_sampled)
    started = time.monotonic()
    async with environments.session() as session:
        try:
            status = await _play(record, place.seed, agent, chat, session, sampler, sampling)
        except EnvironmentTimeout as error:
            status = record.failed(Status.TIMEOUT, error)
        except (EnvironmentFailure, ChatError) as error:  # ChatError: text that the policy's tokenizer cannot express
            status = record.failed(Status.ENV_ERROR, error)
        except (SamplerError, RequestError) as error:
            status = record.failed(Status.SAMPLER_ERROR, error)
    timings = {
        "sampler": record.sampler_seconds,
        "environment": session.seconds,
        "total": time.monotonic() - started,
    }
    return record.trajectory(place, status, sampler.name, timings)


async def _play(
    record: _Record, seed: int, agent: Agent, chat: Chat, session: Session, sampler: Replier, sampling: Sampling
) -> Status:
    messages: list[Message] = []
    if agent.system_prompt is not None:
        messages.append({"role": "system", "content": agent.system_prompt})
    messages.append({"role": "user", "content": await session.reset(seed)})
    given_F = chat.prompt(messages)
    for _ in range(agent.max_turns):
        room = agent.context_length - record.length - len(given_F)
        if room < 1 and record.length == 0:
            raise EnvironmentFailure(
                f"the first prompt has {len(given_F)} tokens and leaves no room for a reply in a context of "
                f"{agent.context_length}: raise sampler.context_length"
            )
        if room < 1:
            return Status.TRUNCATED
        record.give(given_F)
        params = SamplingParams(
            max_tokens=min(agent.max_tokens_per_turn, room),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            stop_tokens=chat.stop_tokens,
            stop_strings=agent.stop,
            deadline_seconds=agent.request_timeout_seconds,
        )
        generation = await record.sample(sampler, params)
        reply = chat.decode_reply(generation.tokens)
        step = await session.step(reply)
        record.answer(step.reward, step.info)
        if step.terminated:
            return Status.COMPLETED
        if step.truncated:
            return Status.TRUNCATED
        messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": step.observation})
        given_F = chat.follow_up(messages, reply_ended=generation.tokens[-1] == chat.end_token)
    return Status.TRUNCATED


@dataclass
class _Record:
    """The growing trajectory."""

    on_sampled: Callable[[int], None]
    oldest_version: int | None = None
    weight: float | None = None
    length: int = 0
    sampler_seconds: float = 0.0
    invalid_moves: int = 0
    success: bool | None = None
    error: str | None = None
    tokens: list[np.ndarray] = field(default_factory=list)
    loss_mask: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def give(self, tokens_F: np.ndarray) -> None:
        """Append tokens that the policy reads."""
        count = len(tokens_F)
        self._append(
            tokens_F, np.zeros(count, np.bool_), np.zeros(count, np.float32), np.full(count, NOT_SAMPLED, np.int32)
        )

    async def sample(self, sampler: Replier, params: SamplingParams) -> Generation:
        """Let ``sampler`` continue the stream, and append what it sampled."""
        started = time.monotonic()
        try:
            generation = await sampler.generate(np.concatenate(self.tokens), params)
        finally:
            self.sampler_seconds += time.monotonic() - started
        if generation.stop_reason is StopReason.ABORTED:
            raise SamplerError(
                f"the sampler gave up a reply after {len(generation.tokens)} tokens; expected it within "
                f"{params.deadline_seconds} s: raise sampler.request_timeout_seconds or lower actors.episodes_in_flight"
            )
        self._append(
            generation.tokens, np.ones(len(generation.tokens), np.bool_), generation.logprobs, generation.versions
        )
        oldest = int(generation.versions.min())
        self.oldest_version = oldest if self.oldest_version is None else min(self.oldest_version, oldest)
        self.on_sampled(self.oldest_version)
        return generation

    def answer(self, reward: float, info: dict[str, Any]) -> None:
        """Note the environment's answer to a reply."""
        self.rewards.append(reward)
        self.invalid_moves += bool(info.get("invalid_move", False))
        if "success" in info:
            self.success = bool(info["success"])
        if "weight" in info:
            self.weight = _checked_weight(info["weight"])

    def failed(self, status: Status, error: Exception) -> Status:
        """Note what ended the episode before its time."""
        self.error = f"{type(error).__name__}: {error}"
        return status

    def trajectory(self, place: Place, status: Status, sampler: str, timings: dict[str, float]) -> Trajectory:
        """The finished record."""
        reward = float(sum(self.rewards))
        metadata: dict[str, Any] = {
            "seed": place.seed,
            "success": reward > 0 if self.success is None else self.success,
            "turns": len(self.rewards),
            "invalid_moves": self.invalid_moves,
        }
        if self.error is not None:
            metadata["error"] = self.error
        if self.weight is not None:
            metadata["weight"] = self.weight
        return Trajectory(
            tokens=_joined(self.tokens, np.int32),
            loss_mask=_joined(self.loss_mask, np.bool_),
            logprobs=_joined(self.logprobs, np.float32),
            versions=_joined(self.versions, np.int32),
            rewards=np.asarray(self.rewards, np.float32),
            reward=reward,
            status=status,
            task=place.task,
            group=place.group,
            index=place.index,
            sampler=sampler,
            timings=timings,
            metadata=metadata,
        )

    def _append(self, tokens: np.ndarray, loss_mask: np.ndarray, logprobs: np.ndarray, versions: np.ndarray) -> None:
        self.length += len(tokens)
        self.tokens.append(tokens)
        self.loss_mask.append(loss_mask)
        self.logprobs.append(logprobs)
        self.versions.append(versions)


def _checked_weight(weight: Any) -> float:
    if isinstance(weight, int | float | np.number) and LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        return float(weight)
    raise EnvironmentFailure(
        f"the weight in the info of a step is {weight!r}; expected a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"
    )


def _joined(pieces: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype)
