"""The run folder: everything a run keeps, at ``<run.folder>/<name>/``.

One process at a time holds a run folder: an advisory lock, released by the kernel when the
process dies however it dies. ``metrics.jsonl`` is only appended to; ``summary.json`` and
``config.yaml`` are replaced as a whole, so that a reader never meets half a file.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import yaml

from cluster.config import REDACTED, Config
from cluster.errors import RunError
from cluster.loading import to_yaml

type Kind = Literal["step", "evaluation", "warm_start"]

MOST_SAMPLERS = 1000
"""Samplers that a run can be asked to have."""

_RUN_ID, _SCALE = "run_id", "scale"
_BEFORE_ANY_RESULT = {".lock", "config.yaml", "redis", "new_model", _RUN_ID, _SCALE}


class RunFolder:
    """Paths and small files of one run, held by this process until :meth:`close`.

    Attributes:
        root: the folder itself, absolute.
        name: name of the run.
        resumed: whether the run existed before.
        notice: something a person should know about where the folder lies, or None.
        run_id: name of the run in the buffer; runs of one name that share a Redis differ in it.
    """

    def __init__(self, root: Path, *, resumed: bool, notice: str | None = None) -> None:
        self.root = root
        self.name = root.name
        self.resumed = resumed
        self.notice = notice
        self._lock = _lock(root)
        self.run_id = self._take_run_id()
        self._buffer: dict[str, Any] = {}
        self.take_scale_request()  # one that an earlier start of the run has left

    @classmethod
    def open(cls, config: Config) -> RunFolder:
        """Create the folder of a new run, or take up an existing one when ``run.resume`` is set.

        Raises:
            RunError: the name is taken, the run to resume is missing or was of another model or other data, or
                another process holds it.
        """
        parent, notice = runs_folder(config.run.folder)
        if config.run.resume:
            root = parent / (config.run.name or _newest(parent, config.run.experiment))
            if not (root / "config.yaml").is_file():
                raise RunError(f"run.resume=true: {root} holds no run to go on with; check run.name and run.folder")
            _refuse_another_run(root, config)
        else:
            root = _create(parent, config)
        folder = cls(root, resumed=config.run.resume, notice=notice)
        folder.write_config(config)
        return folder

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        """One JSON object a line: training steps and evaluations."""
        return self.root / "metrics.jsonl"

    @property
    def summary_path(self) -> Path:
        """The outcome of the run."""
        return self.root / "summary.json"

    @property
    def learning_curve_path(self) -> Path:
        """The plot of ``metrics.jsonl``."""
        return self.root / "learning_curve.png"

    @property
    def checkpoints(self) -> Path:
        """Folder of the learner's checkpoints."""
        return self.root / "checkpoints"

    @property
    def redis(self) -> Path:
        """Folder of the embedded Redis."""
        return self.root / "redis"

    @property
    def initial_model(self) -> Path:
        """Hugging Face folder of the policy at step 0, after the warm start."""
        return self.root / "initial_model"

    @property
    def model(self) -> Path:
        """Hugging Face folder of the trained model, adapters merged."""
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        """PEFT folder of the trained adapters, if the run trains any."""
        return self.root / "adapter"

    def append_metrics(self, kind: Kind, record: Mapping[str, Any]) -> None:
        """Append one record to ``metrics.jsonl``; it is readable by others at once.

        Args:
            kind: what the record tells of; stored as ``kind``.
            record: JSON-serialisable values. A ``step`` is the learner's record; an ``evaluation`` has ``step``,
                ``success_mean``, ``reward_mean`` and ``episodes``; a ``warm_start`` has ``step`` and ``loss``.
        """
        with open(self.metrics_path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **record}) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole records of ``metrics.jsonl``, in the order written."""
        return read_metrics(self.metrics_path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, replacing an earlier one at once."""
        _replace(self.summary_path, json.dumps(summary, indent=2) + "\n")

    def write_config(self, config: Config) -> None:
        """Write ``config.yaml``, without passwords; it names this folder, so it serves to go on from anywhere."""
        data = config.redacted()
        data["run"] |= {"name": self.name, "folder": str(self.root.parent), "resume": False}
        _replace(self.config_path, to_yaml(data))
        self._buffer = data["buffer"]

    def take_scale_request(self) -> int | None:
        """The number of samplers that somebody asked for by :func:`request_scale` since the last call, or None."""
        taken = self.root / f"{_SCALE}.taken"
        try:
            (self.root / _SCALE).rename(taken)  # one that is made from now on is the next call's
        except FileNotFoundError:
            return None
        text = taken.read_text(encoding="utf-8").strip()
        taken.unlink()
        return int(text) if text.isdecimal() else None

    def resume_command(self) -> str:
        """The command that goes on with this run, to be pasted into a shell; a password is left to be filled in."""
        words = ["headrace", "train", str(self.config_path), "run.resume=true"]
        buffer = self._buffer  # and not what the file holds by now: this is said when a run fails, too
        if buffer["url"] is not None and REDACTED in buffer["url"]:
            words.append(f"buffer.url={buffer['url'].replace(REDACTED, 'PASSWORD')}")
        if any(REDACTED in url for url in buffer["payload_urls"]):
            urls = ", ".join(f'"{url.replace(REDACTED, "PASSWORD")}"' for url in buffer["payload_urls"])
            words.append(f"buffer.payload_urls=[{urls}]")
        return shlex.join(words)

    def _take_run_id(self) -> str:
        path = self.root / _RUN_ID
        if not path.is_file():
            _replace(path, f"{self.name}-{secrets.token_hex(4)}\n")
        return path.read_text(encoding="utf-8").strip()

    @property
    def worthless(self) -> bool:
        """Whether there is nothing to go on from, so that :meth:`close` removes the folder."""
        return not self.resumed and {path.name for path in self.root.iterdir()} <= _BEFORE_ANY_RESULT

    def close(self) -> None:
        """Let another process have the run; one that never got anywhere leaves no folder, so that its name is free."""
        if self.worthless:
            shutil.rmtree(self.root)
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def request_scale(root: Path, count: int) -> None:
    """Ask the process that trains the run in ``root`` for ``count`` samplers; it takes that up within seconds.

    Raises:
        RunError: the run can have no such number of samplers, or is not running.
    """
    if not (root / "config.yaml").is_file():
        raise RunError(f"{root} holds no run; expected the folder of one, such as runs/NAME")
    if not 1 <= count <= MOST_SAMPLERS:
        raise RunError(f"--samplers {count}: expected 1 to {MOST_SAMPLERS}; stop the run by Ctrl-C to have none")
    if stored_settings(root)["sampler"].get("kind") == "sglang":
        raise RunError(
            f"--samplers {count}: the run in {root} has the servers of sampler.urls; stop it, and go on with others by "
            "run.resume=true sampler.urls=[...]"
        )
    if not _held(root):
        raise RunError(
            f"the run in {root} is not running; go on with it by run.resume=true sampler.replicas={count} instead"
        )
    _replace(root / _SCALE, f"{count}\n")


