"""Checkpoints: exact, bounded in number, safe against being killed, and only of the same model."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from learner.checkpoints import Checkpoints
from learner.models.config import ModelError
from learner.packing import pack
from learner.step import TrainState


@pytest.fixture(scope="module")
def step(make_step):
    return make_step()


@pytest.fixture(scope="module")
def batch(step, ladder, make_example):
    rng = np.random.default_rng(0)
    return [step.put(rows) for rows in pack([make_example(rng, 12) for _ in range(4)], ladder)]


def assert_equal(ours, theirs) -> None:
    for (path, mine), other in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(mine, other, err_msg=jax.tree_util.keystr(path))


def test_a_restored_state_is_exact_although_training_went_on(tmp_path, model, params, step, batch) -> None:
    checkpoints = Checkpoints(tmp_path, model, keep=2)
    assert checkpoints.latest() is None
    state, _ = step(step.initialise(params), batch, 0)
    saved = jax.device_get(jax.tree.map(np.array, state))
    checkpoints.save(1, state, version=7)
    for _ in range(3):  # the step overwrites the very buffers that are being saved
        state, _ = step(state, batch, 0)
    checkpoints.wait()
    checkpoints.close()

    again = Checkpoints(tmp_path, model, keep=2)
    assert again.latest() == 1
    restored = again.restore(1, step.abstract_state)
    assert restored.version == 7
    assert_equal(restored.state, saved)
    step(restored.state, batch, 0)  # placed so that it can be trained
    again.close()


def test_only_the_newest_are_kept(tmp_path, model, params, step) -> None:
    checkpoints = Checkpoints(tmp_path, model, keep=2)
    state = step.initialise(params)
    for number in (1, 2, 3, 3):
        checkpoints.save(number, state, version=number)
    checkpoints.close()
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [2, 3]


def test_the_best_are_kept_besides(tmp_path, model, params, step) -> None:
    checkpoints = Checkpoints(tmp_path, model, keep=1, keep_best=2)
    state = step.initialise(params)
    for number, score in enumerate([0.5, 0.9, 0.1, 0.7, None, 0.2], start=1):
        checkpoints.save(number, state, version=number, score=score)
    checkpoints.close()
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [2, 4, 6]


def test_settings_that_have_changed_are_told(tmp_path, model, params, step, caplog) -> None:
    settings = {"learner": {"optimizer": {"learning_rate": 0.1, "beta1": 0.9}, "row_lengths": (16, 32)}}
    checkpoints = Checkpoints(tmp_path, model, keep=1, settings=settings)
    checkpoints.save(3, step.initialise(params), version=0)
    checkpoints.close()
    settings["learner"]["optimizer"]["learning_rate"] = 0.2
    other = Checkpoints(tmp_path, model, keep=1, settings=settings)
    other.restore(3, step.abstract_state)
    other.close()
    told = [record.getMessage() for record in caplog.records if "since checkpoint" in record.getMessage()]
    assert told == ["since checkpoint 3: learner.optimizer.learning_rate is 0.1, the run's is 0.2"]


def test_a_checkpoint_of_another_model_is_refused_by_what_differs(tmp_path, model, params, step) -> None:
    checkpoints = Checkpoints(tmp_path, model, keep=1)
    checkpoints.save(1, step.initialise(params), version=0)
    checkpoints.close()
    other = Checkpoints(tmp_path, dataclasses.replace(model, intermediate_size=32), keep=1)
    with pytest.raises(ModelError, match="intermediate_size is 24, the run's is 32"):
        other.restore(1, step.abstract_state)
    other.close()


_SAVER = """
import sys
from pathlib import Path
import jax.numpy as jnp
from flax import nnx
from learner.checkpoints import Checkpoints
from learner.models.config import ModelConfig
from learner.step import TrainState
model = ModelConfig(**{model!r})
checkpoints = Checkpoints(Path({folder!r}), model, keep=2)
for step in range(1, 10_000):
    state = TrainState(nnx.State({{"x": jnp.full(4_000_000, float(step))}}), (), jnp.int32(step))
    checkpoints.save(step, state, version=step)
    print(step, flush=True)
"""


def test_a_process_killed_while_saving_leaves_a_whole_checkpoint(tmp_path, model) -> None:
    script = _SAVER.format(model=dataclasses.asdict(model), folder=str(tmp_path))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    saver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert saver.stdout is not None
    for line in saver.stdout:
        if int(line) == 4:  # step 4 is being written now, beside the loop
            saver.send_signal(signal.SIGKILL)
            break
    saver.wait(30)
    saver.stdout.close()

    checkpoints = Checkpoints(tmp_path, model, keep=2)
    latest = checkpoints.latest()
    assert latest is not None and latest >= 3

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = TrainState(
        nnx.State({"x": jax.ShapeDtypeStruct((4_000_000,), np.float32, sharding=sharding)}),
        (),
        jax.ShapeDtypeStruct((), np.int32, sharding=sharding),
    )
    state, version = checkpoints.restore(latest, abstract)
    assert version == state.step == latest
    assert (np.asarray(state.params["x"]) == latest).all()
    checkpoints.close()


def test_a_checkpoint_that_could_not_be_written_is_not_durable(tmp_path, model, params, make_step, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints", model, keep=2)
    state = make_step().initialise(params)

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    checkpoints.save(1, state, version=1)
    while not checkpoints.durable():
        pass
    monkeypatch.setattr(os, "rename", full)
    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr("pathlib.Path.rename", full)
    with pytest.raises(Exception, match="No space left"):
        checkpoints.save(2, state, version=2)
        while not checkpoints.durable():
            pass
    assert checkpoints.latest() == 1
