"""``headrace plan``: a configuration planned for a TPU slice, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from cluster.config import Config
from learner.planning.chips import GIB, PlanError, Topology
from learner.planning.libtpu import prepare

if TYPE_CHECKING:
    from rich.table import Table

    from learner.models.config import ModelConfig
    from learner.planning.plan import Plan

WIDTH = 110
"""Columns of a table that goes to a file or a pipe."""

_PROGRAMS = {"add": "micro-batch", "update": "update", "score": "log-probs"}


def plan(config: Config, *, as_json: bool, search: bool) -> int:
    """Plan and print; progress goes to standard error.

    Returns:
        The exit status: 0, also for a plan that says it does not fit.

    Raises:
        PlanError: no plan can be made.
        MeshError: the model cannot be split like this.
        ModelError: the model folder describes no model that we have.
    """
    if config.plan.topology is None:
        raise PlanError("plan.topology=null: name the TPU slice to plan for, such as plan.topology=v5p:4x4x4")
    topology = Topology.parse(config.plan.topology)
    prepare(topology)
    made = _make(config, topology, search=search)
    if as_json:
        print(json.dumps(summary(made), indent=2))
    else:
        from rich.console import Console

        width = None if sys.stdout.isatty() else WIDTH
        Console(highlight=False, width=width).print(table(made))
    return 0


def _make(config: Config, topology: Topology, *, search: bool) -> Plan:
    from cluster.adapters import make_lora
    from cluster.objective import make_anchors, make_objective, make_value_gradient
    from learner.optimizer import make_optimizer
    from learner.planning.plan import make_plan
    from learner.planning.setup import Setup
    from learner.planning.work import MeshShape

    learner = config.learner
    length = config.plan.row_length or learner.row_lengths[-1]
    rows = learner.rows_per_microbatch
    if config.plan.tokens_per_chip is not None:
        tokens = config.plan.tokens_per_chip * topology.chips
        if tokens % length:
            raise PlanError(
                f"plan.tokens_per_chip={config.plan.tokens_per_chip}: {tokens} tokens on {topology.chips} chips are no "
                f"whole rows of {length}; change one of them"
            )
        rows = tokens // length
    setup = Setup(
        topology=topology,
        model=_model(config),
        mesh=MeshShape(**learner.mesh.model_dump()),
        remat=learner.remat,
        dtype=learner.precision,
        rows=rows,
        length=length,
        microbatches=config.plan.microbatches,
        lora=make_lora(config.model.lora),
        anchors=make_anchors(config.objective),
        value_gradient=make_value_gradient(config.objective),
    )
    return make_plan(
        setup,
        make_optimizer(total_steps=learner.steps, **learner.optimizer.model_dump()),
        make_objective(config.objective),
        temperature=config.sampler.temperature,
        search=search,
        say=lambda text: print(f"headrace: {text} ...", file=sys.stderr, flush=True),
    )


def _model(config: Config) -> ModelConfig:
    """The model's shape; of a folder, ``config.json`` is enough."""
    from actors.tokenizers import write_character_tokenizer
    from learner.models.config import ModelConfig, read_config

    if config.model.path is not None:
        return read_config(config.model.path)
    assert config.model.architecture is not None
    with TemporaryDirectory() as folder:
        vocab_size = write_character_tokenizer(Path(folder))
    return ModelConfig(vocab_size=vocab_size, **config.model.architecture.model_dump())


def summary(plan: Plan) -> dict[str, Any]:
    """The plan as plain data: bytes, FLOP and seconds, per device where the name says so."""
    from learner.planning.work import adapter_weights

    setup, chip, largest = plan.setup, plan.setup.topology.chip, plan.largest
    tokens_per_row = setup.row_shards * setup.length / setup.topology.chips
    return {
        "topology": str(setup.topology),
        "chips": setup.topology.chips,
        "devices": setup.topology.devices,
        "model_type": setup.model.model_type,
        "parameters": setup.model.parameter_count,
        "adapter_parameters": adapter_weights(setup.model, setup.lora),
        "mesh": setup.mesh._asdict(),
        "remat": setup.remat,
        "precision": setup.dtype,
        "rows": setup.rows,
        "row_length": setup.length,
        "microbatches": setup.microbatches,
        "scored_by": list(setup.anchors),
        "tokens_per_chip": setup.rows * setup.length / setup.topology.chips,
        "tokens_per_step": plan.tokens,
        "chip": {
            "peak_bf16_flops": chip.peak_flops,
            "hbm_gib": chip.hbm_gib,
            "hbm_bytes_per_second": chip.hbm_bandwidth,
            "ici_bytes_per_second": chip.ici_bandwidth,
            "devices": chip.devices,
        },
        "device_bytes": {
            **plan.resident._asdict(),
            "temporaries": plan.temporaries,
            "needed": max(plan.needed.values()),
            "usable": setup.limit,
        },
        "fits": plan.fits,
        "programs": {
            name: {
                "refused": program.is_refused,
                "peak_bytes": program.peak,
                "needed_bytes": plan.needed[name],
                "compile_seconds": round(program.seconds, 1),
                "roofline": plan.rooflines[name]._asdict() if name in plan.rooflines else None,
                "bound_by": plan.rooflines[name].bound if name in plan.rooflines else None,
            }
            for name, program in plan.programs.items()
        },
        "step_flops": plan.flops,
        "step_useful_flops": plan.useful_flops,
        "sent_bytes_per_device_by_axis": plan.sent,
        "step_seconds": plan.seconds,
        "step_seconds_all_overlapped": plan.best_seconds,
        "tokens_per_second": plan.tokens / plan.seconds if plan.seconds else None,
        "mfu": plan.mfu(plan.seconds) if plan.seconds else None,
        "mfu_all_overlapped": plan.mfu(plan.best_seconds) if plan.best_seconds else None,
        "largest": None
        if largest is None
        else {
            "tokens_per_chip": largest.rows * tokens_per_row,
            "needed_bytes": largest.bytes,
            "next_tokens_per_chip": largest.next_rows * tokens_per_row,
            "next_needed_bytes": largest.next_bytes,
            "next_is_compiled": largest.is_next_compiled,
        },
    }


