"""Checkpoints: what a learner needs to go on, written beside the step.

A checkpoint appears under its final name only when it is whole, so whatever kills the process, the newest one listed
can be restored. It holds what is trained, its moments and the step; the policy version, by which the buffer knows the
trained frontier; and the model and settings, with the seed, that it was written with. The newest stay, and the best by
score.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from learner.models.config import ModelConfig, ModelError
from learner.step import TrainState

_STATE, _ABOUT, _SCORE = "state", "about", "score"

logger = logging.getLogger(__name__)


class Restored(NamedTuple):
    """What a checkpoint held.

    Attributes:
        state: parameters, optimizer moments and step, on the devices asked for.
        version: the newest policy version when it was written, which names these very weights.
    """

    state: TrainState
    version: int


class Checkpoints:
    """The checkpoints of one run, in one folder. In a gang every process has one and makes the same calls."""

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        *,
        keep: int,
        keep_best: int = 0,
        adapters: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the folder, creating it if need be.

        Args:
            folder: of the run.
            model: that is trained.
            keep: newest checkpoints that stay.
            keep_best: checkpoints with the highest score that stay besides.
            adapters: where they are trained instead of the model: their settings and what tells the base that they
                are for, as plain data. Checkpoints with others are refused.
            settings: of the training, as plain data; what has changed since a checkpoint is told when it is restored.
        """
        self._folder = folder.absolute()
        # As JSON gives it back, so that they compare.
        self._model = json.loads(json.dumps({**dataclasses.asdict(model), "adapters": adapters and dict(adapters)}))
        self._settings = json.loads(json.dumps(dict(settings or {})))
        best = managers.BestN(get_metric_fn=_score, n=keep_best, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy([managers.LatestN(n=keep), best]),
            create=True,
            enable_async_checkpointing=True,
        )
        handlers = {_STATE: _state_handler(), _ABOUT: ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint; None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, *, version: int, score: float | None = None) -> None:
        """Begin to write a checkpoint; returns when ``state`` may be overwritten.

        Waits for the write before it to end. A step that is already there is left as it is.

        Args:
            step: its name.
            state: what to write.
            version: of the policy, which names these very weights.
            score: how good the policy is; None if nobody knows.
        """
        if step in self._manager.all_steps():
            return
        about = {"model": self._model, "settings": self._settings, "version": version}
        self._manager.save(
            step,
            args=ocp.args.Composite(**{_STATE: ocp.args.PyTreeSave(_by_name(state)), _ABOUT: ocp.args.JsonSave(about)}),
            metrics=None if score is None else {_SCORE: score},
        )

    def restore(self, step: int, abstract: TrainState) -> Restored:
        """Read a checkpoint back.

        Args:
            step: one that :meth:`latest` named.
            abstract: shapes and shardings wanted; the mesh may be another than the one that wrote it.

        Raises:
            ModelError: the checkpoint is of another model, or holds less or more than is trained, such as a value head;
                the message says what differs.
        """
        about = self._manager.restore(step, args=ocp.args.Composite(**{_ABOUT: ocp.args.JsonRestore()}))[_ABOUT]
        self._check_model(step, about["model"])
        for change in differences(about.get("settings", {}), self._settings):
            logger.warning("since checkpoint %d: %s", step, change)
        wanted = _by_name(abstract)
        self._check_names(step, set(wanted))
        how = ocp.args.PyTreeRestore(wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted))
        values = self._manager.restore(step, args=ocp.args.Composite(**{_STATE: how}))[_STATE]
        return Restored(jax.tree.map_with_path(lambda path, _: values[_name(path)], abstract), int(about["version"]))

    def durable(self) -> bool:
        """Whether everything saved is on the disk; raises what went wrong with the last write."""
        if self._manager.is_saving_in_progress():
            return False
        self._manager.wait_until_finished()  # it does not wait now, but a failed write looks finished, too
        return True

    def wait(self) -> None:
        """Return when nothing is being written any more; raises what went wrong."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish writing and let go of the folder."""
        self._manager.close()

    def _check_model(self, step: int, model: dict[str, Any]) -> None:
        differing = differences({name: model.get(name) for name in self._model}, self._model)
        if differing:
            raise ModelError(
                f"checkpoint {self._folder / str(step)} is of another model: {'; '.join(differing)}; "
                "use the model it was written with or another run name"
            )

    def _check_names(self, step: int, wanted: set[str]) -> None:
        stored = set(self._manager.item_metadata(step)[_STATE].tree)
        for what, names in (("lacks", wanted - stored), ("holds besides", stored - wanted)):
            if names:
                *others, name = sorted(names)  # parameters come after moments
                more = f" and {len(others)} more" if others else ""
                raise ModelError(
                    f"checkpoint {self._folder / str(step)} {what} {name}{more}; expected what is trained: set "
                    "objective and learner as they were when it was written, or use another run name"
                )


def _state_handler() -> ocp.PyTreeCheckpointHandler:
    # What several devices hold is written by one of them: shared among them, each share would be cut out by a program
    # that is compiled in the middle of the training.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What is not the same in two trees of plain data, a line each: ``name is OLD, the run's is NEW``."""
    found = []
    for name in [*old, *(name for name in new if name not in old)]:
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name} is {before!r}, the run's is {after!r}")
    return found


def _score(metrics: Any) -> float:
    return float(metrics[_SCORE])


def _by_name(tree: Any) -> dict[str, Any]:
    """A tree as one flat dict: stored checkpoints do not depend on the classes of the tree."""
    return {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="_")
