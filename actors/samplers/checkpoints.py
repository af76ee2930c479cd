"""Publications that are folders, one for each version, which appears as a whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from xxhash import xxh3_64

from actors.samplers.contract import SamplerError
from actors.samplers.publication import FolderParts, Manifest, Publication
from actors.samplers.sglang.weights import check_weights

WEIGHTS_FILE = "model.safetensors"
_KEPT = 2
"""Newest versions that stay: a server may still be reading the one before."""


class PublishedCheckpoints:
    """The versions that were published under a folder that every sampler, or its server, sees."""

    def __init__(self, folder: Path, model: Path) -> None:
        """Publish under ``folder``, to which nobody else writes, what has the shapes of the checkpoint in ``model``.

        Raises:
            SamplerError: ``model`` holds no readable weights.
        """
        self._folder, self._model = folder, model
        self._shapes = _shapes(model)

    def write(self, version: int, weights: Mapping[str, np.ndarray]) -> Publication:
        """Publish in a folder of its own: a checkpoint with the served model's configuration.

        The folder's name holds a digest, so that no other weights are taken for these.

        Raises:
            UpdateError: the weights do not fit the served model, or are not finite.
        """
        check_weights(weights, self._shapes)
        together = {name: np.ascontiguousarray(value) for name, value in weights.items()}  # as safetensors stores them
        publication = Publication.of(version, together)
        target = self._folder / f"version-{version:08d}-{_digest(publication.manifest)}"
        if not target.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            staged = Path(tempfile.mkdtemp(prefix=".version-", dir=self._folder))
            save_file(together, staged / WEIGHTS_FILE)
            for other in self._model.iterdir():
                if other.is_file() and not other.name.startswith("model") and other.suffix != ".safetensors":
                    shutil.copyfile(other, staged / other.name)
            staged.chmod(0o755)
            os.rename(staged, target)
        self._forget_old()
        parts = FolderParts(target, WEIGHTS_FILE, frozenset(publication.manifest.tensors))
        return Publication(publication.manifest, parts)

    def remove(self) -> None:
        """Remove all versions."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _forget_old(self) -> None:
        versions: dict[str, list[Path]] = {}
        for path in sorted(self._folder.glob("version-*-*")):
            versions.setdefault(path.name.split("-")[1], []).append(path)
        for old in sorted(versions)[:-_KEPT]:
            for path in versions[old]:
                shutil.rmtree(path, ignore_errors=True)


def _digest(manifest: Manifest) -> str:
    digest = xxh3_64()
    for name, entry in sorted(manifest.tensors.items()):
        digest.update(repr((name, entry)).encode())
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
