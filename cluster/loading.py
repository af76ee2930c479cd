"""From a YAML file and dotted overrides to a checked :class:`Config`.

Every mistake becomes a :class:`ConfigError` of one line per problem: key, value, what is
expected, what to do.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cluster.config import Config
from cluster.errors import ConfigError


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read ``path``, apply ``overrides`` such as ``learner.steps=50``, and check the result.

    Raises:
        ConfigError: one line per problem.
    """
    tree = _read(path)
    try:
        for override in overrides:
            tree = OmegaConf.merge(tree, _parse_override(override))  # type: ignore[assignment]
        raw = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_one_line(error)}; mend the value in the file or the override") from error
    assert isinstance(raw, dict)
    if isinstance(raw.get("run", {}), dict):
        raw["run"] = {"experiment": experiment_of(path), **raw.get("run", {})}
    return check(raw)


def experiment_of(path: Path) -> str:
    """The stem of a YAML file's name as a run name: what a run name cannot hold becomes ``-``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem)[:100].strip("-.") or "run"


def check(raw: dict[Any, Any]) -> Config:
    """Turn plain data into a :class:`Config`.

    Raises:
        ConfigError: one line per problem.
    """
    try:
        text = json.dumps(raw)
    except TypeError as error:
        raise ConfigError(f"the configuration holds a value that JSON does not know ({error}); quote it") from error
    try:
        # Strict JSON mode: a list is a tuple and a string a path, but "50" is not 50 and true is not 1.
        return Config.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail) for detail in error.errors())) from error


def to_yaml(data: dict[str, Any]) -> str:
    """The configuration as YAML, in the order of the schema."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def _read(path: Path) -> DictConfig:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected a YAML configuration such as configs/quickstart.yaml")
    try:
        tree = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{where}: not valid YAML: {_one_line(problem)}; mend this line") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path}: expected sections such as 'run:' and 'learner:', found a list or a single value")
    return tree


def _parse_override(override: str) -> DictConfig:
    key, equals, _ = override.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise ConfigError(f"override {override!r}: expected key=value with a dotted key, such as learner.steps=50")
    try:
        return OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML; quote it") from error


def _explain(detail: ErrorDetails) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    kind, context = detail["type"], detail.get("ctx", {})
    named = f"{key}={_show(detail['input'])}"
    if kind == "extra_forbidden":
        return f"{named}: no such key; {_nearest(key)}"
    if kind == "missing":
        return f"{key}: missing; set it ({_describe(key)})"
    if kind == "value_error":
        return f"{named}: {context['error']}" if key else str(context["error"])
    return f"{named}: {_expectation(detail['msg'])}; it is: {_describe(key)}"


def _expectation(message: str) -> str:
    """Pydantic's message in our words."""
    for theirs, ours in _WORDING:
        message = message.replace(theirs, ours)
    return message


_WORDING = (
    ("Input should be", "expected"),
    ("a valid integer", "an integer"),
    ("a valid array", "a list"),
    ("a valid ", "a "),
    ("an object", "a section of keys and values"),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    ("greater than", "more than"),
    ("Tuple should have", "expected a list with"),
    (" after validation, not 0", ""),
)


def _describe(key: str) -> str:
    """What the schema says about a key, or about the nearest key around it."""
    descriptions = dict(_keys(Config))
    while key not in descriptions:
        key = key.rpartition(".")[0]
        if not key:
            return "part of the configuration"
    return descriptions[key].rstrip(".").replace("``", "")


def _nearest(key: str) -> str:
    """The key that was probably meant: a sibling first, then a key of that name elsewhere."""
    parent, _, last = key.rpartition(".")
    siblings: dict[str, str] = {}
    everywhere: dict[str, str] = {}
    for name, _ in _keys(Config):
        above, _, leaf = name.rpartition(".")
        everywhere.setdefault(leaf, name)
        if above == parent:
            siblings[leaf] = name
    for names in (siblings, everywhere):
        if close := difflib.get_close_matches(last, names, n=1, cutoff=0.7):
            return f"did you mean {names[close[0]]}?"
    return f"{parent or 'the configuration'} has {', '.join(siblings)}"


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every dotted key of the schema with its description."""
    for name, field in model.model_fields.items():
        yield prefix + name, " ".join((field.description or "").split())
        for section in _sections(field.annotation):
            yield from _keys(section, f"{prefix}{name}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            yield option


def _show(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    # A URL may hold a password, and one with unquoted characters, too.
    text = re.sub(r"(password=)[^&\"]*", r"\1***", re.sub(r"://[^\"]*@", "://***@", text))
    return text if len(text) <= 60 else text[:57] + "..."


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
