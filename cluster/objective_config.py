"""The section ``objective`` of the configuration: what the learner maximises, every field with its unit.

``cluster/objective.py`` makes functions of it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cluster.section import Count, Fraction, Section


class TruncationConfig(Section):
    """A truncated importance weight, for a loss that does not weigh by its own ratio to the behaviour policy."""

    level: Literal["token", "sequence"] = "token"
    """Whether the ratio is that of each token, or the product over the sequence."""
    cap: Annotated[float, Field(ge=1)] = 2.0
    """Highest weight."""


class BandConfig(Section):
    """Bounds of an importance ratio; what lies outside is left out of the policy loss."""

    low: Annotated[float, Field(gt=0, lt=1)]
    """Lowest ratio that is kept."""
    high: Annotated[float, Field(gt=1)]
    """Highest ratio that is kept."""


class ReferenceConfig(Section):
    """A penalty for leaving the policy that the run began with; costs a forward pass and a copy of what is trained."""

    weight: Annotated[float, Field(gt=0)]
    """Weight of the divergence, in nats per token, beside advantages of about 1."""
    divergence: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the divergence: ``k3`` is never negative; ``k1`` and ``k2`` share the unbiased gradient."""


class OverlongConfig(Section):
    """What becomes of trajectories that are too long."""

    treatment: Literal["keep", "mask", "penalty"] = "keep"
    """Train on them all the same, leave out those that were cut off, or subtract up to 1 from rewards near a limit."""
    limit: Count | None = None
    """Length in tokens from which ``penalty`` subtracts all of 1; null: ``sampler.context_length``."""
    buffer: Count | None = None
    """Tokens below the limit over which ``penalty`` rises from 0; it needs them."""


class ValueConfig(Section):
    """The value head of ``advantage: gae`` and ``vtrace``: a linear layer beside the policy, which starts at 0."""

    decay: Fraction = 0.95
    """λ: 0 trusts the value of the next state alone, 1 the rewards alone."""
    loss_weight: Annotated[float, Field(gt=0)] = 0.5
    """Weight of the value loss, half the squared error, beside the policy loss."""
    gradient: Literal["trunk", "head"] = "trunk"
    """How far the gradient of the value loss flows: into the decoder, too, because what foresees the next token says
    little about returns; or into the head alone, which leaves the policy as it is."""
    normalise: bool = True
    """Whether the advantages of a batch's turns are given mean 0 and standard deviation 1."""


class ObjectiveConfig(Section):
    """What the learner maximises."""

    name: Literal["ppo_clip", "gspo", "cispo", "dppo", "decoupled_ppo", "reinforce"] = "decoupled_ppo"
    """Policy loss: ratios clipped per token (``ppo_clip``) or per sequence (``gspo``), weights clipped (``cispo``),
    tokens masked by total variation (``dppo``), a trust region around a proximal policy (``decoupled_ppo``), or none of
    these (``reinforce``). The default learned best from stale trajectories, see docs/objectives.md."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce", "gae", "vtrace"] = "grpo"
    """Reward minus the mean of its group, divided by the group's standard deviation (``grpo``) or not (``dr_grpo``);
    minus the mean of the group's others (``rloo``), or of the whole batch (``reinforce``). Or, turn by turn, what the
    values of states say (``gae``, and off-policy ``vtrace``); a value head is then trained beside the policy."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """Whether every turn gets the advantage of the whole trajectory, or that of the discounted return from it on;
    ``gae`` and ``vtrace``, under which every turn has its own in any case, do not read it."""
    value: ValueConfig | None = None
    """The value head; null: its defaults under ``gae`` and ``vtrace``, and none otherwise."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight of a reward one turn later; only ``credit: turn``, ``gae`` and ``vtrace`` read it."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    """The importance ratio is clipped below at 1 − this; null: 0.2, for ``gspo`` 0.0003, for ``cispo`` 1."""
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """The importance ratio is clipped above at 1 + this; null: 0.28, for ``gspo`` 0.0004, for ``cispo`` 4."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Highest importance ratio of a token with a negative advantage under ``ppo_clip``; null: no bound."""
    divergence: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Change of a token's probability beyond which ``dppo`` trains it no further away; null: 0.15."""
    proximal: Literal["recomputed", "interpolated"] | None = None
    """Proximal policy of ``decoupled_ppo``: that at the start of the step, for a forward pass, or one between it and
    the behaviour policy; null: ``interpolated``."""
    truncation: TruncationConfig | None = None
    """Truncated importance weight of ``reinforce``, or of ``decoupled_ppo`` in place of the whole one; null: none."""
    icepop: BandConfig | None = None
    """Tokens whose ratio lies outside are left out (such as 0.5 to 5); null: none are."""
    geometric: BandConfig | None = None
    """Sequences whose mean ratio (geometric) lies outside are left out (such as 0.99 to 1.001); null: none are."""
    reference: ReferenceConfig | None = None
    """Penalty for leaving the policy that the run began with; null: none."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_sum"] = "token_mean"
    """Whether every token weighs the same, every sequence, or tokens as if all sequences had ``sequence_tokens``."""
    sequence_tokens: Count | None = None
    """Constant that ``sequence_sum`` divides the loss of a sequence by, in tokens, such as the longest reply."""
    overlong: OverlongConfig = OverlongConfig()
    """What becomes of trajectories that are too long."""
    zero_variance: Literal["keep", "drop", "refill"] = "keep"
    """What becomes of groups without an advantage: they count in the mean of the loss, or they do not, or more is
    leased until the batch is full without them."""
    refill_leases: Count | None = None
    """Most leases of a batch beyond the first under ``refill``; null: ``buffer.max_staleness``. Each adds 1 to the
    policy version."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the policy's entropy, in nats, beside advantages of about 1; keeps small policies exploring."""
    entropy_cap: Annotated[float, Field(gt=0)] | None = None
    """Entropy of a token, in nats, beyond which it earns no more bonus; null: no cap."""
