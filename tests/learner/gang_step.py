"""One process of a gang, run by test_gang: ``gang_step.py PORT INDEX COUNT RESULT``.

Trains three steps on its share of fixed sequences; the first process writes what came of it.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from learner.gang import digest, join_gang
from learner.mesh import make_mesh, shardings
from learner.models.weights import abstract_model, from_hf, initial_params, to_hf, write_model
from learner.packing import Ladder, empty_rows, pack
from learner.step import TrainStep


def main(port: str, index: int, count: int, folder: Path) -> None:
    gang = join_gang(f"localhost:{port}", index, count)
    from sharded import LADDER, MODEL, OPTIMIZER, PPO, examples

    heard = gang.gather([index, -(10**15) - index, digest("lease")])
    assert heard.tolist() == [[i, -(10**15) - i, digest("lease")] for i in range(count)], heard
    assert gang.follow([7 * index]) == [0]
    devices = len(jax.devices())
    fsdp = min(2, devices)
    mesh = make_mesh(MODEL, data=devices // fsdp, fsdp=fsdp)
    step = TrainStep(MODEL, mesh, LADDER, OPTIMIZER, PPO, temperature=0.9)
    weights = to_hf(MODEL, initial_params(MODEL, seed=1))
    state = step.initialise(from_hf(MODEL, weights, shardings(mesh, abstract_model(MODEL)[1])))

    [(rows, length)] = LADDER.shapes
    own = Ladder(((rows // count, length),))
    packed = pack(examples()[index::count], own)
    most = int(gang.gather([len(packed)]).max())
    batch = [step.put(part) for part in [*packed, *[empty_rows(own.shapes[0])] * (most - len(packed))]]
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch, 0)
        losses.append(float(metrics["loss"]))
    write_model(MODEL, state.params, folder, eos_token_id=None)
    if gang.leads:
        np.save(folder / "losses.npy", losses)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