def table(plan: Plan) -> Table:
    """The plan as a table for people."""
    from rich.table import Table

    setup = plan.setup
    chip = setup.topology.chip
    shown = Table(title=_title(plan), show_header=False, title_justify="left")
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column()
    mesh = f"data {setup.mesh.data} x fsdp {setup.mesh.fsdp} x tensor {setup.mesh.tensor}"
    shown.add_row("slice", f"{setup.topology}, {setup.topology.chips} chips, {chip.peak_flops / 1e12:g} TFLOP/s each")
    shown.add_row("mesh", mesh + f", remat {setup.remat}, {setup.dtype}")
    per_chip = setup.rows * setup.length / setup.topology.chips
    shown.add_row(
        "step",
        f"{setup.microbatches} x {setup.rows} rows of {setup.length} tokens, {per_chip:,.0f} tokens per chip each",
    )
    shown.add_section()
    for name, value in {**plan.resident._asdict(), "temporaries": plan.temporaries}.items():
        if not value:
            continue  # there is no reference policy, or nothing frozen
        shown.add_row(f"{name}, GiB", f"{value / GIB:.2f}")
    shown.add_row("needed, GiB", _memory(plan))
    for name, needed in plan.needed.items():
        refused = "  refused by the compiler" if plan.programs[name].is_refused else ""
        shown.add_row(f"  during {_PROGRAMS[name]}", f"{needed / GIB:.2f}{refused}")
    shown.add_section()
    shown.add_row(
        "PFLOP per step", f"{plan.flops / 1e15:,.1f}, of which the model's own {plan.useful_flops / 1e15:,.1f}"
    )
    for axis, sent in plan.sent.items():
        shown.add_row(f"sent over {axis}, GiB", f"{sent / GIB:,.2f} per device and step")
    for name, line in plan.rooflines.items():
        shown.add_row(f"seconds, {_PROGRAMS[name]}", _times(line))
    if plan.seconds and plan.best_seconds:
        shown.add_section()
        compiled, best = plan.seconds, plan.best_seconds
        shown.add_row("step, s at least", f"{compiled:.2f} as compiled, {best:.2f} if all collectives overlap")
        shown.add_row("tokens/s at most", f"{plan.tokens / compiled:,.0f}, or {plan.tokens / best:,.0f}")
        shown.add_row("MFU at most", f"{plan.mfu(compiled):.0%}, or {plan.mfu(best):.0%}")
    if plan.largest is not None:
        shown.add_row("largest that fits", _largest(plan))
    return shown


def _title(plan: Plan) -> str:
    from learner.planning.work import adapter_weights

    model, lora = plan.setup.model, plan.setup.lora
    title = f"{model.model_type}, {_count(model.parameter_count)} parameters"
    if lora is None:
        return title
    return f"{title}, frozen; adapters of rank {lora.rank}, {_count(adapter_weights(model, lora))} parameters"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def _memory(plan: Plan) -> str:
    needed, limit = max(plan.needed.values()), plan.setup.limit
    verdict = f"fits, {(limit - needed) / GIB:.2f} to spare" if plan.fits else f"{(needed - limit) / GIB:.2f} too much"
    return f"{needed / GIB:.2f} of {limit / GIB:.2f} per device: {verdict}"


def _times(line: Any) -> str:
    return (
        f"compute {line.compute:.3f}, memory {line.memory:.3f}, collectives {line.overlapped:.3f} overlapped and "
        f"{line.exposed:.3f} exposed"
    )


def _largest(plan: Plan) -> str:
    largest, setup = plan.largest, plan.setup
    assert largest is not None
    each = setup.row_shards * setup.length / setup.topology.chips
    how = "as compiled" if largest.is_next_compiled else "by a line through what was compiled"
    beyond = f"{largest.next_rows * each:,.0f} would take {largest.next_bytes / GIB:.2f} GiB, {how}"
    if not largest.rows:
        return f"none that was tried: {beyond}"
    return f"{largest.rows * each:,.0f} tokens per chip ({largest.bytes / GIB:.2f} GiB, compiled); {beyond}"
