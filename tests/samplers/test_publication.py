from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_examples import CONFIG, make_weights, write_checkpoint

from actors.samplers.contract import UpdateError
from actors.samplers.publication import Manifest, Publication, verified
from cluster.publication import SharedFolder, SharedMemory, make_transport
from cluster.sampler_config import SamplerConfig
from learner.models.tensors import by_path
from learner.models.weights import from_hf, seen_as_hf

WEIGHTS = {
    "columns": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "rows": np.arange(6, dtype=np.float32).reshape(2, 3),
    "gaps": np.arange(20, dtype=np.float32).reshape(4, 5)[:, ::2],
    "half": np.linspace(-1, 1, 5, dtype=np.float32).astype(jnp.bfloat16),
    "nothing": np.empty((0, 3), np.float32),
}


def test_what_is_verified_is_what_was_published_in_the_same_memory() -> None:
    publication = Publication.of(3, WEIGHTS)
    assert publication.manifest.nbytes == sum(value.nbytes for value in WEIGHTS.values())
    for arrived in (publication, pickle.loads(pickle.dumps(publication))):
        assert arrived.manifest.version == 3
        arrays = verified(arrived)
        for name, value in WEIGHTS.items():
            assert arrays[name].dtype == value.dtype
            np.testing.assert_array_equal(arrays[name], value)
    assert all(np.shares_memory(verified(publication)[name], WEIGHTS[name]) for name in ("columns", "rows", "half"))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_are_not_published(dtype: type, value: float) -> None:
    weights = {"a": np.ones(3, dtype), "b": np.array([1, value, 2], dtype)}
    with pytest.raises(UpdateError, match="tensor b holds values that are not finite"):
        Publication.of(0, weights)


def test_a_flipped_bit_a_lost_and_an_unknown_tensor_are_named() -> None:
    publication = Publication.of(0, WEIGHTS)
    for name, part in publication.parts.items():
        if len(part):
            flipped = part.copy()
            flipped[-1] ^= 1
            with pytest.raises(UpdateError, match=f"tensor {name} has digest"):
                verified(Publication(publication.manifest, {**publication.parts, name: flipped}))
            with pytest.raises(UpdateError, match=f"tensor {name} has {len(part) - 1} bytes; expected {len(part)}"):
                verified(Publication(publication.manifest, {**publication.parts, name: part[1:]}))
    with pytest.raises(UpdateError, match="tensor gaps is missing"):
        verified(Publication(publication.manifest, {n: p for n, p in publication.parts.items() if n != "gaps"}))
    fewer = Manifest(0, {n: entry for n, entry in publication.manifest.tensors.items() if n != "gaps"})
    with pytest.raises(UpdateError, match="tensor gaps is not in the manifest"):
        verified(Publication(fewer, publication.parts))


def test_shared_memory_takes_turns_and_is_let_go_of(tmp_path: Path) -> None:
    (tmp_path / "headrace-run-7").touch()  # left by a process that was killed
    (tmp_path / "headrace-runner-7").touch()  # of another run
    transport = SharedMemory("run", tmp_path)
    shipped = []
    for version in range(4):
        shipped.append(pickle.loads(pickle.dumps(transport.ship(version, make_weights(version)))))
        for recent in shipped[-2:]:  # whoever has not switched yet still serves from the one before
            for name, value in verified(recent).items():
                np.testing.assert_array_equal(value, make_weights(recent.manifest.version)[name])
    with pytest.raises(UpdateError, match=r"tensor .* has digest"):
        verified(shipped[0])
    assert len(list(tmp_path.glob("headrace-run-*"))) == 2
    larger = transport.ship(4, {"a": np.ones(100_000, np.float32)})
    np.testing.assert_array_equal(verified(larger)["a"], 1)
    late = pickle.loads(pickle.dumps(larger))
    transport.close()
    assert [path.name for path in tmp_path.iterdir()] == ["headrace-runner-7"]
    with pytest.raises(UpdateError, match="version 4 cannot be read here"):
        verified(late)


def test_weights_that_are_refused_leave_those_being_served_alone(tmp_path: Path) -> None:
    transport = SharedMemory("run", tmp_path)
    broken = {**make_weights(2), "model.norm.weight": np.full(CONFIG.hidden_size, np.nan, np.float32)}
    for version in range(3):
        served = pickle.loads(pickle.dumps(transport.ship(version, make_weights(version))))
        for _ in range(2):
            with pytest.raises(UpdateError, match="not finite"):
                transport.ship(version + 1, broken)
            verified(served)


def test_a_folder_holds_a_checkpoint_that_verifies(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    transport = SharedFolder(tmp_path / "published", write_checkpoint(tmp_path / "model"))
    weights = {name: np.asfortranarray(value) for name, value in make_weights(1).items()}
    publication = pickle.loads(pickle.dumps(transport.ship(1, weights)))
    for name, value in verified(publication).items():
        np.testing.assert_array_equal(value, weights[name])
    [folder] = (tmp_path / "published").iterdir()
    (folder / "model.safetensors").unlink()
    with pytest.raises(UpdateError, match="version 1 cannot be read here"):
        verified(publication)


def test_runs_that_publish_in_the_same_folder_leave_each_other_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = write_checkpoint(tmp_path / "model")
    config = SamplerConfig(transport="folder", weights_folder=tmp_path / "published", context_length=16)
    finished, begun = (make_transport(config, run, model) for run in ("finished", "begun"))
    for version in (399, 400):
        finished.ship(version, make_weights(version))
    publication = begun.ship(0, make_weights(0))
    for name, value in verified(publication).items():
        np.testing.assert_array_equal(value, make_weights(0)[name])
    finished.close()
    verified(publication)
    begun.close()
    assert list((tmp_path / "published").iterdir()) == []


def test_too_little_shared_memory_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)  # a small /dev/shm needs root to be mounted
    transport = SharedMemory("run", tmp_path)
    with pytest.raises(OSError, match="has no room for"):
        transport.ship(0, make_weights(0))
    assert list(tmp_path.iterdir()) == []


def test_parameters_are_served_from_the_memory_they_were_published_in(tmp_path: Path) -> None:
    params = from_hf(CONFIG, make_weights(2))
    publication = SharedMemory("run", tmp_path).ship(0, seen_as_hf(CONFIG, params))
    served = from_hf(CONFIG, verified(publication), borrow=True)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(served), jax.tree.leaves(params))
    memory = publication.parts._memory
    start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    borrowed = [start <= leaf.unsafe_buffer_pointer() < end for leaf in by_path(served).values()]
    assert all(borrowed), f"{borrowed.count(False)} of {len(borrowed)} parameters were copied"
