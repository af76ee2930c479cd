"""The services of a run: buffer, samplers and rollout workers, as the configuration asks for them.

``cluster.sampler_pool`` looks after the samplers.

Actors are named ``<run>/<role>``, which is what the Ray dashboard shows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.episode import Agent
from actors.samplers.local import LocalSampler
from actors.samplers.sglang.client import SglangClient
from actors.samplers.sglang.sampler import SglangJaxSampler
from actors.worker import RolloutWorker
from buffer import Buffer, EmbeddedRedis, Limits, Order
from cluster.config import Config
from cluster.ray_runtime import actor_environment
from cluster.runfolder import RunFolder
from cluster.sampler_config import SamplerConfig
from cluster.sampler_names import sampler_name

WORKER_CALLS = 1000
"""Calls that Ray lets run at once in an asynchronous actor; each is a coroutine, not a thread."""

HEALTH = "health"
"""Concurrency group of a sampler's ``health``, which waits for nobody."""

STORE_MEMORY_MARGIN = 256 << 20
"""Memory of our own Redis beyond the payloads' bound: control state, buffers of clients, the log's rewrite."""


def cpus_of(config: Config) -> float:
    """CPUs that all actors of a training run ask for together."""
    learner, sampler, actors = config.learner, config.sampler, config.actors
    samplers = len(sampler.urls) or sampler.replicas
    return learner.processes * learner.cpus + samplers * sampler.cpus + actors.workers * actors.cpus


@contextmanager
def buffer_service(config: Config, folder: RunFolder) -> Iterator[tuple[str, Buffer]]:
    """URL and client of the run's open buffer, on ``buffer.url`` or on a Redis of our own for the length of the block.

    Raises:
        PortInUse: ``buffer.port`` is taken.
        BufferUnavailable: nobody answers at ``buffer.url``.
    """
    settings = config.buffer
    limits = Limits(
        max_staleness=settings.max_staleness,
        max_age_seconds=settings.max_age_seconds,
        groups_per_batch=settings.groups_per_batch,
        group_size=settings.group_size,
        max_bytes=settings.max_bytes,
        slot_seconds=settings.slot_seconds,
        max_attempts=settings.max_attempts,
        tokens_per_batch=settings.tokens_per_batch,
        min_group_size=settings.min_group_size,
        max_member_attempts=config.actors.max_episode_attempts,
        order=Order(settings.order),
        look_ahead=settings.look_ahead,
        max_uses=settings.max_uses,
    )

    @contextmanager
    def opened(url: str) -> Iterator[tuple[str, Buffer]]:
        client = Buffer(
            url, folder.run_id, timeout_seconds=settings.timeout_seconds, payload_urls=settings.payload_urls
        )
        try:
            client.open(limits)
            client.reclaim()  # slots of an earlier start of the run: its workers are gone
            yield url, client
        finally:
            client.close()

    if settings.url is not None:
        with opened(settings.url) as service:
            yield service
        return
    memory = settings.max_bytes + STORE_MEMORY_MARGIN
    with (
        EmbeddedRedis(
            folder.redis, run=folder.run_id, host=settings.host, port=settings.port, max_memory=memory
        ) as server,
        opened(server.url) as service,
    ):
        yield service


def start_sampler(
    config: Config, run: str, model_folder: Path, index: int, restarts: int, place: PlacementGroup
) -> Any:
    """Handle of a new actor for the sampler ``sampler-<index>``; it compiles before it answers.

    Args:
        config: of the run.
        run: its name.
        model_folder: what is sampled from; its weights come with ``update``.
        index: the sampler's number, counted from 0; under ``sglang`` that of its URL.
        restarts: how often it was started before: each life draws other seeds.
        place: where it runs.
    """
    settings, name = config.sampler, sampler_name(index)
    kind, arguments = _sampler(config, index)
    remote: Any = ray.remote  # its types know no concurrency groups
    actor = remote(max_concurrency=WORKER_CALLS, concurrency_groups={HEALTH: 1})(kind).options(
        name=f"{run}/{name}",
        num_cpus=settings.cpus,
        resources=settings.resources,
        scheduling_strategy=PlacementGroupSchedulingStrategy(place),
        runtime_env=_sampler_environment(settings),
    )
    return actor.remote(
        **arguments,
        model=model_folder,
        slots=settings.slots,
        context_length=settings.context_length,
        on_update=settings.on_update,
        seed=int(np.random.SeedSequence([config.run.seed, index, restarts]).generate_state(1)[0]) >> 1,
        name=name,
    )


def _sampler_environment(settings: SamplerConfig) -> dict[str, Any]:
    environment = actor_environment(settings.cpus, devices=settings.tensor)
    if "TPU" not in settings.resources:  # on a TPU host JAX would take the chips, which are the learner's
        environment["env_vars"].setdefault("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", "cpu"))
    return environment


def _sampler(config: Config, index: int) -> tuple[type[Any], dict[str, Any]]:
    """The class of a sampler of ``sampler.kind``, and the arguments that only it takes."""
    settings = config.sampler
    if settings.kind == "sglang":
        return SglangClient, {"url": settings.urls[index]}
    own = {"tokens_in_flight": settings.tokens_in_flight, "filters": config.evaluation.filters}
    if settings.kind == "local":
        return LocalSampler, own
    return SglangJaxSampler, {"dtype": settings.precision, "tensor": settings.tensor, **own}


def start_workers(
    config: Config, run: str, run_id: str, model_folder: Path, samplers: Mapping[str, Any], buffer_url: str
) -> dict[str, Any]:
    """Handles of new rollout workers by name; they play nothing before ``run`` is called."""
    settings, buffer = config.actors, config.buffer
    return {
        name: ray.remote(RolloutWorker)
        .options(name=f"{run}/{name}", num_cpus=settings.cpus, max_concurrency=WORKER_CALLS)
        .remote(
            name=name,
            buffer_url=buffer_url,
            payload_urls=buffer.payload_urls,
            run=run_id,
            buffer_timeout_seconds=buffer.timeout_seconds,
            buffer_outage_seconds=buffer.outage_seconds,
            samplers=samplers,
            model_folder=model_folder,
            environment_id=config.environment.id,
            environment_kwargs=config.environment.kwargs,
            evaluation_kwargs=config.environment.evaluation_kwargs,
            step_timeout_seconds=config.environment.step_timeout_seconds,
            threads=settings.environment_threads,
            agent=Agent(
                system_prompt=config.agent.system_prompt,
                max_turns=config.agent.max_turns,
                max_tokens_per_turn=config.agent.max_tokens_per_turn,
                context_length=config.sampler.context_length,
                request_timeout_seconds=config.sampler.request_timeout_seconds,
                stop=config.agent.stop,
            ),
            temperature=config.sampler.temperature,
            episodes_in_flight=settings.episodes_in_flight,
            max_episode_attempts=settings.max_episode_attempts,
            train_seed_start=config.task.train_seed_start,
            train_tasks=config.task.train_tasks,
        )
        for name in (f"worker-{i}" for i in range(settings.workers))
    }
