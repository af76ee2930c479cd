"""The ``learner.agreement`` section: when sampler and learner are compared, and what becomes of a disagreement."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cluster.section import Section


class AgreementConfig(Section):
    """The agreement monitor, which scores tokens with the very weights that sampled them."""

    every_steps: Annotated[int, Field(ge=0)] = 20
    """Steps from one check to the next; 0 checks nothing. A check costs a forward pass of about one batch."""
    max_mean: Annotated[float, Field(gt=0)] | None = None
    """Largest mean difference of a token's log-probabilities, in nats, without an alarm; null takes 0.001 if sampler
    and learner are ``float32`` on CPUs, and 0.03 otherwise."""
    max_outside_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Largest share of tokens with a ratio of probabilities outside [0.9, 1.1] without an alarm; null takes 0.001 if
    sampler and learner are ``float32`` on CPUs, and 0.1 otherwise."""
    on_alarm: Literal["warn", "stop"] = "warn"
    """What an alarm does: say so, or also save the run and end it with exit status 1."""
