"""One process of a gang, run by test_gang: ``gang_step.py PORT INDEX COUNT RESULT``.

Trains three steps, a value head included, on its share of fixed sequences, and compares them with the first policy; the
first process writes what came of it.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from learner.agreement import EXACT, AgreementMonitor
from learner.gang import digest, join_gang
from learner.mesh import make_mesh, shardings
from learner.models.value_head import VALUE_HEAD, read_value_head, with_value_head, write_value_head
from learner.models.weights import abstract_model, from_hf, initial_params, to_hf, write_model
from learner.packing import Ladder, empty_rows, pack
from learner.step import TrainStep


def main(port: str, index: int, count: int, folder: Path) -> None:
    gang = join_gang(f"localhost:{port}", index, count)
    from sharded import LADDER, MODEL, OPTIMIZER, VALUED, examples, judge, with_some_head

    heard = gang.gather([index, -(10**15) - index, digest("lease")])
    assert heard.tolist() == [[i, -(10**15) - i, digest("lease")] for i in range(count)], heard
    assert gang.follow([7 * index]) == [0]
    devices = len(jax.devices())
    fsdp = min(2, devices)
    mesh = make_mesh(MODEL, data=devices // fsdp, fsdp=fsdp)
    step = TrainStep(MODEL, mesh, LADDER, OPTIMIZER, VALUED, temperature=0.9, value_gradient="trunk")
    write_value_head(with_some_head(initial_params(MODEL, seed=1)), folder / "start")
    gang.follow([0])  # the first process has written it
    placed = shardings(mesh, step.abstract_state.params)
    weights = to_hf(MODEL, initial_params(MODEL, seed=1))
    params = from_hf(MODEL, weights, shardings(mesh, abstract_model(MODEL)[1]))
    head = read_value_head(MODEL, folder / "start", placed[VALUE_HEAD])
    state = step.initialise(with_value_head(params, head))

    [(rows, length)] = LADDER.shapes
    own = Ladder(((rows // count, length),))
    packed = pack(examples()[index::count], own)
    most = int(gang.gather([len(packed)]).max())
    batch = [step.put(part) for part in [*packed, *[empty_rows(own.shapes[0])] * (most - len(packed))]]
    monitor = AgreementMonitor(step, EXACT, every_steps=9, max_staleness=1)
    assert monitor(state.params, [], 0, 1) == {}
    losses: list[float] = []
    for _ in range(3):
        judged, said = judge(step, state.params, batch)
        state, metrics = step(state, judged, 0)
        losses += [float(metrics["loss"]), said["value_mean"], said["explained_variance"]]
    # What was sampled by version 0, whose weights the steps have overwritten.
    report = monitor(state.params, batch, 1, 2)
    assert report["agreement_tokens"] == sum(example.mask.sum() for example in examples()), report
    losses += [float(report[f"agreement_{name}"]) for name in ("mean", "p95", "max", "outside_fraction", "k3")]
    write_model(MODEL, state.params, folder, eos_token_id=None)
    write_value_head(state.params, folder)
    if gang.leads:
        np.save(folder / "losses.npy", losses)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
