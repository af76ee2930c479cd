"""The policy that training starts from: an existing checkpoint folder, or a new model, warm-started if asked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import ray

from actors.chat import Chat
from cluster.config import Config
from cluster.conversations import load_conversations
from cluster.display import Display
from cluster.errors import ConfigError
from cluster.monitor import ANSWER_SECONDS
from cluster.runfolder import RunFolder
from cluster.services import START_SECONDS, start_learner, wait_for
from learner.models.config import read_config

WARM_START_SECONDS = 24 * 3600.0
"""Longest that a warm start may take."""


def check_model_folder(config: Config) -> None:
    """Find out before anything starts whether ``model.path``, if given, can be used.

    Raises:
        ModelError, ChatError: a file is missing or describes something else.
        ConfigError: the model is too small for the tokenizer or the context length.
    """
    path = config.model.path
    if path is None:
        return
    model, chat = read_config(path), Chat(path)
    if chat.vocabulary_size > model.vocab_size:
        raise ConfigError(
            f"model.path={path}: its tokenizer has {chat.vocabulary_size} tokens, its model vocab_size="
            f"{model.vocab_size}; use the tokenizer that belongs to the model"
        )
    if config.sampler.context_length > model.max_position_embeddings:
        raise ConfigError(
            f"sampler.context_length={config.sampler.context_length}: the model at {path} was made for "
            f"{model.max_position_embeddings} tokens; use at most that"
        )


def prepare_policy(config: Config, folder: RunFolder, display: Display, watch: Callable[[], None]) -> Path:
    """The Hugging Face folder of the policy at step 0, made if this run has none yet.

    Args:
        config: the ``model`` section says what to start from.
        folder: a new model is written to its ``initial_model``.
        display: shows the warm start.
        watch: called twice a second; what it raises ends the work.

    Raises:
        ConfigError: the conversations cannot be used.
    """
    settings = config.model
    if settings.path is not None and settings.warm_start is None:
        return settings.path
    target = folder.initial_model
    if target.is_dir():
        return target
    # Nothing else runs yet, so the warm start may have every core; its process ends with it.
    learner = start_learner(config, folder.name, role="warm-start", cpus=ray.cluster_resources().get("CPU", 1.0))
    try:
        staged = target.with_name(target.name + ".new")
        source = settings.path
        if source is None:
            source = folder.root / "new_model"
            making = learner.make_model.remote(settings.architecture, source)
            wait_for([making], watch, seconds=START_SECONDS, whom="the learner")
        if settings.warm_start is None:
            source.rename(target)
            return target
        conversations = load_conversations(config, settings.warm_start, Chat(source))
        imitation = learner.imitate.remote(source, staged, conversations)
        display.phase("warm start: learning the chat format from noisy demonstrations", settings.warm_start.steps)

        def show() -> None:
            watch()
            for record in ray.get(learner.poll.remote(), timeout=ANSWER_SECONDS):
                folder.append_metrics("warm_start", record)
                display.progress(int(record["step"]), f"loss {record['loss']:.3f}")

        wait_for([imitation], show, seconds=WARM_START_SECONDS, whom="the warm start")
        show()
        staged.rename(target)
        if settings.path is None:
            shutil.rmtree(source)
        return target
    finally:
        ray.kill(learner)
