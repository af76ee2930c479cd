"""Weights on their way to a server: one folder for each version, which appears as a whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from actors.samplers.contract import SamplerError
from actors.samplers.sglang.weights import check_weights

_KEPT = 2
"""Newest versions that stay: a server may still be reading the one before."""


class PublishedCheckpoints:
    """The versions that were published to servers, under a folder that all of them see."""

    def __init__(self, folder: Path, model: Path) -> None:
        """Publish under ``folder`` what has the shapes of the checkpoint folder ``model``.

        Raises:
            SamplerError: ``model`` holds no readable weights.
        """
        self._folder, self._model = folder, model
        self._shapes = _shapes(model)

    def write(self, version: int, weights: Mapping[str, np.ndarray]) -> Path:
        """The folder of ``version``: a checkpoint with the served model's configuration.

        Its name holds a digest, so that samplers of one run share it, and no other weights are taken for these.

        Raises:
            UpdateError: the weights do not fit the served model.
        """
        check_weights(weights, self._shapes)
        target = self._folder / f"version-{version:08d}-{_digest(weights)}"
        if not target.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            staged = Path(tempfile.mkdtemp(prefix=".version-", dir=self._folder))
            save_file(
                {name: np.ascontiguousarray(value) for name, value in weights.items()}, staged / "model.safetensors"
            )
            for other in self._model.iterdir():
                if other.is_file() and not other.name.startswith("model") and other.suffix != ".safetensors":
                    shutil.copyfile(other, staged / other.name)
            staged.chmod(0o755)
            try:
                os.rename(staged, target)
            except OSError:  # another sampler of the same run was first, with the same weights
                shutil.rmtree(staged)
        self._forget_old()
        return target

    def _forget_old(self) -> None:
        versions: dict[str, list[Path]] = {}
        for path in sorted(self._folder.glob("version-*-*")):
            versions.setdefault(path.name.split("-")[1], []).append(path)
        for old in sorted(versions)[:-_KEPT]:
            for path in versions[old]:
                shutil.rmtree(path, ignore_errors=True)


def _digest(weights: Mapping[str, np.ndarray]) -> str:
    digest = xxhash.xxh3_64()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(weights[name]).view(np.uint8).data)
    return digest.hexdigest()


def _shapes(model: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for path in sorted(model.glob("*.safetensors")):
            with safe_open(path, framework="numpy") as file:
                names = file.keys()
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (OSError, SafetensorError) as error:
        raise SamplerError(f"{model} holds no readable weights ({error}); expected a checkpoint folder") from error
    if not shapes:
        raise SamplerError(
            f"{model} holds no *.safetensors; expected a checkpoint folder with the served model's weights"
        )
    return shapes
