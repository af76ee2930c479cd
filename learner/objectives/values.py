"""Advantages and targets from the estimates of a value head, and the loss that trains one.

The decision process is that of turns: a turn is one run of sampled tokens, and its state is all that comes before. In a
row the value of that state stands where the first token of the turn is predicted. Three kinds of positions have a value
that is trained:

* where a turn begins, the return from the turn on;
* where its other tokens are predicted, the same, with more of the turn known;
* at its last token, which predicts nothing that was sampled, the return after it. That one is read where a trajectory
  was cut off: the environment's last answer is not recorded, so it is the expectation over that answer.

Everything is a recurrence backwards along a row, so it runs on the devices, on packed rows, whichever process has them.

Axes: R = rows, T = tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from learner.packing import Rows


class Estimate(NamedTuple):
    """What the values say about rows.

    Attributes:
        advantage: float32[R, T], of the turn of each sampled token; 0 elsewhere.
        target: float32[R, T], what the value should be, where :func:`valued` is true; 0 elsewhere.
    """

    advantage: jax.Array
    target: jax.Array


type Estimator = Callable[[Rows], Estimate]
"""Rows with ``values`` and ``proximal`` filled in → advantages and targets."""


def gae(rows: Rows, *, discount: float, decay: float) -> Estimate:
    """Generalised advantage estimation: ``A_k = Σ_{j ≥ k} (γλ)^{j − k}·δ_j`` (GAE: arXiv:1506.02438, eq. 16).

    ``δ_k = r_k + γ·V_{k+1} − V_k``; after the last turn V is 0, or where the trajectory was cut off the value of its
    last token. The target of a value is ``A_k + V_k``.

    Args:
        rows: the micro-batch.
        discount: γ, in (0, 1], from one turn to the next.
        decay: λ, in [0, 1]: 0 trusts the next value alone, 1 the rewards alone.
    """
    starts_RT = turn_starts(rows)
    delta_RT = rows.rewards + discount * _next_state(rows.values, rows) - rows.values
    trace_RT = _backwards(starts_RT, delta_RT, discount * decay, rows)
    return Estimate(_of_turn(trace_RT, rows), _targets(rows.values + trace_RT, rows))


def vtrace(
    rows: Rows,
    *,
    discount: float,
    decay: float,
    is_weighted: bool,
    cap_weight: float = 1.0,
    cap_trace: float = 1.0,
) -> Estimate:
    """Targets and advantages off-policy (V-trace: IMPALA, arXiv:1802.01561, eq. 1 and section 4.2).

    ``v_k = V_k + Σ_{j ≥ k} γ^{j − k}·(Π_{k ≤ i < j} c_i)·ρ_j·(r_j + γ·V_{j+1} − V_j)`` with ``ρ = min(ρ̄, π/μ)`` and
    ``c = λ·min(c̄, π/μ)``, where π/μ is the product over the tokens of a turn. The advantage of a turn is
    ``ρ_k·(r_k + γ·v_{k+1} − V_k)``.

    Args:
        rows: the micro-batch; π is the policy that filled in ``proximal``.
        discount: γ, in (0, 1], from one turn to the next.
        decay: λ, in [0, 1].
        is_weighted: whether the advantage has its factor ρ_k; a policy loss that holds an importance ratio itself would
            be weighted twice.
        cap_weight: ρ̄; which policy's values the targets have as their fixed point.
        cap_trace: c̄, at most ρ̄; how far back a surprise reaches.
    """
    starts_RT = turn_starts(rows)
    log_RT = jnp.where(rows.mask, rows.proximal - rows.logprobs, 0.0)
    # A ratio is only ever compared with a cap from above, so the bound need not be tight.
    ratio_RT = jnp.exp(jnp.minimum(_scan(log_RT, jnp.where(rows.mask, 1.0, 0.0)), 60.0))
    weight_RT = jnp.minimum(ratio_RT, cap_weight)
    delta_RT = weight_RT * (rows.rewards + discount * _next_state(rows.values, rows) - rows.values)
    trace_RT = discount * decay * jnp.minimum(ratio_RT, cap_trace)
    target_RT = rows.values + _backwards(starts_RT, delta_RT, trace_RT, rows)
    advantage_RT = rows.rewards + discount * _next_state(target_RT, rows) - rows.values
    if is_weighted:
        advantage_RT *= weight_RT
    return Estimate(_of_turn(advantage_RT, rows), _targets(target_RT, rows))


ESTIMATORS: dict[str, Callable[..., Estimate]] = {"gae": gae, "vtrace": vtrace}


def turn_starts(rows: Rows) -> jax.Array:
    """Where the first token of a turn is predicted: bool[R, T]. Its value is that of the state before."""
    return rows.mask & ~_before(rows.mask)


def valued(rows: Rows) -> jax.Array:
    """Where a value is trained: bool[R, T]. Nobody knows what follows a last token where it was cut off."""
    return rows.mask | (_turn_ends(rows) & ~rows.cut)


def value_loss(value_RT: jax.Array, rows: Rows) -> jax.Array:
    """``½·(V − G)²`` of each position, 0 where no value is trained (PPO: arXiv:1707.06347, eq. 9).

    Args:
        value_RT: V, of the model being trained.
        rows: the micro-batch, with G in ``returns``.

    Returns:
        float32[R, T], to be aggregated like a policy loss.
    """
    return jnp.where(valued(rows), 0.5 * jnp.square(value_RT - rows.returns), 0.0)


def _turn_ends(rows: Rows) -> jax.Array:
    """The last token of each turn: bool[R, T]."""
    return _before(rows.mask) & ~rows.mask


def _before(x_RT: jax.Array) -> jax.Array:
    """Each position's left neighbour. A mask needs no segments: the last position of each is false."""
    return jnp.pad(x_RT[:, :-1], ((0, 0), (1, 0)))


