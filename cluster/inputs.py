"""What a configuration points to, looked at before anything starts: environment, model folder, conversations.

Nothing here imports JAX or Ray, but to look at adapters.
"""

from __future__ import annotations

import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from actors.chat import Chat
from actors.environments import make
from actors.samplers.sglang.release import check_model, check_release
from actors.tokenizers import write_character_tokenizer
from cluster.config import Config, WarmStartConfig
from cluster.conversations import check_demonstrator, load_conversations
from cluster.errors import ConfigError
from cluster.sampler_config import SHARED_MEMORY
from learner.models.config import read_config

SERVER_SECONDS = 10.0
"""Longest that a server of ``sampler.urls`` may take to accept a connection."""


def check_inputs(config: Config) -> None:
    """Find out before anything starts whether what ``headrace train`` and ``headrace sft`` read can be used.

    Raises:
        EnvironmentSetupError, ModelError, ChatError, ConfigError: as the checks below.
    """
    check_environment(config)
    check_model_folder(config)
    check_adapter_folder(config)
    # A run that goes on has as a rule made its warm start, and no longer needs what that imitated.
    if config.model.warm_start is not None and not config.run.resume:
        check_warm_start(config, config.model.warm_start)


def check_environment(config: Config) -> None:
    """Make the environment once as it is trained on, and once as it is evaluated on.

    Raises:
        EnvironmentSetupError: unknown id, arguments that do not fit, or no text environment.
    """
    settings = config.environment
    make(settings.id, settings.kwargs).close()
    make(settings.id, settings.kwargs | settings.evaluation_kwargs).close()


def check_model_folder(config: Config) -> None:
    """Read what describes the model at ``model.path``, if that is given; its weights are not read.

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


def check_adapter_folder(config: Config) -> None:
    """Read what describes the adapters at ``model.lora.path``, if that is given; their weights are not read.

    Raises:
        ModelError: there are none, or those of other settings.
    """
    if config.model.lora is not None and config.model.lora.path is not None:
        from cluster.adapters import check_first_adapters

        check_first_adapters(config.model.lora)


def check_sampler(config: Config) -> None:
    """Find out whether SGLang-Jax is there and serves the model, if it is to sample; nothing of it is imported.

    Raises:
        ConfigError: weights cannot travel as asked, or no server answers.
        ReleaseError: it is missing or another release, or does not serve the model at ``model.path``.
        ModelError: there is no readable model.
    """
    if config.sampler.transport == "shared_memory" and not SHARED_MEMORY.is_dir():
        raise ConfigError(
            f"sampler.transport=shared_memory: {SHARED_MEMORY} is no folder here; expected the shared memory of Linux: "
            "use object_store"
        )
    for url in config.sampler.urls:
        _check_server(url)
    if config.sampler.kind != "sglang_jax":
        return
    check_release()
    if config.model.path is not None:
        model = read_config(config.model.path)
        check_model(model.model_type, model.head_dim)


def _check_server(url: str) -> None:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((str(parts.hostname), port), timeout=SERVER_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"sampler.urls={url}: nobody answers there ({error}); start the SGLang server first, or take it out"
        ) from error


def check_warm_start(config: Config, warm_start: WarmStartConfig) -> None:
    """Tokenise the conversations of a file, or find out that the environment has a demonstrator.

    Raises:
        ConfigError: the file is missing, malformed, too long or too short, or nobody demonstrates.
    """
    if warm_start.conversations is None:
        check_demonstrator(config, warm_start)
        return
    with TemporaryDirectory() as scratch:
        folder = config.model.path
        if folder is None:  # the tokenizer that the new model is going to have
            folder = Path(scratch)
            write_character_tokenizer(folder)
        load_conversations(config, warm_start, Chat(folder))
