# ruff: noqa: E501 - the compiler writes long lines
"""Collectives read from a compiled program: the CPU compiler's of 8 simulated devices, and pieces of TPU programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from learner.planning.chips import PlanError
from learner.planning.collectives import Collective, axis_of, read_collectives, sent_by_axis

ROOT = Path(__file__).parent.parent.parent

COMPILED = """
import json
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from learner.planning.collectives import read_collectives, sent_by_axis

mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

def local(x_TH, w_LHF):
    def layer(x_TH, w_HF):
        whole_HF = jax.lax.all_gather(w_HF, "fsdp", axis=0, tiled=True)
        return jax.lax.psum(x_TH @ whole_HF @ whole_HF.T, "tensor"), None
    return jax.lax.scan(layer, x_TH, w_LHF)[0]

def f(x_TH, w_LHF):
    specs = (P("fsdp"), P(None, "fsdp", "tensor"))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("fsdp"))(x_TH, w_LHF)

hlo = jax.jit(f).lower(
    jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=jax.NamedSharding(mesh, P("fsdp"))),
    jax.ShapeDtypeStruct((5, 64, 48), jnp.float32, sharding=jax.NamedSharding(mesh, P(None, "fsdp", "tensor"))),
).compile().as_text()
found = read_collectives(hlo)
print(json.dumps([found, sent_by_axis(found, {"fsdp": 4, "tensor": 2})]))
"""


def test_a_loop_counts_as_often_as_it_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found, sent = json.loads(done.stdout)
    kinds = {(kind, size, tuple(group), times) for kind, size, group, times, _ in found}
    # Each device holds 24 of 48 channels and gathers all 64 x 24 of a layer; it sums its 8 x 64 of the output.
    assert kinds == {("all-gather", 64 * 24 * 4, (0, 2, 4, 6), 5), ("all-reduce", 8 * 64 * 4, (0, 1), 5)}
    assert sent == {"fsdp": 5 * 64 * 24 * 4 * 3 / 4, "tensor": 5 * 8 * 64 * 4 * 2 / 2}


TPU = """HloModule jit_add

%fused_computation.1 (param_0: bf16[1,256,8,128]) -> bf16[1,4096,8,128] {
  %param_0 = bf16[1,256,8,128]{3,2,1,0} parameter(0)
  ROOT %all-gather.1 = bf16[1,4096,8,128]{1,3,2,0:T(8,128)(2,1)} all-gather(%param_0), channel_id=4, replica_groups={{0,1,2,3}}, dimensions={1}, frontend_attributes={chain_id="0"}
}

%async_collective_fusion.2 (param_0: bf16[1,256,8,128]) -> bf16[1,4096,8,128] {
  %param_0 = bf16[1,256,8,128]{3,2,1,0} parameter(0)
  ROOT %all-gather.2 = bf16[1,4096,8,128]{1,3,2,0:T(8,128)(2,1)S(1)} all-gather(%param_0), channel_id=4, replica_groups={{0,1,2,3}}, dimensions={1}, frontend_attributes={chain_id="0"}
}

%sum (a: bf16[], b: bf16[]) -> bf16[] {
  ROOT %add = bf16[] add(%a, %b)
}

%body (state: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %fusion.1 = bf16[1,4096,8,128]{1,3,2,0} fusion(%x), kind=kCustom, calls=%fused_computation.1
  %fusion.2 = bf16[1,4096,8,128]{1,3,2,0} fusion(%x), kind=kOutput, calls=%async_collective_fusion.2
  %all-reduce.3 = (bf16[8,4]{1,0}, /*index=1*/bf16[16]{0}) all-reduce(%a, %b), channel_id=1, replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%sum
  %reduce_scatter.4 = bf16[16]{0} reduce-scatter(%a), channel_id=1, replica_groups={{0,2},{1,3}}, dimensions={0}, to_apply=%sum
}

%condition (state: (s32[], bf16[8])) -> pred[] {
  %constant.9 = s32[]{:T(128)} constant(36), metadata={op_name="constant.8"}
  %constant.8 = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[]{:T(512)} compare(%counter, %constant.9), direction=LT, metadata={op_name="constant.8"}
}

ENTRY %main (p: bf16[8]) -> bf16[8] {
  %while.1 = (s32[], bf16[8]) while(%tuple), condition=%condition, body=%body
  %all-gather-start.5 = (bf16[4]{0}, bf16[16]{0}) all-gather-start(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  %all-reduce.6 = f32[]{:T(128)} all-reduce(%a), channel_id=1, replica_groups=mesh['a'=2,'b'=2] {'b'}, to_apply=%sum
  %all-reduce.7 = f32[]{:T(128)} all-reduce(%a), channel_id=1, replica_groups=mesh['a'=2,'b'=2] {'a','b'}, to_apply=%sum
  %all-reduce.8 = f32[2]{0} all-reduce(%a), channel_id=1, replica_groups=mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'b'}, to_apply=%sum
  %all-gather-done.5 = bf16[16]{0} all-gather-done(%all-gather-start.5)
}
"""


def test_tpu_programs_are_understood() -> None:
    assert sorted(read_collectives(TPU)) == [
        Collective("all-gather", 2 * 16, (0, 1, 2, 3), 1, True),
        Collective("all-gather", 2 * 4096 * 8 * 128, (0, 1, 2, 3), 36, True),  # one chain, however many steps
        Collective("all-reduce", 4, (0, 1), 1, False),
        Collective("all-reduce", 4, (0, 1, 2, 3), 1, False),
        Collective("all-reduce", 8, (0, 2, 4), 1, False),
        Collective("all-reduce", 2 * (32 + 16), (0, 2), 36, False),
        Collective("reduce-scatter", 2 * 16 * 2, (0, 2), 36, False),
    ]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("compare(%counter, %constant.9)", "compare(%counter, %limit)", "a loop whose number of turns is not clear"),
        ("replica_groups=[1,4]<=[4]", "replica_groups=?", "a collective whose groups are not clear"),
    ],
)
def test_what_is_not_understood_is_said(before, after, said) -> None:
    assert before in TPU
    with pytest.raises(PlanError, match=said):
        read_collectives(TPU.replace(before, after))


def test_bytes_are_those_of_rings() -> None:
    def sent(kind: str, devices: int) -> float:
        return Collective(kind, 1200, tuple(range(devices)), 10, False).sent

    assert sent("all-gather", 4) == sent("reduce-scatter", 4) == sent("all-to-all", 4) == 10 * 900
    assert sent("all-reduce", 4) == 10 * 1800
    assert sent("collective-permute", 2) == 10 * 1200


def test_the_axis_of_a_group_is_where_its_devices_differ() -> None:
    mesh = {"data": 2, "fsdp": 4, "tensor": 2}
    assert axis_of((0, 1), mesh) == "tensor"
    assert axis_of((0, 2, 4, 6), mesh) == "fsdp"
    assert axis_of((0, 8), mesh) == "data"
    assert axis_of(range(16), mesh) == "data×fsdp×tensor"
    found = [Collective("all-gather", 16, (0, 1), 1, True), Collective("all-gather", 32, (2, 3), 3, False)]
    assert sent_by_axis(found, mesh) == {"tensor": 8 + 48}
