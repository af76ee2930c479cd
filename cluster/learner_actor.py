"""A process of the learner as a Ray actor, which owns the training devices of its host; see ``cluster.learner_gang``.

It is told to train and answers only at the end; meanwhile ``poll`` hands out what happened and
``stop`` ends the training after the step in hand. Ray runs these calls in threads beside it.
"""

from __future__ import annotations

import queue
import shutil
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ray
from flax import nnx

from actors.chat import Chat
from actors.tokenizers import write_character_tokenizer
from buffer import Buffer
from cluster.adapters import checkpoint_identity, first_adapters, make_lora
from cluster.agreement import make_agreement
from cluster.config import ArchitectureConfig, Config, OptimizerConfig
from cluster.conversations import Tokenised
from cluster.objective import make_anchors, make_critic, make_objective, make_recipe, make_value_gradient
from cluster.publication import Broadcaster, make_transport
from cluster.sampler_config import PUBLISH_ATTEMPTS
from learner.checkpoints import Checkpoints
from learner.gang import Gang, join_gang
from learner.learner import Learner, Record
from learner.mesh import make_mesh
from learner.models.attention import suitable_kernel
from learner.models.config import ModelConfig, read_config
from learner.models.lora import Lora
from learner.models.peft import write_adapter
from learner.models.value_head import VALUE_HEAD, ValueGradient, read_value_head, with_value_head, write_value_head
from learner.models.weights import initial_params, read_params, write_model
from learner.objectives import Objective, cross_entropy
from learner.optimizer import make_optimizer
from learner.packing import Ladder
from learner.publisher import Publisher
from learner.step import TrainStep
from learner.supervised import supervised_example, train_supervised

PUBLISH_BACKOFF_SECONDS = 1.0

