"""A learner with deterministic actors, run by test_resume in a process that may be killed.

``resume_learner.py URL RUN FOLDER STEPS FSDP [PORT INDEX COUNT]``: goes on from the newest checkpoint in FOLDER, alone
or as a process of a gang that meets at PORT. Appends what it trained to
FOLDER/trained, a line of JSON a step: step, loss, and the tasks of the batch.
"""

import asyncio
import json
import sys
import threading
from functools import partial
from pathlib import Path

import jax
import numpy as np

from buffer import NOT_SAMPLED, AsyncBuffer, Buffer, Limits, Status, Trajectory, WaitTimeout
from learner.checkpoints import Checkpoints
from learner.gang import Gang, join_gang
from learner.learner import Learner
from learner.mesh import make_mesh, shardings
from learner.models.config import ModelConfig
from learner.models.weights import abstract_model, from_hf, initial_params, to_hf
from learner.objectives import cross_entropy, grpo, token_mean, trajectory_credit
from learner.optimizer import make_optimizer
from learner.packing import Ladder
from learner.publisher import Publisher
from learner.recipe import Recipe
from learner.step import TrainStep

MODEL = ModelConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
GROUPS, GROUP_SIZE = 2, 2


class Noting(Buffer):
    """A buffer that remembers which tasks each version trained."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.tasks = {}

    def lease(self, epoch, version, timeout, **named):
        lease = super().lease(epoch, version, timeout, **named)
        self.tasks[version] = sorted({member.task for member in lease.trajectories})
        return lease


class Actors(threading.Thread):
    """One worker; what it plays depends on the task alone."""

    def __init__(self, url, run):
        super().__init__(daemon=True)
        self._url, self._run_name, self.version = url, run, None

    def broadcast(self, version, weights):
        self.version = version

    def run(self):
        asyncio.run(self._work())

    async def _work(self):
        buffer = AsyncBuffer(self._url, self._run_name, timeout_seconds=10.0)
        while True:
            try:
                slot = await buffer.reserve("worker", 0.1)
            except WaitTimeout:
                continue
            for index in range(slot.group_size):
                await buffer.commit(self._play(slot, index))

    def _play(self, slot, index):
        rng = np.random.default_rng([slot.task, index])
        size = int(rng.integers(4, 20))
        mask = np.arange(size) % 3 == 1
        return Trajectory(
            tokens=rng.integers(0, 24, size, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -3.0, 0.0).astype(np.float32),
            versions=np.where(mask, self.version, NOT_SAMPLED).astype(np.int32),
            rewards=np.array([0.0] * (mask.sum() - 1) + [float(index)], np.float32),
            reward=float(index),
            status=Status.COMPLETED,
            task=slot.task,
            group=slot.group,
            index=index,
        )


def main(url: str, run: str, folder: Path, steps: int, fsdp: int, gang: Gang) -> None:
    buffer = Noting(url, run, timeout_seconds=10.0)
    buffer.open(
        Limits(
            max_staleness=0,
            max_age_seconds=600.0,
            groups_per_batch=GROUPS,
            group_size=GROUP_SIZE,
            max_bytes=1 << 24,
            slot_seconds=2.0,
            max_attempts=100,
        )
    )
    ladder = Ladder(((4, 32),))
    optimizer = make_optimizer(
        learning_rate=1e-2,
        warmup_steps=2,
        total_steps=steps,
        decay="cosine",
        final_fraction=0.1,
        weight_decay=0.1,
        beta1=0.9,
        beta2=0.95,
        max_grad_norm=1.0,
    )
    mesh = make_mesh(MODEL, data=len(jax.devices()) // fsdp, fsdp=fsdp)
    actors = Actors(url, run)
    learner = Learner(
        TrainStep(MODEL, mesh, ladder, optimizer, cross_entropy, temperature=1.0),
        from_hf(MODEL, to_hf(MODEL, initial_params(MODEL, seed=0)), shardings(mesh, abstract_model(MODEL)[1])),
        ladder=ladder.part(gang.count),
        recipe=Recipe(
            credit=partial(trajectory_credit, advantage=grpo),
            divisor_of=token_mean().divisor_of,
            uninformative="train",
        ),
        buffer=buffer,
        publisher=Publisher(actors.broadcast, attempts=1, backoff_seconds=0.1, timeout_seconds=30.0),
        checkpoints=Checkpoints(folder / "checkpoints", MODEL, keep=2),
        checkpoint_every_steps=3,
        batch_timeout_seconds=60.0,
        outage_seconds=30.0,
        gang=gang,
    )
    learner.start()
    if gang.leads:
        actors.start()

    def note(record):
        assert record["compilations_after_warmup"] == 0
        if not gang.leads:
            return
        line = {"step": record["step"], "loss": record["loss"].hex(), "tasks": buffer.tasks[record["version"]]}
        with (folder / "trained").open("a") as file:
            file.write(json.dumps(line) + "\n")

    learner.run(steps, threading.Event(), note)
    learner.close()


if __name__ == "__main__":
    url, run, folder, steps, fsdp, port, index, count = (*sys.argv[1:], *("0", "0", "1"))[:8]
    gang = join_gang(f"localhost:{port}", int(index), int(count))
    main(url, run, Path(folder), int(steps), int(fsdp), gang)
