"""Run by test_mesh in a process of its own: eight simulated devices against one."""

from __future__ import annotations

import sys

import jax
import numpy as np

from learner.mesh import make_mesh
from learner.models.config import ModelConfig
from learner.models.weights import initial_params
from learner.objectives import ppo_clip
from learner.optimizer import make_optimizer
from learner.packing import Example, Ladder, pack
from learner.step import TrainStep

MODEL = ModelConfig(
    vocab_size=23,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
LADDER = Ladder(((8, 32),))
OPTIMIZER = make_optimizer(
    learning_rate=1e-2,
    warmup_steps=1,
    total_steps=10,
    decay="linear",
    final_fraction=0.1,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    max_grad_norm=0.05,
)


def examples() -> list[Example]:
    """Unequal lengths, so that devices hold unequal numbers of trained tokens, and some none."""
    rng = np.random.default_rng(0)
    made = []
    for size in (32, 30, 27, 20, 11, 9, 4, 3, 25, 31, 29):
        mask = rng.random(size) < 0.5
        mask[0] = False
        logprobs = np.where(mask, rng.normal(-3.1, 0.2, size), 0.0).astype(np.float32)
        tokens = rng.integers(0, 23, size, dtype=np.int32)
        made.append(Example(tokens, mask, logprobs, np.zeros(size, np.int32), rng.normal(size=size).astype(np.float32)))
    return made


def train(data: int, fsdp: int):
    """Gradient and summary of the first batch, and the parameters after three steps."""
    mesh = make_mesh(MODEL, data=data, fsdp=fsdp, devices=jax.devices()[: data * fsdp])
    step = TrainStep(
        MODEL,
        mesh,
        LADDER,
        OPTIMIZER,
        lambda *given: ppo_clip(*given, clip_low=0.2, clip_high=0.28, entropy_bonus=0.01, entropy_cap=4.0),
        temperature=0.9,
        remat=False,
    )
    state = step.initialise(initial_params(MODEL, seed=1))
    if fsdp > 1:
        weight = state.params["layers"]["attention"]["q_HND"]
        assert weight[...].addressable_shards[0].data.shape[1] == MODEL.hidden_size // fsdp, "weights are not split"
    batch = [step.put(rows) for rows in pack(examples(), LADDER)]
    first = jax.device_get(step.gradients(state.params, batch, 0))
    metrics = []
    for _ in range(3):
        state, scalars = step(state, batch, 0)
        metrics.append(jax.device_get(scalars))
    return first, metrics, jax.device_get(state.params)


def main() -> None:
    """Compare every mesh with one device; exits with a message where they differ."""
    assert len(jax.devices()) == 8, jax.devices()
    (gradient, summary), metrics, params = train(1, 1)
    for data, fsdp in ((8, 1), (4, 2), (2, 4)):
        (other_gradient, other_summary), other_metrics, other_params = train(data, fsdp)
        for name, ours, theirs, tolerance in (
            ("gradient", other_gradient, gradient, 1e-6),
            ("summary", other_summary, summary, 1e-5),
            ("metrics", other_metrics, metrics, 1e-5),
            ("parameters", other_params, params, 1e-4),  # of 3e-2: Adam enlarges rounding of tiny gradients
        ):
            for (path, mine), expected in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
                where = f"{data}x{fsdp} {name} {jax.tree_util.keystr(path)}"
                np.testing.assert_allclose(mine, expected, atol=tolerance, rtol=1e-5, err_msg=where)
        print(f"{data}x{fsdp} equal")


if __name__ == "__main__":
    sys.exit(main())
