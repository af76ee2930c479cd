"""What is planned: a model, a slice, and how the one is trained on the other."""

from __future__ import annotations

import math
from typing import NamedTuple

from learner.models.config import ModelConfig
from learner.models.decoder import Remat
from learner.models.lora import Lora
from learner.models.value_head import ValueGradient
from learner.planning.chips import GIB, PlanError, Topology
from learner.planning.programs import ADD, SCORE, UPDATE
from learner.planning.work import MeshShape

_ROW_MULTIPLE = 128
"""Rows of the attention kernel are multiples of this long, see ``attention.attend_splash``."""


class Setup(NamedTuple):
    """What is planned.

    Attributes:
        topology: the slice.
        model: what is trained.
        mesh: how the devices are used; all of them are.
        remat: what the backward pass computes again.
        dtype: of matrix products and activations.
        rows: of a micro-batch.
        length: tokens of a row.
        microbatches: of a step.
        lora: adapters that are trained in place of the model; None: the model is.
        anchors: other policies that score every micro-batch before the step, see ``learner.learner``.
        value_gradient: of the model's value head, see ``learner.step``; None without one.
    """

    topology: Topology
    model: ModelConfig
    mesh: MeshShape
    remat: Remat
    dtype: str
    rows: int
    length: int
    microbatches: int
    lora: Lora | None = None
    anchors: tuple[str, ...] = ()
    value_gradient: ValueGradient | None = None

    @property
    def row_shards(self) -> int:
        """Groups of devices that the rows are spread over."""
        return self.mesh.data * self.mesh.fsdp

    @property
    def limit(self) -> float:
        """Bytes that a device has for programs and data."""
        return self.topology.chip.usable_gib * GIB

    @property
    def runs(self) -> dict[str, int]:
        """How often each program runs in a step."""
        return {ADD: self.microbatches, UPDATE: 1, SCORE: self.microbatches * len(self.anchors)}

    def check(self) -> None:
        """Raise ``PlanError`` where the parts do not go together."""
        devices, mesh = self.topology.devices, "x".join(map(str, self.mesh))
        if math.prod(self.mesh) != devices:
            others = self.mesh.data * self.mesh.tensor
            remedy = f"set learner.mesh.fsdp={devices // others}" if devices % others == 0 else "change it"
            raise PlanError(
                f"learner.mesh={mesh} (data x fsdp x tensor) has {math.prod(self.mesh)} devices and {self.topology} "
                f"has {devices}; {remedy}"
            )
        if self.rows < 1 or self.rows % self.row_shards:
            raise PlanError(
                f"a micro-batch of {self.rows} rows of {self.length} tokens cannot be spread over data x fsdp = "
                f"{self.row_shards} devices; use a multiple of {self.row_shards} rows, which is "
                f"{self.row_shards * self.length // self.topology.chips} tokens per chip"
            )
        if self.length % _ROW_MULTIPLE:
            raise PlanError(f"plan.row_length={self.length}: attention on TPUs takes multiples of {_ROW_MULTIPLE}")
        if self.length > self.model.max_position_embeddings:
            raise PlanError(
                f"plan.row_length={self.length}: the model is meant for {self.model.max_position_embeddings} tokens"
            )
