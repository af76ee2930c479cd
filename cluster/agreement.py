"""From the ``learner.agreement`` section to the monitor of the learner."""

from __future__ import annotations

import jax

from cluster.config import Config
from cluster.sampler_names import sampler_name
from learner.agreement import EXACT, ROUNDED, AgreementMonitor, Limits
from learner.step import TrainStep


def make_agreement(config: Config, step: TrainStep) -> AgreementMonitor | None:
    """What compares samplers with the learner; None if nothing does."""
    settings = config.learner.agreement
    if not settings.every_steps:
        return None
    return AgreementMonitor(
        step,
        limits(config, jax.default_backend()),
        every_steps=settings.every_steps,
        max_staleness=config.buffer.max_staleness,
        sampler_name=sampler_name,
        keeps_keys=config.sampler.on_update == "continue",
        on_alarm=settings.on_alarm,
    )


def limits(config: Config, backend: str) -> Limits:
    """Those of the configuration; where it has none, those that go with how both sides compute.

    Args:
        config: of the run.
        backend: JAX's, of the learner: only on a ``cpu`` are products of float32 not rounded by default.
    """
    settings, sampler = config.learner.agreement, config.sampler
    is_exact = (
        backend == "cpu"
        and config.learner.precision == sampler.precision == "float32"
        and sampler.kind != "sglang"  # whose servers have a precision of their own
    )
    chosen = EXACT if is_exact else ROUNDED
    if settings.max_mean is not None:
        chosen = chosen._replace(mean=settings.max_mean)
    if settings.max_outside_fraction is not None:
        chosen = chosen._replace(outside_fraction=settings.max_outside_fraction)
    return chosen
