"""Chips, rooflines, operations and memory: what a plan computes by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from learner.mesh import make_mesh
from learner.models.config import ModelConfig, read_config
from learner.models.lora import TARGETS, Lora
from learner.objectives import cross_entropy
from learner.packing import Ladder, empty_rows
from learner.planning.chips import CHIPS, GIB, PlanError, Topology
from learner.planning.collectives import Collective
from learner.planning.fitting import find_largest
from learner.planning.libtpu import bytes_wanted
from learner.planning.programs import ADD, SCORE, UPDATE, measure_resident
from learner.planning.roofline import group_bandwidth, roofline
from learner.planning.work import (
    MeshShape,
    adapter_weights,
    forward_pass,
    micro_batch_traffic,
    score_traffic,
    training_pass,
    update_traffic,
)
from learner.step import TrainStep

ROOT = Path(__file__).parent.parent.parent
V5E, V5P = Topology.parse("v5e:4x4"), Topology.parse("v5p:4x4x4")


@pytest.mark.parametrize(
    ("name", "chips", "devices", "wraps", "runtime"),
    [
        ("v5e:4x4", 16, 16, (False, False), "v5litepod-16"),
        ("v5e:16x16", 256, 256, (True, True), "v5litepod-256"),
        ("v5p:4x4x4", 64, 64, (True, True, True), "v5p-128"),
        ("v5p:2x2x4", 16, 16, (False, False, False), "v5p-32"),
        ("v6e:16x16", 256, 256, (True, True), "v6e-256"),
        ("tpu7x:4x4x8", 128, 256, (True, True, True), "tpu7x-256"),
    ],
)
def test_a_topology_says_how_it_is_wired(name, chips, devices, wraps, runtime) -> None:
    topology = Topology.parse(name)
    assert (topology.chips, topology.devices, topology.wraps) == (chips, devices, wraps)
    assert (str(topology), topology.accelerator_type) == (name, runtime)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5p-128", "plan.topology=v5p-128: expected CHIP:SHAPE such as v5p:4x4x4"),
        ("v7x:4x4x4", "one of the chips v5e, v5p, v6e, tpu7x"),
        ("v5e:4x4x4", "plan.topology=v5e:4x4x4: v5e is wired in 2 axes; write it as v5e:4x4"),
        ("v5p:4x0x4", "v5p is wired in 3 axes"),
    ],
)
def test_a_topology_that_cannot_be_says_why(name, said) -> None:
    with pytest.raises(PlanError) as error:
        Topology.parse(name)
    assert said in str(error.value)


def test_a_chip_has_more_memory_than_programs_may_use_and_links_share_its_bandwidth() -> None:
    for chip in CHIPS.values():
        assert 0.95 * chip.hbm_gib < chip.usable_gib * chip.devices <= 1.01 * chip.hbm_gib
        assert chip.link_bandwidth * 2 * chip.axes == chip.ici_bandwidth
    assert CHIPS["v5e"].link_bandwidth == 50e9
    assert CHIPS["v5p"].link_bandwidth == 100e9


def test_a_group_sends_over_the_links_of_the_axes_it_spans() -> None:
    line, square = np.array([[x, 0, 0] for x in range(4)]), np.array([[x, y, 0] for x in range(4) for y in range(4)])
    assert group_bandwidth(V5E, line) == 50e9  # a chip at the end of a line has one link
    assert group_bandwidth(V5E, square) == 2 * 50e9
    assert group_bandwidth(V5P, line) == 2 * 100e9  # a ring
    assert group_bandwidth(V5P, line[:2]) == 100e9  # a part of a ring
    assert group_bandwidth(V5P, square) == 4 * 100e9
    assert group_bandwidth(Topology.parse("tpu7x:4x4x4"), np.zeros((2, 3), int)) == 600e9  # one chip's two devices


def test_a_roofline_is_the_slowest_resource_and_what_nothing_hides() -> None:
    places_D3 = np.array([[x, y, 0] for x in range(4) for y in range(4)])
    everyone = tuple(range(16))
    hidden = Collective("all-gather", 16 * 10**9, everyone, 10, True)  # 150 GB at 100 GB/s
    exposed = Collective("all-reduce", 16 * 10**9, everyone, 1, False)  # 30 GB
    line = roofline(V5E, places_D3, flops=16 * 197e12, traffic=2 * 819e9, collectives=[hidden, exposed])
    assert line == pytest.approx((1.0, 2.0, 1.5, 0.3))
    assert line.seconds == pytest.approx(2.3)
    assert line.best_seconds == pytest.approx(2.0)
    assert line.bound == "memory"


def test_two_devices_of_a_chip_share_its_rates() -> None:
    topology = Topology.parse("tpu7x:4x4x4")
    line = roofline(topology, np.zeros((128, 3)), flops=64 * 2307e12, traffic=7380e9 / 2, collectives=[])
    assert (line.compute, line.memory) == pytest.approx((1.0, 1.0))


def test_parameters_of_the_presets_are_those_published() -> None:
    assert read_config(ROOT / "configs" / "models" / "qwen3-8b").parameter_count == 8_190_735_360
    assert read_config(ROOT / "configs" / "models" / "llama-3-70b").parameter_count == 70_553_706_496


@pytest.fixture(scope="module")
def shallow(model) -> ModelConfig:
    """One layer, wide enough that matrix products are nearly all there is; a scan of one turn is counted right."""
    return dataclasses.replace(
        model,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
        max_position_embeddings=256,
    )


@pytest.mark.parametrize("remat", ["none", "full"])
def test_operations_are_those_the_compiler_counts(shallow, optimizer, remat) -> None:
    rows, length = 2, 128
    mesh = make_mesh(shallow, data=1, fsdp=1, devices=jax.devices()[:1])
    train = TrainStep(shallow, mesh, Ladder(((rows, length),)), optimizer, cross_entropy, temperature=1.0, remat=remat)
    lowered = train.lower((rows, length))
    scores, both = (program.compile().cost_analysis()["flops"] for program in (lowered.score, lowered.add))
    # The CPU's attention computes two blocks, 64 queries with 64 and with 128 keys, and in its backward pass nothing
    # twice.
    attention = 4 * rows * 4 * 64 * (64 * 64 + 64 * 128)
    matrices = 2 * rows * length * (256 * (12 * 64 + 3 * 512) + 512 * 256)
    assert scores == pytest.approx(matrices + attention, rel=0.06)
    forward, training = forward_pass(shallow, rows, length), training_pass(shallow, rows, length, remat)
    useful_attention = 4 * rows * 4 * 64 * length * (length + 1) / 2
    assert forward.useful_flops == matrices + useful_attention
    assert training.useful_flops == 3 * forward.useful_flops
    # All logits fit one chunk here, so they are not computed again, as they are at scale.
    head = 2 * rows * length * 512 * 256
    again = {"none": 0, "full": 1}[remat]
    assert both == pytest.approx((3 + again) * (matrices - head + attention) + 3 * head, rel=0.06)
    kernel = 4 * rows * 4 * 64 * length * length  # one block
    assert training.flops == pytest.approx(
        (3 + again) * (matrices - head) + 4 * head + (1 + again + 3.5) * min(kernel, 4 * rows * 4 * 64 * 128 * 128)
    )


def test_a_window_bounds_the_pairs_that_attention_compares(shallow) -> None:
    sliding = dataclasses.replace(shallow, sliding_window=64, sliding_layers=(True,))
    pairs = [min(t + 1, 64) for t in range(1024)]
    full, short = (forward_pass(config, 3, 1024).useful_flops for config in (shallow, sliding))
    per_pair = 4 * 3 * 4 * 64
    assert full - short == per_pair * (sum(range(1, 1025)) - sum(pairs))


def test_traffic_grows_with_what_moves(shallow) -> None:
    one = MeshShape(1, 1, 1)
    weights = 256 * (12 * 64 + 3 * 512) + 2 * 512 * 256
    small, large = (micro_batch_traffic(shallow, rows, 128, one, "none") for rows in (1, 2))
    of_tokens = large - small
    assert small - of_tokens == pytest.approx(weights * (2 * (4 + 4) + 4 + 8))
    per_token = 2 * (4 * 256 + 12 * 64 + 3 * 512)
    assert of_tokens == pytest.approx(128 * (3 * per_token + 3 * 8 * 512))
    assert micro_batch_traffic(shallow, 1, 128, one, "full") == pytest.approx(small + 8 * weights + 128 * per_token)
    assert score_traffic(shallow, 1, 128, one) == pytest.approx(8 * weights + 128 * (per_token + 8 * 512))
    assert update_traffic(shallow, MeshShape(1, 4, 2)) == 32 * shallow.parameter_count / 8


def test_what_stays_on_a_device_is_its_part(model, optimizer) -> None:
    mesh = make_mesh(model, data=1, fsdp=1, devices=jax.devices()[:1])
    train = TrainStep(model, mesh, Ladder(((4, 32),)), optimizer, cross_entropy, temperature=1.0)
    resident = measure_resident(train, has_reference=True)
    parameters = 4 * model.parameter_count
    assert (resident.parameters, resident.gradients, resident.published, resident.reference) == (parameters,) * 4
    assert 2 * parameters <= resident.moments < 2 * parameters + 64  # and the counts of steps
    assert resident.beside(ADD) == resident.beside(SCORE) == resident.moments + 2 * parameters
    assert resident.beside(UPDATE) == 2 * parameters
    assert resident.arguments(ADD) == 2 * resident.arguments(SCORE) == 2 * parameters
    assert resident.arguments(UPDATE) == 2 * parameters + resident.moments
    assert measure_resident(train, has_reference=False).reference == 0


def test_operations_beside_a_frozen_model_are_those_the_compiler_counts(shallow, optimizer) -> None:
    rows, length, lora = 2, 128, Lora(16, 32.0, tuple(TARGETS))
    mesh = make_mesh(shallow, data=1, fsdp=1, devices=jax.devices()[:1])
    train = TrainStep(shallow, mesh, Ladder(((rows, length),)), optimizer, cross_entropy, temperature=1.0, lora=lora)
    lowered = train.lower((rows, length))
    scores, both = (program.compile().cost_analysis()["flops"] for program in (lowered.score, lowered.add))
    # For q, k, v, o, gate, up and down: inputs and outputs.
    entries = 16 * (2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 512))
    assert adapter_weights(shallow, lora) == entries
    attention = 4 * rows * 4 * 64 * (64 * 64 + 64 * 128)
    matrices, adapters = 2 * rows * length * 256 * (12 * 64 + 3 * 512), 2 * rows * length * entries
    head = 2 * rows * length * 512 * 256
    assert scores == pytest.approx(matrices + adapters + head + attention, rel=0.06)
    # Below the only layer nothing is trained, so that nobody asks for the gradient of what q, k and v multiply.
    unasked = 2 * rows * length * 256 * (4 + 2 + 2) * 64
    assert both == pytest.approx(2 * (matrices + head) + 3 * (adapters + attention) - unasked, rel=0.03)
    useful_attention = 4 * rows * 4 * 64 * length * (length + 1) / 2
    kernel = 4 * rows * 4 * 64 * 128 * 128
    for remat, again in (("none", 0), ("full", 1)):
        found = training_pass(shallow, rows, length, remat, lora)
        assert found.useful_flops == 2 * (matrices + head) + 3 * (adapters + useful_attention)
        assert found.flops == pytest.approx(
            (2 + again) * matrices + (3 + again) * adapters + 3 * head + (1 + again + 3.5) * kernel
        )


def test_beside_adapters_a_frozen_model_stays_on_a_device(model, optimizer) -> None:
    mesh, lora = make_mesh(model, data=1, fsdp=1, devices=jax.devices()[:1]), Lora(2, 4.0, ("q_proj", "down_proj"))
    train = TrainStep(model, mesh, Ladder(((4, 32),)), optimizer, cross_entropy, temperature=1.0, lora=lora)
    resident = measure_resident(train, has_reference=True)
    frozen, adapters = 4 * model.parameter_count, 4 * adapter_weights(model, lora)
    assert adapters == 4 * 2 * 2 * ((16 + 32) + (24 + 16))
    assert (resident.parameters, resident.gradients, resident.reference) == (adapters,) * 3
    assert (resident.frozen, resident.published) == (frozen, frozen)
    assert 2 * adapters <= resident.moments < 2 * adapters + 64
    for name in (ADD, UPDATE, SCORE):
        beside_or_given = resident.arguments(name) + resident.beside(name) + (adapters if name == SCORE else 0)
        assert beside_or_given == sum(resident), name
    assert resident.arguments(UPDATE) == 2 * adapters + resident.moments
    assert update_traffic(model, MeshShape(1, 1, 1), lora) == 8 * adapters
    one = MeshShape(1, 1, 1)
    assert micro_batch_traffic(model, 1, 32, one, "none", lora) < micro_batch_traffic(model, 1, 32, one, "none")


def test_lowered_programs_are_those_of_a_step(model, optimizer, params) -> None:
    mesh = make_mesh(model, data=1, fsdp=1, devices=jax.devices()[:1])
    train = TrainStep(model, mesh, Ladder(((4, 32),)), optimizer, cross_entropy, temperature=1.0)
    score = train.lower((4, 32)).score.compile()
    rows = train.put(empty_rows((4, 32)))
    np.testing.assert_array_equal(score(nnx.State({}), params, rows).logprob, train.logprobs(params, rows).logprob)


@pytest.mark.parametrize(
    ("first", "limit", "compiled", "largest"),
    [
        (1, 15, [], (0, 0, 1, 16, True)),
        (1, 17, [2], (1, 16, 2, 20, True)),
        (1, 21, [2], (2, 20, 4, 28, False)),
        (1, 36, [4], (4, 28, 8, 44, False)),
        (1, 140, [16, 32], (32, 140, 64, 268, False)),
        (4, 20, [2], (2, 20, 4, 28, True)),
        (4, 13, [2, 1], (0, 0, 1, 16, True)),
    ],
)
def test_the_largest_that_fits_is_found_with_few_compilations(first, limit, compiled, largest) -> None:
    tried = []

    def measure(rows: int) -> float:
        tried.append(rows)
        return 12 + 4 * rows

    found = find_largest(measure, first_rows=first, first_bytes=12 + 4 * first, fixed_bytes=10, limit_bytes=limit)
    assert (tried, found) == (compiled, largest)


def test_the_compilers_refusal_names_what_it_wants() -> None:
    whole = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.63G of 15.75G hbm. Exceeded by 4.88G."
    assert bytes_wanted(whole, arguments=GIB) == 20.63 * GIB
    part = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (18.56G) exceeds "
        "available HBM (15.75G)."
    )
    assert bytes_wanted(part, arguments=2 * GIB) == pytest.approx(20.56 * GIB)
    assert bytes_wanted("RESOURCE_EXHAUSTED: scoped vmem", arguments=0) is None