_NEEDED = {
    "model": frozenset[str](),
    "environment": frozenset(),
    "agent": frozenset(),
    "sampler": {"kind", "context_length"},
    "buffer": {"url"},
}
"""Sections, and keys in them, that are read back from what a run wrote."""


def stored_settings(root: Path) -> dict[str, Any]:
    """The settings that the run in ``root`` was started with, by section; passwords are left out.

    Raises:
        RunError: there are none, or they are not as a run writes them.
    """
    path = root / "config.yaml"
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RunError(
            f"{path} cannot be read ({' '.join(str(error).split())}); put back what the run wrote"
        ) from error
    for section, keys in _NEEDED.items():
        held = settings.get(section) if isinstance(settings, dict) else None
        if not isinstance(held, dict) or not keys <= held.keys():
            lacks = f"section {section}" + (f" with {', '.join(sorted(keys))}" if keys else "")
            raise RunError(f"{path} has no {lacks}; put back what the run wrote")
    return dict(settings)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records of a ``metrics.jsonl``; a last line cut short by a crash is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def runs_folder(folder: Path) -> tuple[Path, str | None]:
    """Where run folders lie, absolute, and a notice when that is not where the working directory says.

    A submitted Ray job works in a copy that Ray deletes with the job, so a relative folder would be lost.
    """
    here = Path.cwd()
    if folder.is_absolute() or "working_dir_files" not in here.parts:
        return here / folder, None
    parent = Path.home() / "headrace" / folder
    return parent, f"the working directory is Ray's temporary copy; the run is kept in {parent}"


