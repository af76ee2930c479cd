"""A plan: what the training step of a model takes on a slice, added up.

Memory and collectives are what the compiler made of the step; operations and memory traffic are counted by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from learner.mesh import make_mesh
from learner.models.attention import suitable_kernel
from learner.objectives import Objective
from learner.optimizer import Optimizer
from learner.packing import Ladder
from learner.planning.collectives import Collective, sent_by_axis
from learner.planning.fitting import Largest, find_largest
from learner.planning.libtpu import describe_devices
from learner.planning.programs import ADD, SCORE, UPDATE, Program, Resident, compile_program, measure_resident
from learner.planning.roofline import Roofline, roofline
from learner.planning.setup import Setup
from learner.planning.work import forward_pass, micro_batch_traffic, score_traffic, training_pass, update_traffic
from learner.step import TrainStep


class Plan(NamedTuple):
    """What a training step takes.

    Attributes:
        setup: what was planned.
        resident: bytes on a device of what stays there.
        programs: by name: ``add``, ``update`` and ``score``.
        rooflines: of each program that was not refused, by name.
        useful_flops: of forward and backward passes of one step, nothing that is done again, on all devices.
        flops: of what really runs in one step, on all devices.
        largest: the largest micro-batch that fits; None if it was not searched.
    """

    setup: Setup
    resident: Resident
    programs: dict[str, Program]
    rooflines: dict[str, Roofline]
    useful_flops: float
    flops: float
    largest: Largest | None

    @property
    def needed(self) -> dict[str, float]:
        """Bytes on a device while each program runs, with what lies beside it."""
        return {name: program.peak + self.resident.beside(name) for name, program in self.programs.items()}

    @property
    def fits(self) -> bool:
        """Whether every program fits a device."""
        refused = any(program.is_refused for program in self.programs.values())
        return not refused and max(self.needed.values()) <= self.setup.limit

    @property
    def temporaries(self) -> float:
        """Bytes on a device of activations and all else that forward and backward pass hold at their peak."""
        return self.programs[ADD].peak - self.resident.arguments(ADD)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.setup.rows * self.setup.length * self.setup.microbatches

    @property
    def seconds(self) -> float | None:
        """Of a step by its roofline, with collectives as compiled; None where a program of it was refused."""
        return self._seconds({name: line.seconds for name, line in self.rooflines.items()})

    @property
    def best_seconds(self) -> float | None:
        """The same if every collective overlapped with other work."""
        return self._seconds({name: line.best_seconds for name, line in self.rooflines.items()})

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that each device sends along each axis of the mesh in one step."""
        collectives: list[Collective] = []
        for name, program in self.programs.items():
            often = self.setup.runs[name]
            collectives += [found._replace(times=found.times * often) for found in program.collectives if often]
        return sent_by_axis(collectives, self.setup.mesh._asdict())

    def mfu(self, seconds: float) -> float:
        """Share of the slice's peak that the model's own operations take, if a step takes so long."""
        topology = self.setup.topology
        return self.useful_flops / (seconds * topology.chip.peak_flops * topology.chips)

    def _seconds(self, each: Mapping[str, float]) -> float | None:
        runs = self.setup.runs
        if runs.keys() != each.keys():
            return None
        return sum(often * each[name] for name, often in runs.items())


def make_plan(
    setup: Setup,
    optimizer: Optimizer,
    objective: Objective,
    *,
    temperature: float,
    search: bool,
    say: Callable[[str], None],
) -> Plan:
    """Compile a training step for a slice and add up what it takes. Call ``libtpu.prepare`` first.

    Args:
        setup: what is planned.
        optimizer: as in a run.
        objective: as in a run.
        temperature: of the sampler.
        search: also find the largest micro-batch that fits; compiles up to twice more.
        say: told before each compilation, which takes a minute or two.

    Raises:
        PlanError: the slice does not exist, or model, mesh and shapes do not go together.
        MeshError: the model cannot be split like this.
    """
    setup.check()
    mesh = make_mesh(setup.model, **setup.mesh._asdict(), devices=describe_devices(setup.topology))
    train = TrainStep(
        setup.model,
        mesh,
        Ladder(((setup.rows, setup.length),)),
        optimizer,
        objective,
        temperature=temperature,
        remat=setup.remat,
        dtype=setup.dtype,
        kernel=suitable_kernel("tpu", [setup.length]),
        value_gradient=setup.value_gradient,
        lora=setup.lora,
    )
    resident = measure_resident(train, has_reference="reference" in setup.anchors)
    programs = _compile_step(setup, train, mesh, resident, say)
    training = training_pass(setup.model, setup.rows, setup.length, setup.remat, setup.lora)
    scoring = forward_pass(setup.model, setup.rows, setup.length, setup.lora)
    return Plan(
        setup=setup,
        resident=resident,
        programs=programs,
        rooflines=_rooflines(setup, programs, mesh),
        useful_flops=setup.microbatches * training.useful_flops,
        flops=setup.runs[ADD] * training.flops + setup.runs[SCORE] * scoring.flops,
        largest=_search(setup, train, mesh, resident, programs[ADD], say) if search else None,
    )


def _compile_step(
    setup: Setup, train: TrainStep, mesh: Mesh, resident: Resident, say: Callable[[str], None]
) -> dict[str, Program]:
    """The programs of a step; those after one that was refused are left out."""
    what = {
        ADD: "forward and backward pass",
        UPDATE: "optimizer update",
        SCORE: "log-probabilities",
    }
    with jax.set_mesh(mesh):
        lowered = train.lower((setup.rows, setup.length))._asdict()
    programs: dict[str, Program] = {}
    for name, words in what.items():
        say(f"compiling for {setup.topology}: {words} of {setup.rows} x {setup.length} tokens")
        programs[name] = compile_program(lowered[name], mesh, resident.arguments(name))
        if programs[name].is_refused:
            break
    return programs


def _rooflines(setup: Setup, programs: Mapping[str, Program], mesh: Mesh) -> dict[str, Roofline]:
    shape = (setup.model, setup.rows, setup.length)
    training, scoring = training_pass(*shape, setup.remat, setup.lora), forward_pass(*shape, setup.lora)
    flops = {ADD: training.flops, UPDATE: 0.0, SCORE: scoring.flops}
    traffic = {
        ADD: micro_batch_traffic(*shape, setup.mesh, setup.remat, setup.lora),
        UPDATE: update_traffic(setup.model, setup.mesh, setup.lora),
        SCORE: score_traffic(*shape, setup.mesh),
    }
    places_D3 = np.array([device.coords for device in mesh.devices.flat])
    return {
        name: roofline(
            setup.topology,
            places_D3,
            flops=flops[name],
            traffic=traffic[name],
            collectives=program.collectives,
        )
        for name, program in programs.items()
        if not program.is_refused
    }


def _search(
    setup: Setup, train: TrainStep, mesh: Mesh, resident: Resident, first: Program, say: Callable[[str], None]
) -> Largest:
    def measure(rows: int) -> float:
        say(f"compiling the same for {rows * setup.row_shards} x {setup.length} tokens, to see whether they fit")
        with jax.set_mesh(mesh):
            lowered = train.lower((rows * setup.row_shards, setup.length)).add
        return compile_program(lowered, mesh, resident.arguments(ADD)).peak + resident.beside(ADD)

    return find_largest(
        measure,
        first_rows=setup.rows // setup.row_shards,
        first_bytes=first.peak + resident.beside(ADD),
        fixed_bytes=sum(resident),
        limit_bytes=setup.limit,
    )
