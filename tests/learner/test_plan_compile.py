"""Programs compiled for slices that are not here; needs the extra ``tpu``, and minutes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: `make plan` has it in .venv-plan"
    ),
]


def plan(name: str, *overrides: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "cluster", "plan", f"configs/plan/{name}.yaml", *overrides, "--json", "--no-search"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_preset_fits_and_its_numbers_agree() -> None:
    found = plan("qwen3-8b-v5e-4x4")
    assert found["fits"]
    memory = found["device_bytes"]
    assert memory["parameters"] == pytest.approx(4 * found["parameters"] / 16, rel=0.001)
    assert memory["moments"] == pytest.approx(2 * memory["parameters"], rel=0.001)
    assert memory["needed"] < memory["usable"]
    # Twice forward and once backward, every layer is gathered in bfloat16; its gradient is reduced at least once.
    layers = 2 * (found["parameters"] - 2 * 151936 * 4096)
    assert found["sent_bytes_per_device_by_axis"]["fsdp"] > 3 * layers * 15 / 16 * found["microbatches"]
    assert 0 < found["mfu"] <= found["mfu_all_overlapped"] < 0.75  # of four passes, three are the model's own


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_a_step_that_keeps_too_much_is_refused_by_the_compiler(remat) -> None:
    found = plan("qwen3-8b-v5e-4x4", f"learner.remat={remat}")
    assert not found["fits"]
    assert list(found["programs"]) == ["add"]
    assert found["programs"]["add"]["refused"]
    assert found["programs"]["add"]["peak_bytes"] > found["device_bytes"]["usable"]
    assert found["step_seconds"] is None


KERNEL = """
import sys
from learner.planning.chips import Topology
from learner.planning.libtpu import describe_devices, prepare

topology = Topology.parse(sys.argv[1])
prepare(topology)
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from learner.models.attention import Reach, attend_splash

mesh = Mesh(describe_devices(topology)[:1], ("x",))

def total(q, k, v, segments):
    return attend_splash(segments)(q, k, v, None, Reach())[0].astype(jnp.float32).sum()

def abstract(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

with jax.set_mesh(mesh):
    for head in (64, 96, 128):
        kv = abstract(1, 1024, 2, head)
        segments = abstract(1, 1024, dtype=jnp.int32)
        jax.jit(jax.grad(total, (0, 1, 2))).lower(abstract(1, 1024, 4, head), kv, kv, segments).compile()
        print(head)
"""


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_attention_kernel_compiles_for_narrow_heads(topology) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, topology],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == ["64", "96", "128"], done.stderr