def _create(parent: Path, config: Config) -> Path:
    if config.run.name is not None:
        root = parent / config.run.name
        try:
            root.mkdir(parents=True)
        except FileExistsError:
            raise RunError(
                f"run.name={config.run.name}: {root} exists; go on with it by run.resume=true, or choose another name"
            ) from None
        except OSError as error:
            raise RunError(f"run.folder={config.run.folder}: cannot make {root}: {error.strerror}") from error
        return root
    number = max(_numbers(parent, config.run.experiment), default=0)
    while True:
        number += 1
        root = parent / f"{config.run.experiment}-{number}"
        try:
            root.mkdir(parents=True)
        except FileExistsError:
            continue  # another process was faster
        except OSError as error:
            raise RunError(f"run.folder={config.run.folder}: cannot make {root}: {error.strerror}") from error
        return root


def _numbers(parent: Path, experiment: str) -> list[int]:
    pattern = re.compile(re.escape(experiment) + r"-(\d+)")
    names = [pattern.fullmatch(path.name) for path in parent.iterdir()] if parent.is_dir() else []
    return [int(match[1]) for match in names if match is not None]


def _newest(parent: Path, experiment: str) -> str:
    numbers = _numbers(parent, experiment)
    if not numbers:
        raise RunError(
            f"run.resume=true: {parent} holds no run named {experiment}-<number>; start one, or set run.name"
        )
    return f"{experiment}-{max(numbers)}"


_FIXED = (
    ("model", "path"),
    ("model", "architecture"),
    ("model", "lora"),
    ("environment",),
    ("agent",),
    ("sampler", "temperature"),
    ("buffer", "group_size"),
)
"""What a run keeps for life: its weights, and what its trajectories in the buffer were made with."""
_FREE = {"environment.step_timeout_seconds"}


def _refuse_another_run(root: Path, config: Config) -> None:
    stored, asked = stored_settings(root), config.redacted()
    for path in _FIXED:
        was: Any = stored
        now: Any = asked
        for part in path:
            was, now = was.get(part), now.get(part)  # an older run lacks what came since: it had none
        for name, old, new in _differences(".".join(path), was, now):
            if name not in _FREE and _in_upload(old) != _in_upload(new):
                raise RunError(
                    f"{name}={_as_written(new)}: the run in {root} was started with {_as_written(old)}; use that, or "
                    "start a new run"
                )
    context, rows = stored["sampler"]["context_length"], asked["learner"]["row_lengths"]
    if rows[-1] < context:
        raise RunError(
            f"learner.row_lengths={rows}: the run in {root} was started with sampler.context_length={context}, and "
            f"its buffer may hold trajectories of that length; add a row length ≥ {context}"
        )


def _differences(name: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Dotted names below ``name`` whose values differ, with both values."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*now, *was)):
            yield from _differences(f"{name}.{key}", was.get(key), now.get(key))
    elif was != now and not (was is None and now == []):  # an older run lacks a list that came since: it had none
        yield name, was, now


def _as_written(value: Any) -> str:
    """A value as one would write it behind ``name=``."""
    return value if isinstance(value, str) else json.dumps(value)


def _in_upload(value: Any) -> Any:
    """A path in Ray's copy of a working directory, relative to it: the next job has a copy elsewhere."""
    return re.sub(r"^/.*/working_dir_files/[^/]+/", "", value) if isinstance(value, str) else value


def _lock(root: Path) -> int:
    descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode() or "unknown"
        os.close(descriptor)
        raise RunError(f"{root} is in use by process {holder}; wait for it, stop it, or choose another name") from None
    os.truncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def _held(root: Path) -> bool:
    """Whether a process holds the run folder."""
    with open(root / ".lock", "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _replace(path: Path, text: str) -> None:
    staged = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")  # others may be replacing it, too
    try:
        with open(staged, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
