"""Run by test_mesh in a process of its own: eight simulated devices against one.

``python tests/learner/sharded.py [NAME ...]`` makes the comparisons of those names, or all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from learner.critic import Critic
from learner.mesh import make_mesh
from learner.models.attention import Reach, attend_packed, attend_splash
from learner.models.config import ModelConfig
from learner.models.decoder import Remat
from learner.models.lora import TARGETS, Lora
from learner.models.value_head import ValueHead, with_value_head
from learner.models.weights import initial_adapters, initial_params
from learner.objectives import policy_objective, ppo_clip, sequence_mean_token_mean, vtrace
from learner.optimizer import make_optimizer
from learner.packing import Example, Ladder, Rows, pack
from learner.recipe import spread
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
    tie_word_embeddings=False,
)
GEMMA = replace(
    MODEL,
    model_type="gemma3_text",
    hidden_act="gelu_pytorch_tanh",
    num_hidden_layers=3,
    sliding_layers=(True, True, False),
    sliding_window=6,
    rope_local_base_freq=1000.0,
    final_logit_softcapping=20.0,
    tie_word_embeddings=True,
)
QWEN2 = replace(MODEL, model_type="qwen2")
LORA = Lora(rank=3, alpha=6.0, targets=tuple(TARGETS))
PPO = partial(
    policy_objective, loss=ppo_clip, aggregation=sequence_mean_token_mean(), entropy_bonus=0.01, entropy_cap=4.0
)
VALUED = partial(PPO, value_weight=0.5)
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
        tokens = rng.integers(0, 24, size, dtype=np.int32)
        advantages = rng.normal(size=size).astype(np.float32)
        runs = int(np.count_nonzero(mask[1:] & ~mask[:-1]))
        rewards = spread(rng.normal(size=runs).astype(np.float32), mask) if runs else np.zeros(size, np.float32)
        made.append(
            Example(tokens, mask, logprobs, np.zeros(size, np.int32), advantages, rewards=rewards, is_cut=size % 2 == 0)
        )
    return made


def with_some_head(params: nnx.State) -> nnx.State:
    """Beside parameters of ``MODEL``, a value head that is not zero any more."""
    rng = np.random.default_rng(2)
    zeros = nnx.split(ValueHead(MODEL))[1]
    return with_value_head(params, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape).astype(x.dtype)), zeros))


def judge(step: TrainStep, params: nnx.State, batch: list[Rows]) -> tuple[list[Rows], dict[str, float]]:
    """The batch with advantages by values, as the learner finds them."""
    critic = Critic(step.mesh, partial(vtrace, discount=0.9, decay=0.9, is_weighted=False), normalise=True)
    scores = [step.logprobs(params, rows) for rows in batch]
    return critic([rows._replace(proximal=s.logprob, values=s.value) for rows, s in zip(batch, scores, strict=True)])


def train(
    model: ModelConfig,
    data: int,
    fsdp: int,
    tensor: int,
    remat: Remat = "none",
    *,
    has_values: bool = False,
    lora: Lora | None = None,
):
    """Gradient and summary of the first batch, and the parameters, adapters merged, after five steps."""
    devices = jax.devices()[: data * fsdp * tensor]
    step = TrainStep(
        model,
        make_mesh(model, data=data, fsdp=fsdp, tensor=tensor, devices=devices),
        LADDER,
        OPTIMIZER,
        VALUED if has_values else PPO,
        temperature=0.9,
        remat=remat,
        value_gradient="trunk" if has_values else None,
        lora=lora,
    )
    params = initial_params(model, seed=1)
    if lora is not None:
        step.freeze(params)
        # Without this B is zero, and A has no gradient to compare.
        params = jax.tree.map(lambda leaf: leaf + 0.1, initial_adapters(model, lora, seed=1))
    state = step.initialise(with_some_head(params) if has_values else params)
    local = step.merged(state.params)["layers"]["attention"]["q_HND"][...].addressable_shards[0].data.shape
    assert local[1:3] == (model.hidden_size // fsdp, model.num_attention_heads // tensor), "weights are not split"
    if lora is not None:
        adapter = state.params["layers"]["attention"]["q_adapter"]
        halves = [adapter[half][...].addressable_shards[0].data.shape for half in ("in_HA", "out_AND")]
        assert halves[0][1] == model.hidden_size // fsdp and halves[1][2] == model.num_attention_heads // tensor
    batch = [step.put(rows) for rows in pack(examples(), LADDER)]
    metrics = []
    if has_values:
        batch, said = judge(step, state.params, batch)
        metrics.append({name: np.float32(number) for name, number in said.items()})
    first = jax.device_get(step.gradients(state.params, batch, 0))
    for _ in range(5):
        state, scalars = step(state, batch, 0)
        metrics.append(jax.device_get(scalars))
    return first, metrics, jax.device_get(step.merged(state.params))


def compare(name: str, found, reference) -> None:
    """Raise where two trainings differ by more than round-off."""
    (gradient, summary), metrics, params = reference
    (other_gradient, other_summary), other_metrics, other_params = found
    for what, ours, theirs, tolerance in (
        ("gradient", other_gradient, gradient, 5e-6),  # of up to 1: sums of hundreds of products in another order
        ("summary", other_summary, summary, 1e-5),
        ("metrics", other_metrics, metrics, 1e-5),
        ("parameters", other_params, params, 2e-4),  # of 5e-2: Adam enlarges rounding of tiny gradients
    ):
        for (path, mine), expected in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
            where = f"{name} {what} {jax.tree_util.keystr(path)}"
            np.testing.assert_allclose(mine, expected, atol=tolerance, rtol=1e-4, err_msg=where)
    print(f"{name} equal", flush=True)


def check_kernel() -> None:
    """Gradients of the kernel, taken outside ``shard_map`` over rows and heads, are those of plain attention."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(8, 128, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    segments = np.sort(rng.integers(0, 4, (8, 128)), axis=1).astype(np.int32)
    weight = rng.normal(size=q.shape).astype(np.float32)
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("rows", "tensor"))
    heads, rows = PartitionSpec("rows", None, "tensor"), PartitionSpec("rows")

    def loss(make, q, k, v, segments, weight):
        return jnp.sum(make(segments)(q, k, v, None, Reach(window=50))[0] * weight)

    def sharded(q, k, v):
        def local(*args):
            return jax.lax.psum(loss(partial(attend_splash, interpret=True), *args), ("rows", "tensor"))

        specs = (heads, heads, heads, rows, heads)
        total = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
        return total(q, k, v, segments, weight)

    expected = jax.jit(jax.value_and_grad(partial(loss, attend_packed), (0, 1, 2)))(q, k, v, segments, weight)
    found = jax.jit(jax.value_and_grad(sharded, (0, 1, 2)))(q, k, v)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-4, rtol=1e-5)
    print("kernel equal", flush=True)


