"""Run by test_objectives_aggregation in a process of its own: all objectives on eight simulated devices and on one."""

from __future__ import annotations

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from objective_cases import VERSION, examples_of_unequal_length, toy_policy

from learner.objectives import AGGREGATIONS, POLICY_LOSSES, k3, policy_objective, truncated_sequence
from learner.packing import Ladder, pack


def gradients(devices: int, logits: jax.Array, other: jax.Array) -> dict[tuple[str, str], tuple]:
    """Gradient and summary of one batch for each loss and aggregation, its rows split over so many devices."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    [rows] = pack(examples_of_unequal_length(), Ladder(((16, 32),)))
    anchor_RT = toy_policy(other, rows).logprob
    rows = jax.tree.map(jnp.asarray, rows._replace(proximal=anchor_RT, reference=anchor_RT))
    assert not rows.segments[-2:].any(), "the last device has no sequence"
    split = PartitionSpec("data")

    def one(loss, aggregation):
        def local(logits, rows):
            objective = partial(
                policy_objective,
                loss=POLICY_LOSSES[loss],
                aggregation=AGGREGATIONS[aggregation](*([40] if aggregation == "sequence_sum" else [])),
                corrections=(partial(truncated_sequence, cap=2.0),),
                divergence=k3,
                divergence_weight=0.1,
            )
            return objective(toy_policy(logits, rows), rows, jnp.int32(VERSION)).over_devices(("data",))

        def total(logits):
            whole = PartitionSpec()
            terms = jax.shard_map(local, mesh=mesh, in_specs=(whole, split), out_specs=whole)(logits, rows)
            return terms.loss / terms.divisor, terms.summary()

        return jax.grad(total, has_aux=True)(logits)

    return {(loss, name): jax.jit(partial(one, loss, name))() for loss in POLICY_LOSSES for name in AGGREGATIONS}


def main() -> None:
    """Compare; exits with a message where they differ."""
    assert len(jax.devices()) == 8, jax.devices()
    rng = np.random.default_rng(0)
    logits, other = (jnp.asarray(rng.normal(0, 2.0, (99, 99)).astype(np.float32)) for _ in range(2))
    ours, theirs = gradients(8, logits, other), gradients(1, logits, other)
    for name, (gradient, summary) in ours.items():
        expected, expected_summary = theirs[name]
        assert np.abs(expected).max() > 1e-4, name
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7, err_msg=str(name))
        for fact, value in expected_summary.items():
            np.testing.assert_allclose(summary[fact], value, rtol=1e-5, atol=1e-6, err_msg=f"{name} {fact}")
        print(*name, "equal")


if __name__ == "__main__":
    sys.exit(main())