def _after(x_RT: jax.Array, rows: Rows) -> jax.Array:
    """Each position's right neighbour in the same sequence; 0 at its end."""
    is_same_RT = rows.segments[:, 1:] == rows.segments[:, :-1]
    return jnp.pad(jnp.where(is_same_RT, x_RT[:, 1:], 0.0), ((0, 0), (0, 1)))


def _next_state(x_RT: jax.Array, rows: Rows) -> jax.Array:
    """``x`` of the next state of the same sequence: of the next turn, or of the token at which it was cut off; else 0.

    What is cut off keeps its value as the target of itself, so ``x`` there is always ``rows.values``.
    """
    held_RT = jnp.where(turn_starts(rows), x_RT, jnp.where(rows.cut, rows.values, 0.0))
    is_state_RT = turn_starts(rows) | rows.cut
    return _after(_scan(held_RT, _carries(jnp.where(is_state_RT, 0.0, 1.0), rows)), rows)


def _backwards(starts_RT: jax.Array, x_RT: jax.Array, decay: jax.Array | float, rows: Rows) -> jax.Array:
    """``y_k = x_k + decay_k·y_{k+1}`` over the turns of each sequence, where turns start; held between them."""
    carry_RT = jnp.where(starts_RT, decay, 1.0)
    return _scan(jnp.where(starts_RT, x_RT, 0.0), _carries(carry_RT, rows))


def _carries(carry_RT: jax.Array, rows: Rows) -> jax.Array:
    """``carry_RT``, but 0 at the end of each sequence: nothing comes over from the next."""
    return _after(jnp.ones_like(carry_RT), rows) * carry_RT


def _scan(x_RT: jax.Array, carry_RT: jax.Array) -> jax.Array:
    """``y_t = x_t + carry_t·y_{t+1}`` along each row, in about log T passes."""

    def join(later: tuple[jax.Array, jax.Array], earlier: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

    return jax.lax.associative_scan(join, (carry_RT, x_RT), reverse=True, axis=1)[1]


def _of_turn(x_RT: jax.Array, rows: Rows) -> jax.Array:
    """What stands where its turn starts, at every token of a turn; 0 elsewhere."""
    place_RT = jnp.broadcast_to(jnp.arange(x_RT.shape[1]), x_RT.shape)
    start_RT = jax.lax.cummax(jnp.where(turn_starts(rows), place_RT, 0), axis=1)
    return jnp.where(rows.mask, jnp.take_along_axis(x_RT, start_RT, axis=1), 0.0)


def _targets(target_RT: jax.Array, rows: Rows) -> jax.Array:
    """The target of every value that is trained, from those of the states before the turns."""
    after_RT = jnp.where(_turn_ends(rows) & ~rows.cut, _next_state(target_RT, rows), 0.0)
    return _of_turn(target_RT, rows) + after_RT
