"""``headrace plan``: what it says of a plan, and of what cannot be planned."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cluster.loading import load_config
from cluster.planning import summary, table
from learner.models.config import read_config
from learner.models.lora import Lora
from learner.planning import libtpu
from learner.planning.chips import GIB, PlanError, Topology
from learner.planning.collectives import Collective
from learner.planning.fitting import Largest
from learner.planning.plan import Plan
from learner.planning.programs import ADD, SCORE, UPDATE, Program, Resident
from learner.planning.roofline import Roofline
from learner.planning.setup import Setup
from learner.planning.work import MeshShape

ROOT = Path(__file__).parent.parent.parent
PRESETS = sorted((ROOT / "configs" / "plan").glob("*.yaml"))


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster", "plan", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "plan.topology=null: name the TPU slice to plan for, such as plan.topology=v5p:4x4x4"),
        (("plan.topology=v5p-128",), "expected CHIP:SHAPE such as v5p:4x4x4"),
        (("plan.row_length=100",), "plan.row_length=100: expected a multiple of 128"),
    ],
)
def test_what_cannot_be_planned_says_why_in_one_line(overrides, said):
    done = headrace("configs/quickstart.yaml", *overrides)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed here")
def test_without_the_compiler_it_says_which_extra_to_install():
    done = headrace("configs/plan/qwen3-8b-v5e-4x4.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "headrace: error: headrace plan needs libtpu, the TPU compiler, which is not installed: "
        "pip install 'headrace[tpu]', or run `make plan`\n"
    )


def test_jax_that_already_computes_elsewhere_cannot_plan(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "environ", {"JAX_PLATFORMS": "cuda"})
    assert "jax" in sys.modules
    with pytest.raises(PlanError, match="a plan is made in a process of its own"):
        libtpu.prepare(Topology.parse("v5e:4x4"))


def test_there_is_a_preset_for_each_model_and_slice():
    assert [path.stem for path in PRESETS] == [
        "llama-3-70b-v5p-4x4x4",
        "llama-3-70b-v6e-16x16",
        "qwen3-8b-v5e-4x4",
        "qwen3-8b-v6e-4x4",
    ]


def preset(path: Path) -> Setup:
    config = load_config(path)
    assert config.plan.topology and config.model.path
    return Setup(
        topology=Topology.parse(config.plan.topology),
        model=read_config(ROOT / config.model.path.relative_to(Path.cwd())),
        mesh=MeshShape(**config.learner.mesh.model_dump()),
        remat=config.learner.remat,
        dtype=config.learner.precision,
        rows=config.learner.rows_per_microbatch,
        length=config.learner.row_lengths[-1],
        microbatches=config.plan.microbatches,
    )


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_goes_together(path):
    preset(path).check()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"mesh": MeshShape(1, 8, 1)},
            "learner.mesh=1x8x1 (data x fsdp x tensor) has 8 devices and v5e:4x4 has 16; set learner.mesh.fsdp=16",
        ),
        (
            {"rows": 20},
            "a micro-batch of 20 rows of 4096 tokens cannot be spread over data x fsdp = 16 devices; use a multiple of "
            "16 rows, which is 4096 tokens per chip",
        ),
        ({"length": 200}, "plan.row_length=200: attention on TPUs takes multiples of 128"),
        ({"length": 65536}, "plan.row_length=65536: the model is meant for 40960 tokens"),
    ],
)
def test_parts_that_do_not_go_together_are_named(changed, said):
    setup = preset(ROOT / "configs" / "plan" / "qwen3-8b-v5e-4x4.yaml")._replace(**changed)
    with pytest.raises(PlanError) as error:
        setup.check()
    assert str(error.value) == said


@pytest.fixture
def plan() -> Plan:
    """Round numbers: 2 GiB of parameters, 8 GiB at the peak of the backward pass, 2 s and 0.5 s of rooflines."""
    setup = preset(ROOT / "configs" / "plan" / "qwen3-8b-v5e-4x4.yaml")
    gathered = Collective("all-gather", 16 * GIB, tuple(range(16)), 2, False)
    return Plan(
        setup=setup,
        resident=Resident(2 * GIB, 4 * GIB, 2 * GIB, 2 * GIB, 0),
        programs={
            ADD: Program(8.0 * GIB, False, [gathered], 60.0),
            UPDATE: Program(8.5 * GIB, False, [], 10.0),
            SCORE: Program(5.0 * GIB, False, [gathered._replace(times=1)], 30.0),
        },
        rooflines={
            ADD: Roofline(1.5, 0.2, 0.0, 0.5),
            UPDATE: Roofline(0.0, 0.5, 0.0, 0.0),
            SCORE: Roofline(0.5, 0.1, 0.0, 0.1),
        },
        useful_flops=4 * 16 * 197e12,
        flops=5 * 16 * 197e12,
        largest=Largest(1, 14.0 * GIB, 2, 19.0 * GIB, True),
    )


def test_a_plan_adds_up(plan):
    assert plan.needed == {ADD: 14.0 * GIB, UPDATE: 10.5 * GIB, SCORE: 11.0 * GIB}
    assert plan.temporaries == 4.0 * GIB
    assert plan.fits
    assert plan.tokens == 4 * 16 * 4096
    assert plan.seconds == 4 * 2.0 + 0.5
    assert plan.best_seconds == 4 * 1.5 + 0.5
    assert plan.mfu(8.0) == pytest.approx(0.5)
    assert plan.sent == {"fsdp": 4 * 2 * 15 * GIB}  # four micro-batches; the log-probabilities are no part of this step


def test_a_step_whose_objective_asks_other_policies_takes_longer(plan):
    asked = plan._replace(setup=plan.setup._replace(anchors=("proximal", "reference")))
    assert asked.seconds == pytest.approx(plan.seconds + 4 * 2 * 0.6)
    assert asked.sent == {"fsdp": plan.sent["fsdp"] + 4 * 2 * 15 * GIB}


def test_what_needs_more_than_a_device_has_does_not_fit(plan):
    limit = plan.setup.limit
    at = plan.programs | {ADD: plan.programs[ADD]._replace(peak=limit - 6 * GIB)}
    assert plan._replace(programs=at).fits
    beyond = plan.programs | {ADD: plan.programs[ADD]._replace(peak=limit - 6 * GIB + 1)}
    assert not plan._replace(programs=beyond).fits


def shown(plan: Plan) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(table(plan))
    return " ".join(out.getvalue().replace("│", " ").split())


def test_the_table_says_what_fits_and_what_does_not(plan):
    text = shown(plan)
    assert "qwen3, 8.19 B parameters" in text
    assert "14.00 of 15.75 per device: fits, 1.75 to spare" in text
    assert "8.50 as compiled, 6.50 if all collectives overlap" in text
    assert "4,096 tokens per chip (14.00 GiB, compiled); 8,192 would take 19.00 GiB, as compiled" in text
    adapted = plan._replace(setup=plan.setup._replace(lora=Lora(16, 32.0, ("q_proj", "v_proj"))))
    assert "qwen3, 8.19 B parameters, frozen; adapters of rank 16, 7.67 M parameters" in shown(adapted)
    refused = {ADD: Program(20.0 * GIB, True, [], 60.0)}
    text = shown(plan._replace(programs=refused, rooflines={}, largest=Largest(0, 0.0, 1, 26.0 * GIB, True)))
    assert "26.00 of 15.75 per device: 10.25 too much" in text
    assert "26.00 refused by the compiler" in text
    assert "step, s at least" not in text
    assert "none that was tried: 4,096 would take 26.00 GiB, as compiled" in text


def test_json_holds_the_same(plan):
    found = json.loads(json.dumps(summary(plan)))
    assert found["fits"] is True
    assert found["device_bytes"]["needed"] == 14.0 * GIB
    assert found["tokens_per_chip"] == 4096
    assert found["tokens_per_second"] == pytest.approx(4 * 16 * 4096 / 8.5)
    assert found["largest"]["next_tokens_per_chip"] == 8192
    assert found["programs"]["score"]["roofline"] == {"compute": 0.5, "memory": 0.1, "overlapped": 0.0, "exposed": 0.1}
    assert found["programs"]["update"]["bound_by"] == "memory"
