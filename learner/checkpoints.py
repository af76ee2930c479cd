"""Checkpoints: what a learner needs to go on, written beside the step.

A checkpoint appears under its final name only when it is whole, so whatever kills the
process, the newest one listed can be restored.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from learner.models.config import ModelConfig, ModelError
from learner.step import TrainState

_STATE, _ABOUT = "state", "about"


class Restored(NamedTuple):
    """What a checkpoint held.

    Attributes:
        state: parameters, optimizer moments and step, on the devices asked for.
        version: the newest policy version when it was written, which names these very weights.
    """

    state: TrainState
    version: int


class Checkpoints:
    """The checkpoints of one run, in one folder; the last ``keep`` of them stay."""

    def __init__(self, folder: Path, model: ModelConfig, *, keep: int) -> None:
        """Open the folder, creating it if need be."""
        self._folder = folder.absolute()
        self._model = dataclasses.asdict(model)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint; None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, *, version: int) -> None:
        """Begin to write a checkpoint; returns when ``state`` may be overwritten.

        Waits for the write before it to end. A step that is already there is left as it is.
        """
        if step in self._manager.all_steps():
            return
        about = {"model": self._model, "version": version}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{_STATE: ocp.args.StandardSave(_by_name(state)), _ABOUT: ocp.args.JsonSave(about)}
            ),
        )

    def restore(self, step: int, abstract: TrainState) -> Restored:
        """Read a checkpoint back.

        Args:
            step: one that :meth:`latest` named.
            abstract: shapes and shardings wanted; the mesh may be another than the one that wrote it.

        Raises:
            ModelError: the checkpoint is of another model; the message says what differs.
        """
        about = self._manager.restore(step, args=ocp.args.Composite(**{_ABOUT: ocp.args.JsonRestore()}))[_ABOUT]
        self._check_model(step, about["model"])
        wanted = ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(_by_name(abstract))})
        values = self._manager.restore(step, args=wanted)[_STATE]
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
        differing = [
            f"{name} is {model.get(name)!r}, the run's model has {value!r}"
            for name, value in self._model.items()
            if model.get(name) != value
        ]
        if differing:
            raise ModelError(
                f"checkpoint {self._folder / str(step)} is of another model: {'; '.join(differing)}; "
                "use the model it was written with or another run name"
            )


def _by_name(tree: Any) -> dict[str, Any]:
    """A tree as one flat dict: stored checkpoints do not depend on the classes of the tree."""
    return {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="_")
