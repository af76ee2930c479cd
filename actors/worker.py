"""The rollout worker: many episodes in one event loop, grouped as the buffer's slots ask.

Every group that the worker reserved ends in one of three ways: all members committed; abandoned
with a reason; or given up because the buffer took the slot back. The class is plain asyncio; the
cluster runs it as a Ray actor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from actors.chat import Chat
from actors.environments.pool import EnvironmentPool
from actors.episode import Agent, Place, Sampling, run_episode
from actors.routing import Router
from actors.tally import Tally
from buffer import AsyncBuffer, BufferUnavailable, Commit, Failure, Slot, WaitTimeout
from buffer.trajectory import Status, Trajectory

RESERVE_SECONDS = 1.0
"""Length of one wait for a slot: a drain is noticed this soon."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
"""Pauses between attempts double from the first to the longest."""


class RolloutWorker:
    """Runs episodes and commits their trajectories, until drained. All calls come from one event loop."""

    def __init__(
        self,
        *,
        name: str,
        buffer_url: str,
        payload_urls: Sequence[str],
        run: str,
        buffer_timeout_seconds: float,
        buffer_outage_seconds: float,
        samplers: Mapping[str, Any],
        model_folder: Path,
        environment_id: str,
        environment_kwargs: Mapping[str, Any],
        evaluation_kwargs: Mapping[str, Any],
        step_timeout_seconds: float,
        threads: int,
        agent: Agent,
        temperature: float,
        episodes_in_flight: int,
        max_episode_attempts: int,
        train_seed_start: int,
        train_tasks: int,
    ) -> None:
        """Prepare a worker; nothing is reserved before ``run``.

        Args:
            name: what the buffer and people call this worker.
            buffer_url: address of Redis.
            payload_urls: addresses of the instances that hold the payloads; none if that is Redis itself.
            run: name of the run in that Redis.
            buffer_timeout_seconds: limit of one Redis call.
            buffer_outage_seconds: how long Redis may be away before ``run`` fails.
            samplers: by name, Ray handles or objects that keep the sampler contract.
            model_folder: holds the tokenizer and the chat template.
            environment_id: registry id of a text environment.
            environment_kwargs: its arguments.
            evaluation_kwargs: added to these, or in place of them, for ``evaluate``.
            step_timeout_seconds: limit of one environment call.
            threads: environment calls at the same time.
            agent: how the policy is asked.
            temperature: of the training episodes' sampling, which nothing else shapes: what is trained on is drawn from
                the whole policy.
            episodes_in_flight: episodes that run at the same time.
            max_episode_attempts: an episode of ``evaluate`` is given up when it failed this often; what becomes of one
                in training, the buffer says.
            train_seed_start: environment seed of task 0.
            train_tasks: number of different tasks; task ``t`` has the seed of ``t % train_tasks``.

        Raises:
            ChatError: the model folder lacks a file.
            EnvironmentSetupError: the environment cannot be made.
        """
        self._name = name
        self._connect = lambda: AsyncBuffer(
            buffer_url, run, timeout_seconds=buffer_timeout_seconds, payload_urls=payload_urls
        )
        self._outage_seconds = buffer_outage_seconds
        self._router = Router(samplers)
        self._chat = Chat(Path(model_folder))

        def pool(kwargs: Mapping[str, Any]) -> EnvironmentPool:
            return EnvironmentPool(environment_id, kwargs, threads=threads, step_timeout_seconds=step_timeout_seconds)

        held_out_kwargs = {**environment_kwargs, **evaluation_kwargs}
        self._training = pool(environment_kwargs)
        self._evaluation = self._training if held_out_kwargs == environment_kwargs else pool(held_out_kwargs)
        self._agent = agent
        self._sampling = Sampling(temperature)
        self._episodes_in_flight = episodes_in_flight
        self._max_attempts = max_episode_attempts
        self._seed_of = lambda task: train_seed_start + task % train_tasks

        self._permits = asyncio.Semaphore(episodes_in_flight)
        self._members = 0  # episodes of reserved groups that are not over, running or waiting for a permit
        self._room = asyncio.Event()
        self._room.set()
        self._groups: dict[str, asyncio.Task[None]] = {}
        self._draining = asyncio.Event()
        self._cancelling = False
        self._over = asyncio.Event()
        self._over.set()
        self._tally = Tally()
        self._version = 0  # newest that this worker knows of

    async def run(self) -> None:
        """Reserve slots, run their groups and commit, until ``drain``.

        Raises:
            BufferUnavailable: Redis was away for longer than the outage allowed.
            BufferError: another failure of the buffer.
        """
        buffer = self._connect()
        self._over.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                while not self._draining.is_set():
                    slot = await self._reserve(buffer)
                    if slot is not None:
                        self._change_members(slot.group_size)
                        self._groups[slot.group] = tasks.create_task(self._run_group(buffer, slot))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._over.set()
            await buffer.close()

    async def drain(self, seconds: float) -> None:
        """Reserve nothing more, let running groups end within ``seconds``, then abandon the others; ends ``run``.

        Raises:
            TimeoutError: the buffer did not let the worker end in time.
        """
        self._draining.set()
        self._room.set()
        if self._groups:
            await asyncio.wait(list(self._groups.values()), timeout=seconds)
        self._cancelling = True
        for group in self._groups.values():
            group.cancel()
        limit = RESERVE_SECONDS + self._outage_seconds
        try:
            async with asyncio.timeout(limit):
                await self._over.wait()
        except TimeoutError as error:
            raise TimeoutError(
                f"worker {self._name} still waits for the buffer {limit} s after a drain; expected Redis to answer: "
                f"its slots ({', '.join(self._groups) or 'none'}) expire by themselves"
            ) from error

    async def evaluate(self, seeds: Sequence[int], sampling: Sampling) -> list[dict[str, Any]]:
        """Play one episode per environment seed, without the buffer, at most ``episodes_in_flight`` at once.

        Args:
            seeds: of the environment.
            sampling: how replies are drawn.

        Returns:
            For each seed ``seed, success, reward, turns, invalid_moves, status, trainable`` (whether the policy itself
            brought the episode to this end), ``tokens`` (sampled), ``version`` (oldest that sampled), and ``error``
            where the last of the attempts failed.
        """
        permits = asyncio.Semaphore(self._episodes_in_flight)

        async def play(position: int, seed: int) -> dict[str, Any]:
            async with permits:
                place = Place(task=position, seed=seed, group="evaluation", index=0)
                trajectory = await self._evaluate_place(place, sampling)
            return {
                **trajectory.metadata,
                "reward": trajectory.reward,
                "status": str(trajectory.status),
                "trainable": trajectory.status.trainable,
                "tokens": int(trajectory.loss_mask.sum()),
                "version": trajectory.oldest_version,
            }

        async with asyncio.TaskGroup() as tasks:
            episodes = [tasks.create_task(play(position, int(seed))) for position, seed in enumerate(seeds)]
        return [episode.result() for episode in episodes]

    async def set_samplers(self, samplers: Mapping[str, Any]) -> None:
        """Ask these samplers from now on; returns when those that left owe this worker nothing any more.

        Args:
            samplers: by name; perhaps none until the next call, for which episodes wait.
        """
        await self._router.set_samplers(samplers)

    async def status(self) -> dict[str, Any]:
        """Counters since the start, rates of the last seconds, and what runs now."""
        running = {"name": self._name, "groups": len(self._groups), "draining": self._draining.is_set()}
        return {**running, "asked_again": self._router.asked_again, **self._tally.snapshot()}

    async def _reserve(self, buffer: AsyncBuffer) -> Slot | None:
        """The next slot, or None when there is none yet; waits until an episode of it could start."""
        await self._room.wait()
        if self._draining.is_set():
            return None
        try:
            slot = await self._patiently("reserve", lambda: buffer.reserve(self._name, RESERVE_SECONDS))
        except WaitTimeout as wait:
            self._tally.waiting_for = str(wait)
            return None
        self._tally.waiting_for = None
        self._version = max(self._version, slot.version)
        if self._draining.is_set():
            await self._abandon(buffer, slot, "drained")
            return None
        return slot

    async def _run_group(self, buffer: AsyncBuffer, slot: Slot) -> None:
        try:
            reason = await self._play_group(buffer, slot)
            if reason is not None:
                await self._abandon(buffer, slot, reason)
        finally:
            del self._groups[slot.group]

    async def _play_group(self, buffer: AsyncBuffer, slot: Slot) -> str | None:
        """Run all members of a group; returns why its slot must be abandoned, or None when it need not."""
        oldest: dict[int, int] = {}  # oldest version that each episode has sampled with, or may be sampling with
        try:
            async with asyncio.TaskGroup() as tasks:
                renewal = tasks.create_task(self._renew(buffer, slot, oldest))
                members = [tasks.create_task(self._run_member(buffer, slot, i, oldest)) for i in range(slot.group_size)]
                for member in members:
                    member.add_done_callback(lambda _: self._change_members(-1))
                await asyncio.wait(members)
                renewal.cancel()
        except ExceptionGroup as errors:
            for error in errors.exceptions:
                if not isinstance(error, _GroupOver):
                    raise error from None
            return next((e.reason for e in errors.exceptions if isinstance(e, _GroupOver) and e.reason), None)
        except asyncio.CancelledError:
            if not self._cancelling:
                raise
            return "drained"
        return None

    async def _abandon(self, buffer: AsyncBuffer, slot: Slot, reason: str) -> None:
        self._tally.abandoned[reason] += 1
        await self._patiently("abandon", lambda: buffer.abandon(slot.group, reason))

    async def _run_member(self, buffer: AsyncBuffer, slot: Slot, index: int, oldest: dict[int, int]) -> None:
        """Play a member until an attempt is data, or the buffer does without it."""
        place = Place(task=slot.task, seed=self._seed_of(slot.task), group=slot.group, index=index)
        failures = 0

        def note(oldest_version: int) -> None:
            oldest[index] = oldest_version

        async with self._permits:
            while True:
                oldest[index] = self._version  # until the first reply says it exactly
                trajectory = await self._play(place, self._training, self._sampling, note)
                if trajectory.status.trainable:
                    break
                failures, reason = failures + 1, str(trajectory.status)
                oldest.pop(index, None)
                answer = await self._patiently("fail", partial(buffer.fail, slot.group, index, failures, reason))
                if answer is Failure.GONE:
                    raise _GroupOver(reason)
                if answer is Failure.DROPPED:
                    return
                await asyncio.sleep(_pause(failures))
        weight = trajectory.metadata.get("weight", 1.0)
        outcome = await self._patiently("commit", lambda: buffer.commit(trajectory, weight=weight))
        self._tally.commits[outcome] += 1
        if outcome in (Commit.EXPIRED, Commit.STALE):
            raise _GroupOver(None)

    async def _renew(self, buffer: AsyncBuffer, slot: Slot, oldest: dict[int, int]) -> None:
        """Keep the slot while its group runs; end the group when the buffer has no more use for it."""
        while True:
            await asyncio.sleep(slot.seconds / 3)
            if not await self._patiently("renew", lambda: buffer.renew(slot.group, min(oldest.values(), default=None))):
                raise _GroupOver(None)

    async def _evaluate_place(self, place: Place, sampling: Sampling) -> Trajectory:
        """The trajectory of the first attempt that is data, or of the last one."""
        for attempt in range(self._max_attempts):
            if attempt:
                await asyncio.sleep(_pause(attempt))
            trajectory = await self._play(place, self._evaluation, sampling, lambda version: None)
            if trajectory.status.trainable:
                break
        return trajectory

    async def _play(
        self, place: Place, environments: EnvironmentPool, sampling: Sampling, on_sampled: Callable[[int], None]
    ) -> Trajectory:
        """Play an episode once, on the sampler that is least busy."""
        with self._router.route() as route, self._tally.running_episode():
            trajectory = await run_episode(
                place,
                agent=self._agent,
                chat=self._chat,
                environments=environments,
                sampler=route,
                sampling=sampling,
                on_sampled=on_sampled,
            )
            if trajectory.status is Status.SAMPLER_ERROR:
                route.avoid()
        self._tally.add(trajectory)
        self._version = max(self._version, int(trajectory.versions.max(initial=0)))
        return trajectory

    async def _patiently[T](self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat ``call``, which must be safe to repeat, while Redis is away, up to the outage allowed."""
        deadline: float | None = None
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return await call()
            except BufferUnavailable as error:
                self._tally.fail("buffer", str(error))
                deadline = deadline or time.monotonic() + self._outage_seconds
                if time.monotonic() + pause > deadline:
                    raise BufferUnavailable(
                        f"worker {self._name} could not {what} for {self._outage_seconds} s: {error}"
                    ) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _change_members(self, count: int) -> None:
        self._members += count
        if self._members < self._episodes_in_flight or self._draining.is_set():
            self._room.set()
        else:
            self._room.clear()


def _pause(failures: int) -> float:
    """Seconds to wait after so many failures of an episode."""
    return float(min(FIRST_PAUSE_SECONDS * 2**failures, LONGEST_PAUSE_SECONDS))


class _GroupOver(Exception):
    """The group cannot go on: it is abandoned with ``reason``; without one its slot was taken back."""

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason)
        self.reason = reason