CONCURRENT_CALLS = 16
"""Calls that Ray runs side by side: the training, those that look at it or stop it, and samplers that join or leave."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


class LearnerActor:
    """Trains one policy, first by imitation and then by reinforcement; :meth:`join` comes first."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._records: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._learner: Learner | None = None
        self._gang = Gang()

    def __repr__(self) -> str:
        place = f", process {self._gang.index}" if self._gang.count > 1 else ""
        return f"Learner({self._config.run.name}{place})"

    def address(self) -> str:
        """``host:port`` at which this process can be met."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def join(self, coordinator: str, index: int, count: int) -> int:
        """Meet the other processes at the :meth:`address` of the first; returns this one's place among them."""
        self._gang = join_gang(coordinator, index, count)
        return self._gang.index

    def make_model(self, architecture: ArchitectureConfig, folder: Path) -> None:
        """Write a new model: tokenizer, chat template, and random weights drawn from ``run.seed``."""
        vocab_size = write_character_tokenizer(folder)
        model = ModelConfig(vocab_size=vocab_size, **architecture.model_dump())
        params = initial_params(model, self._config.run.seed)
        write_model(model, params, folder, eos_token_id=Chat(folder).end_token)

    def imitate(self, source: Path, target: Path, conversations: Sequence[Tokenised]) -> None:
        """Train the model in ``source`` on conversations and write it to ``target``; needs ``model.warm_start``."""
        warm_start = self._config.model.warm_start
        if warm_start is None:
            raise ValueError("model.warm_start is null; it says how to imitate")
        model = read_config(source)
        step = self._step(model, warm_start.optimizer, warm_start.steps, cross_entropy, temperature=1.0)
        params = train_supervised(
            step,
            read_params(model, source, step.shardings),
            [supervised_example(tokens_S, mask_S) for tokens_S, mask_S in conversations],
            ladder=self._ladder.part(self._gang.count),
            steps=warm_start.steps,
            batch_size=warm_start.examples_per_step,
            seed=self._config.run.seed,
            stop=self._stop,
            on_step=self._record,
            gang=self._gang,
        )
        if params is not None:
            self._export(model, params, source, target)

    def start(
        self, model_folder: Path, samplers: Mapping[str, Any], *, buffer_url: str, run: str, checkpoints: Path
    ) -> int:
        """Compile the training step, take up the newest checkpoint and publish the first version.

        Args:
            model_folder: the policy at step 0.
            samplers: Ray handles of all samplers, by name.
            buffer_url: Redis.
            run: name of the run in the buffer.
            checkpoints: folder of the checkpoints.

        Returns:
            The step that training goes on from; 0 for a new run.
        """
        config, settings = self._config, self._config.learner
        model, value_gradient = read_config(model_folder), make_value_gradient(config.objective)
        self._model, self._model_folder, self._lora = model, model_folder, make_lora(config.model.lora)
        objective, temperature = make_objective(config.objective), config.sampler.temperature
        step = self._step(model, settings.optimizer, settings.steps, objective, temperature, value_gradient, self._lora)
        self._broadcaster = Broadcaster(
            make_transport(config.sampler, run, model_folder),
            samplers,
            timeout_seconds=settings.publish_timeout_seconds,
        )
        self._learner = Learner(
            step,
            self._first_params(step, value_gradient),
            ladder=self._ladder.part(self._gang.count),
            recipe=make_recipe(config),
            anchors=make_anchors(config.objective),
            critic=make_critic(config.objective, step.mesh),
            agreement=make_agreement(config, step),
            buffer=Buffer(
                buffer_url,
                run,
                timeout_seconds=config.buffer.timeout_seconds,
                payload_urls=config.buffer.payload_urls,
            ),
            publisher=self._publisher(),
            checkpoints=self._checkpoints(checkpoints),
            checkpoint_every_steps=settings.checkpoint_every_steps,
            batch_timeout_seconds=settings.lease_timeout_seconds,
            outage_seconds=config.buffer.outage_seconds,
            publish_dtype=config.sampler.precision,
            gang=self._gang,
        )
        self._learner.start()
        return self._learner.step

    def train(self) -> int:
        """Train until ``learner.steps`` or :meth:`stop`; returns the steps made, after a checkpoint was saved."""
        learner = self._started()
        learner.run(self._config.learner.steps, self._stop, self._record)
        learner.close()
        return learner.step

    def close(self) -> None:
        """Let go of what was published; samplers cannot be admitted any more."""
        self._broadcaster.close()

    def write_model(self, folder: Path) -> None:
        """Write the current policy as a Hugging Face folder, which appears as a whole or not at all."""
        self._export(self._model, self._started().params, self._model_folder, folder)

    def write_adapter(self, folder: Path) -> None:
        """Write the current adapters as a PEFT folder, likewise; needs ``model.lora``."""
        if self._lora is None:
            raise ValueError("model.lora is null; no adapters are trained")
        adapters, base = self._started().trained, str(self._model_folder)
        self._replace(folder, partial(write_adapter, self._model, self._lora, adapters, base=base))

    def admit_sampler(self, name: str, sampler: Any) -> int:
        """Publish to a sampler from now on; returns the version that it serves. See ``Broadcaster.admit``."""
        return self._broadcaster.admit(name, sampler)

    def dismiss_sampler(self, name: str) -> None:
        """Publish to a sampler no longer."""
        self._broadcaster.dismiss(name)

    def poll(self) -> list[Record]:
        """The records of the steps made since the last call; the first process of the gang has them."""
        records: list[Record] = []
        while not self._records.empty():
            records.append(self._records.get())
        return records

    def stop(self) -> None:
        """End the training after the step in hand."""
        self._stop.set()

    def _record(self, record: Mapping[str, float | str]) -> None:
        if self._gang.leads:  # nobody polls the others
            self._records.put(dict(record))

    def _export(self, model: ModelConfig, params: nnx.State, source: Path, target: Path) -> None:
        """Write weights to ``target``, with the tokenizer of ``source``; the first process of the gang does."""

        def write(folder: Path) -> None:
            write_model(model, params, folder, eos_token_id=Chat(source).end_token)
            write_value_head(params, folder)
            if self._gang.leads:
                for name in _TOKENIZER_FILES:
                    if (source / name).is_file():
                        shutil.copyfile(source / name, folder / name)

        self._replace(target, write)

    def _replace(self, target: Path, write: Callable[[Path], None]) -> None:
        """Have a folder written, by all processes together; it appears as a whole, in place of what was there."""
        staged = target.with_name(target.name + ".new")
        if self._gang.leads:
            shutil.rmtree(staged, ignore_errors=True)
        write(staged)
        if self._gang.leads:
            shutil.rmtree(target, ignore_errors=True)
            staged.rename(target)

    def _first_params(self, step: TrainStep, value_gradient: ValueGradient | None) -> nnx.State:
        """What training starts from; what is frozen under it goes to ``step``."""
        model, folder, adapters = self._model, self._model_folder, self._config.model.lora
        if adapters is None:
            params = read_params(model, folder, step.shardings)
        else:
            step.freeze(read_params(model, folder, step.base_shardings))
            params = first_adapters(adapters, model, self._config.run.seed, step.shardings)
        if value_gradient is None:
            return params
        return with_value_head(params, read_value_head(model, folder, step.shardings[VALUE_HEAD]))

    def _publisher(self) -> Publisher:
        seconds = self._config.learner.publish_timeout_seconds
        return Publisher(
            self._broadcaster,
            attempts=PUBLISH_ATTEMPTS,
            backoff_seconds=PUBLISH_BACKOFF_SECONDS,
            timeout_seconds=2 * PUBLISH_ATTEMPTS * seconds + self._config.buffer.outage_seconds,
        )

    def _checkpoints(self, folder: Path) -> Checkpoints:
        config, adapters = self._config, self._config.model.lora
        return Checkpoints(
            folder,
            self._model,
            keep=config.learner.checkpoints_kept,
            keep_best=config.learner.best_checkpoints_kept,
            adapters=None if adapters is None else checkpoint_identity(adapters, self._model_folder),
            settings={
                "seed": config.run.seed,
                "temperature": config.sampler.temperature,
                "learner": config.learner.model_dump(mode="json"),
                "objective": config.objective.model_dump(mode="json"),
            },
        )

    @property
    def _ladder(self) -> Ladder:
        settings = self._config.learner
        return Ladder.of(settings.row_lengths, settings.rows_per_microbatch, settings.mesh.shards)

    def _step(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        steps: int,
        objective: Objective,
        temperature: float,
        value_gradient: ValueGradient | None = None,
        lora: Lora | None = None,
    ) -> TrainStep:
        settings = self._config.learner
        return TrainStep(
            model,
            make_mesh(model, **settings.mesh.model_dump()),
            self._ladder,
            make_optimizer(total_steps=steps, **optimizer.model_dump()),
            objective,
            temperature=temperature,
            remat=settings.remat,
            dtype=settings.precision,
            kernel=suitable_kernel(jax.default_backend(), settings.row_lengths),
            value_gradient=value_gradient,
            lora=lora,
        )

    def _started(self) -> Learner:
        if self._learner is None:
            raise RuntimeError("the learner is not started; call start first")
        return self._learner
