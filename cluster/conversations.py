"""Conversations to imitate: from a file, or played by the environment's noisy demonstrator.

Axes: S = tokens of one conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from actors.chat import Chat, ChatError, Message
from actors.environments import FROZEN_LAKE
from actors.environments.frozen_lake import demonstrate
from cluster.config import Config, WarmStartConfig
from cluster.errors import ConfigError

type Tokenised = tuple[np.ndarray, np.ndarray]
"""tokens int32[S], and bool[S] true where a token is to be learned."""


def load_conversations(config: Config, warm_start: WarmStartConfig, chat: Chat) -> list[Tokenised]:
    """The conversations of a warm start as tokens.

    Raises:
        ConfigError: the file is missing, malformed or too long, or the environment has no demonstrator.
    """
    if warm_start.conversations is None:
        texts = _demonstrations(config, warm_start)
    else:
        texts = _read(warm_start.conversations)
    longest = config.learner.row_lengths[-1]
    found: list[Tokenised] = []
    for where, messages in texts:
        try:
            tokens_S, mask_S = chat.supervised(messages)
        except ChatError as error:
            raise ConfigError(f"{where}: {error}") from error
        if len(tokens_S) > longest:
            raise ConfigError(
                f"{where}: the conversation has {len(tokens_S)} tokens; expected at most the longest of "
                f"learner.row_lengths, {longest}: raise it or shorten the conversation"
            )
        if warm_start.loss_on == "all":
            mask_S = np.arange(len(tokens_S)) > 0  # nothing predicts the first token
        found.append((tokens_S, mask_S))
    _check_count(warm_start, len(found))
    return found


def check_demonstrator(config: Config, warm_start: WarmStartConfig) -> None:
    """Find out whether the environment can demonstrate as many episodes as one step of the warm start takes.

    Raises:
        ConfigError: nobody demonstrates this environment, or too few episodes are asked for.
    """
    if config.environment.id != FROZEN_LAKE:
        raise ConfigError(
            f"model.warm_start.conversations=null: {config.environment.id} has no demonstrator; "
            'give a JSON-lines file of {"messages": [...]}'
        )
    _check_count(warm_start, warm_start.demonstrations)


def _check_count(warm_start: WarmStartConfig, conversations: int) -> None:
    if conversations < warm_start.examples_per_step:
        raise ConfigError(
            f"model.warm_start.examples_per_step={warm_start.examples_per_step}: there are only {conversations} "
            "conversations; lower it or add conversations"
        )


def _demonstrations(config: Config, warm_start: WarmStartConfig) -> Iterator[tuple[str, list[Message]]]:
    """Episodes on training seeds; the order of seeds is that of ``run.seed``, so each seed learns from its own."""
    check_demonstrator(config, warm_start)
    rng = np.random.default_rng(config.run.seed)
    for _ in range(warm_start.demonstrations):
        seed = config.task.train_seed_start + int(rng.integers(config.task.train_tasks))
        played = demonstrate(
            seed,
            config.environment.kwargs,
            noise=warm_start.noise,
            rng=rng,
            max_turns=config.agent.max_turns,
            system_prompt=config.agent.system_prompt,
        )
        yield f"demonstration on seed {seed}", played.messages


def _read(path: Path) -> Iterator[tuple[str, list[Message]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"model.warm_start.conversations={path}: cannot be read ({why}); check the path") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            messages = json.loads(line)["messages"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f'{where}: expected one JSON object {{"messages": [...]}} a line ({error})') from error
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ConfigError(
                f'{where}: expected "messages" to be a list of {{"role": ..., "content": ...}} with two texts each'
            )
        yield where, messages


def _is_message(entry: object) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("role", "content"))
