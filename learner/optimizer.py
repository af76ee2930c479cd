"""AdamW with warm-up, decay and a bound on the gradient's norm."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import optax

from learner.models.tensors import parameter_path

type Decay = Literal["constant", "linear", "cosine"]


class Optimizer(NamedTuple):
    """An update rule and the learning rate it follows.

    Attributes:
        rule: clips the gradient to the global norm, then AdamW.
        schedule: learning rate of each step, the first being step 0.
    """

    rule: optax.GradientTransformation
    schedule: optax.Schedule


def make_optimizer(
    *,
    learning_rate: float,
    warmup_steps: int,
    total_steps: int,
    decay: Decay,
    final_fraction: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    max_grad_norm: float,
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019) after global-norm clipping (Pascanu et al. 2013).

    Args:
        learning_rate: the peak, reached after ``warmup_steps``.
        warmup_steps: steps of linear warm-up; the first step already moves.
        total_steps: step at which the decay reaches its floor.
        decay: shape of the way from the peak to the floor.
        final_fraction: the floor as a fraction of the peak.
        weight_decay: decoupled; applied to matrices, not to norms.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        max_grad_norm: gradients of a larger global norm are scaled down to it.
    """
    schedule = _make_schedule(learning_rate, warmup_steps, total_steps, decay, final_fraction)
    rule = optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.adamw(schedule, b1=beta1, b2=beta2, weight_decay=weight_decay, mask=_matrices),
    )
    return Optimizer(rule, schedule)


def _make_schedule(
    peak: float, warmup_steps: int, total_steps: int, decay: Decay, final_fraction: float
) -> optax.Schedule:
    steps = max(1, total_steps - warmup_steps)
    match decay:
        case "constant":
            after: optax.Schedule = optax.constant_schedule(peak)
        case "linear":
            after = optax.linear_schedule(peak, peak * final_fraction, steps)
        case "cosine":
            after = optax.cosine_decay_schedule(peak, steps, alpha=final_fraction)
        case _:
            raise ValueError(f"decay is {decay!r}; expected 'constant', 'linear' or 'cosine'")
    if not warmup_steps:
        return after
    # The first step moves by peak / warmup_steps rather than by nothing.
    warmup = optax.linear_schedule(peak / warmup_steps, peak, max(1, warmup_steps - 1))
    return optax.join_schedules([warmup, after], [warmup_steps])


def _matrices(params: Any) -> Any:
    """True for parameters whose name carries axes; norms' weights have none."""
    return jax.tree.map_with_path(lambda path, _: parameter_path(path)[-1] != "weight", params)
