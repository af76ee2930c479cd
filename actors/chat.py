"""The chat format of a policy: messages in, tokens out, and nothing tokenised twice.

An episode grows one token stream. ``Chat.prompt`` opens it; after every sampled reply
``Chat.follow_up`` gives only the tokens that come behind the reply. The reply itself stays
as it was sampled: rendering and tokenising it again could give other tokens than those
whose log-probabilities the sampler reported.

Axes: P = prompt tokens, F = tokens behind a reply, T = tokens of a conversation.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypedDict

import jinja2
import numpy as np
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer


class Message(TypedDict):
    """One entry of a conversation; ``role`` is one of those that the chat template knows."""

    role: str
    content: str


class ChatError(ValueError):
    """A folder holds no usable chat format, or a conversation cannot be rendered with it."""


class Chat:
    """Tokenizer and chat template of a Hugging Face model folder.

    Attributes:
        end_token: id of the token with which an assistant message ends.
        stop_tokens: ids that end a reply: ``end_token``, and the model's end-of-sequence token where it is another.
        vocabulary_size: number of token ids, special tokens included.
    """

    def __init__(self, folder: Path) -> None:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and the chat template of ``folder``.

        The template is ``chat_template.jinja`` or the entry ``chat_template`` of ``tokenizer_config.json``.

        Raises:
            ChatError: a file is missing or unreadable, or the template does not end an assistant message
                with one token.
        """
        config = _read_json(folder, "tokenizer_config.json")
        tokenizer_file = _existing(folder, "tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # tokenizers raises plain Exception
            raise ChatError(f"{tokenizer_file} is not a tokenizer: {error}; expected the file of a fast one") from error
        self._template = _compile(folder, config)
        self._names = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        self._reply = f"\ue000{uuid.uuid4().hex}\ue000"
        self.vocabulary_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.end_token: int = self._find_end_token(folder)
        eos_token = self._tokenizer.token_to_id(self._names["eos_token"])
        self.stop_tokens: tuple[int, ...] = (
            (self.end_token,) if eos_token in (None, self.end_token) else (self.end_token, eos_token)
        )

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """Tokens (int32[P]) of ``messages`` and of the opening of the assistant's reply.

        Raises:
            ChatError: the template refuses the conversation, or the tokenizer the text.
        """
        return self._encode(self._render(messages, add_generation_prompt=True))

    def follow_up(self, messages: Sequence[Message], *, reply_ended: bool) -> np.ndarray:
        """Tokens (int32[F]) between the last sampled reply and the next one.

        Args:
            messages: the conversation: up to a last assistant message (whose text is not looked at) and at
                least one message behind it.
            reply_ended: whether the reply was sampled up to its ``end_token``; if not, that token comes first.

        Raises:
            ChatError: as ``prompt``; or no assistant message precedes the last message.
        """
        position = _last_reply(messages)
        if position is None or position == len(messages) - 1:
            raise ChatError(
                f"follow_up got roles {[m['role'] for m in messages]}; "
                "expected an assistant message with at least one message behind it"
            )
        masked = list(messages)
        masked[position] = {"role": "assistant", "content": self._reply}
        tokens_F = self._encode(self._behind_reply(self._render(masked, add_generation_prompt=True)))
        return tokens_F[1:] if reply_ended else tokens_F

    def encode_reply(self, text: str) -> np.ndarray:
        """Tokens (int32[N]) of a whole reply with content ``text``, its ``end_token`` included."""
        return np.append(self._encode(text), np.int32(self.end_token))

    def decode_reply(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Text of sampled ``tokens`` without a final stop token; other special tokens stay visible."""
        ids = np.asarray(tokens).tolist()
        if ids and ids[-1] in self.stop_tokens:
            ids.pop()
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Text of any tokens, special ones included, for people to read."""
        text: str = self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)
        return text

    def supervised(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """A finished conversation as one training example.

        Built turn by turn, so that it holds exactly the tokens that an episode with these replies holds.

        Args:
            messages: a conversation that ends with an assistant message.

        Returns:
            tokens: int32[T].
            loss_mask: bool[T], true on the assistants' contents and their end tokens.

        Raises:
            ChatError: as ``prompt``; or the conversation does not end with an assistant message.
        """
        if not messages or messages[-1]["role"] != "assistant":
            raise ChatError(
                f"supervised got roles {[m['role'] for m in messages]}; expected a last message of the assistant"
            )
        pieces: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = messages[:position]
            given = self.follow_up(before, reply_ended=True) if pieces else self.prompt(before)
            reply = self.encode_reply(message["content"])
            pieces += [given, reply]
            masks += [np.zeros(len(given), np.bool_), np.ones(len(reply), np.bool_)]
        return np.concatenate(pieces), np.concatenate(masks)

    def _encode(self, text: str) -> np.ndarray:
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # tokenizers raises plain Exception
            raise ChatError(
                f"the tokenizer cannot encode {text[:200]!r}: {error}; use characters that its vocabulary holds"
            ) from error
        return np.asarray(ids, np.int32)

    def _render(self, messages: Iterable[Message], *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **self._names
            )
        except jinja2.TemplateError as error:
            roles = [m["role"] for m in messages]
            raise ChatError(f"the chat template refuses a conversation of roles {roles}: {error}") from error

    def _behind_reply(self, text: str) -> str:
        _, *behind = text.split(self._reply)
        if len(behind) != 1:
            raise ChatError(
                f"the chat template prints an assistant message {len(behind)} times; expected exactly once: "
                "use a template that keeps replies as they are"
            )
        return behind[0]

    def _find_end_token(self, folder: Path) -> int:
        conversation: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": self._reply},
            {"role": "user", "content": "?"},
        ]
        text = self._behind_reply(self._render(conversation, add_generation_prompt=True))
        first = int(self._encode(text)[0])
        token = self._tokenizer.get_added_tokens_decoder().get(first)
        if token is None or not text.startswith(token.content):
            raise ChatError(
                f"the chat template of {folder} prints {text[:20]!r} behind an assistant message; expected it to start "
                "with a special token of the tokenizer: a reply must end with one token"
            )
        return first


def _last_reply(messages: Sequence[Message]) -> int | None:
    return next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "assistant"), None)


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise ChatError(f"{folder} holds no {name}; expected a Hugging Face model folder with its tokenizer files")
    return path


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = _existing(folder, name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ChatError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ChatError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


def _token_text(entry: str | dict[str, Any] | None) -> str:
    """The text of a special token, which a tokenizer config writes as a string or as an object."""
    if entry is None:
        return ""
    return entry if isinstance(entry, str) else str(entry["content"])


def _compile(folder: Path, config: dict[str, Any]) -> jinja2.Template:
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if not isinstance(source, str):
        raise ChatError(
            f"{folder} holds no chat template; expected chat_template.jinja, or a string chat_template "
            "in tokenizer_config.json: use an instruction-tuned checkpoint or add a template"
        )
    # What other readers of these templates set: block trimming, break/continue, three helpers. The sandbox is there
    # because a template is code that came with a download.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatError(f"the chat template of {folder} has a syntax error in line {error.lineno}: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