PLAIN = partial(train, MODEL)
GEMMAS = partial(train, GEMMA)
ADAPTED = partial(train, MODEL, has_values=True, lora=LORA)
VALUES = partial(train, MODEL, has_values=True)
TRAININGS = {
    "8x1x1": (PLAIN, (8, 1, 1)),
    "4x2x1": (PLAIN, (4, 2, 1)),
    "2x4x1": (PLAIN, (2, 4, 1)),
    "2x2x2": (PLAIN, (2, 2, 2)),
    "dots 2x2x2": (PLAIN, (2, 2, 2, "dots")),
    "gemma 1x4x2 full": (GEMMAS, (1, 4, 2, "full")),
    "adapters 2x2x2": (ADAPTED, (2, 2, 2)),
    "qwen2 2x1x2": (partial(train, QWEN2), (2, 1, 2)),
    "values 2x2x2": (VALUES, (2, 2, 2)),
}
NAMES = ("kernel", *TRAININGS)


def main(names: Sequence[str]) -> None:
    """Make comparisons of meshes with one device; raises where they differ."""
    assert len(jax.devices()) == 8, jax.devices()
    references = {}
    for name in names or NAMES:
        if name == "kernel":
            check_kernel()
            continue
        training, mesh = TRAININGS[name]
        if training not in references:
            references[training] = training(1, 1, 1)
        compare(name, training(*mesh), references[training])


if __name__ == "__main__":
    main(sys.argv[1:])
