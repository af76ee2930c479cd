"""The programs of a training step, compiled for a slice: what they hold in its memory and send over its links.

They are those that a run executes (``TrainStep.lower``), on abstract arrays: nothing is allocated, nothing is run.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from learner.planning.chips import PlanError
from learner.planning.collectives import Collective, read_collectives
from learner.planning.libtpu import bytes_wanted
from learner.step import TrainStep

ADD, UPDATE, SCORE = "add", "update", "score"
"""Forward and backward pass of a micro-batch; the optimizer's update; log-probabilities of a micro-batch."""


class Resident(NamedTuple):
    """Bytes on a device of what a run keeps there, whatever it computes.

    Attributes:
        parameters: that are trained, float32.
        moments: of AdamW, float32.
        gradients: their sum over micro-batches, float32.
        published: the copy of the model, adapters merged, that is on its way to the samplers while the next step runs.
        reference: trained parameters of the reference policy; 0 without one.
        frozen: parameters of a model whose adapters are trained, float32.
    """

    parameters: int
    moments: int
    gradients: int
    published: int
    reference: int
    frozen: int = 0

    def arguments(self, program: str) -> int:
        """Bytes of what a program is given, but for the rows."""
        own = {ADD: self.gradients + self.frozen, UPDATE: self.gradients + self.moments, SCORE: self.frozen}
        return self.parameters + own[program]

    def beside(self, program: str) -> int:
        """Bytes of what lies there while a program runs that does not touch it."""
        other = {ADD: self.moments, UPDATE: self.frozen, SCORE: self.moments}
        return self.published + self.reference + other[program]


class Program(NamedTuple):
    """One compiled program.

    Attributes:
        peak: bytes on a device at most, arguments included; what the compiler asked for if it refused.
        is_refused: the compiler found that it does not fit the device's memory.
        collectives: what its devices send each other; empty if refused.
        seconds: that the compilation took on this machine.
    """

    peak: float
    is_refused: bool
    collectives: list[Collective]
    seconds: float


def measure_resident(train: TrainStep, *, has_reference: bool) -> Resident:
    """What a run of this step keeps on a device, of a reference policy too if it has one."""
    state = train.abstract_state
    parameters, frozen = _bytes(state.params), _bytes(train.abstract_base)
    return Resident(
        parameters,
        _bytes(state.moments),
        parameters,
        published=frozen or parameters,  # adapters are merged into a copy of the model
        reference=parameters if has_reference else 0,
        frozen=frozen,
    )


def compile_program(lowered: jax.stages.Lowered, mesh: Mesh, arguments: int) -> Program:
    """Compile a program for the mesh's devices; takes a minute or two for a large one.

    Args:
        lowered: the program.
        mesh: its devices.
        arguments: bytes of its arguments on a device.

    Raises:
        PlanError: the compiler refuses it, and not for want of memory.
    """
    started = time.monotonic()
    try:
        with jax.set_mesh(mesh):  # tells kernels for which chip they are
            compiled = lowered.compile()
    except JaxRuntimeError as error:
        message = " ".join(str(error).split())
        wanted = bytes_wanted(message, arguments)
        if wanted is None:
            raise PlanError(f"the TPU compiler refuses the program: {message[:400]}") from error
        return Program(wanted, True, [], time.monotonic() - started)
    analysis = compiled.memory_analysis()
    assert analysis is not None
    collectives = read_collectives(compiled.as_text() or "")
    return Program(analysis.peak_memory_in_bytes, False, collectives, time.monotonic() - started)


def _bytes(tree: Any) -> int:
    """Bytes of a tree of abstract arrays on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        size = leaf.dtype.itemsize
        for length in leaf.sharding.shard_shape(leaf.shape):
            size *= length
        total += size
    return total
