"""The agreement monitor: do sampler and learner give the same token the same log-probability?

They are two programs, with kernels, types and copies of the weights of their own, and training takes whatever they
differ by for staleness. So every so many steps tokens are scored by the very weights that sampled them: what is then
left of the difference is numerical, or a mistake.

When a batch is leased its tokens are mostly some versions old. A check therefore begins with the version that is being
trained; if the batch at hand has too few tokens of it, the weights are set aside, in the hosts' memory, and it goes on
with the batches that follow until there are enough, or none can come any more.

The differences of single tokens are brought together from all devices and processes, a few bytes per token, and
everything is found from them on the host: exactly, and equally in every process of a gang.

Axes: R = rows, T = tokens of a row, N = tokens that are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from learner.mesh import WHOLE
from learner.objectives.diagnostics import NEAR_HIGH, NEAR_LOW
from learner.packing import Rows
from learner.step import TrainStep

ENOUGH_TOKENS = 128
"""A check goes on until it has so many; a sampler is judged by itself if it sampled so many."""

_MOST_VERSIONS = 100
"""A check ends after so many in any case: of a version that lived for a moment there may be no token at all."""

_SOME_TOKENS = 8
"""A sampler with fewer is not said to agree."""

_MOST_NAMES = 5
"""Samplers that an alarm names."""

type OnAlarm = Literal["warn", "stop"]
"""What a disagreement does to the run."""


class DisagreementError(RuntimeError):
    """Sampler and learner disagree, and the run is to end then; what it has is saved."""


class Limits(NamedTuple):
    """What sampler and learner may differ by.

    Attributes:
        mean: nats, of the mean difference of a token's log-probabilities.
        outside_fraction: share of the tokens with a ratio of probabilities outside [0.9, 1.1].
    """

    mean: float
    outside_fraction: float


EXACT = Limits(1e-3, 1e-3)
"""For float32 on both sides. The samplers here differ from the learner by 6e-5 nats at most (docs/samplers.md)."""

ROUNDED = Limits(0.03, 0.1)
"""For anything less: sound stacks in bfloat16 have a mean of 0.011 nats, broken ones 0.036 to 0.4 (docs/learner.md)."""


class Agreement(NamedTuple):
    """How far two log-probabilities of the same tokens are apart. Without tokens all are 0.

    Attributes:
        tokens: that were compared.
        mean: of the differences, nats.
        p95: that 95 % of the differences do not exceed (NumPy's ``inverted_cdf``), nats.
        max: the largest difference, nats.
        outside_fraction: share of the tokens with a ratio of probabilities outside [0.9, 1.1].
        k3: estimate of KL(sampler‖learner), nats per token (Schulman 2020).
    """

    tokens: int
    mean: float
    p95: float
    max: float
    outside_fraction: float
    k3: float

    def excess(self, limits: Limits) -> str | None:
        """The limit that is exceeded, in words; None if they agree. What is no number exceeds every limit."""
        if not self.mean <= limits.mean:
            return (
                f"the mean difference is {self.mean:.2g} nats, more than {limits.mean:g} (learner.agreement.max_mean)"
            )
        if not self.outside_fraction <= limits.outside_fraction:
            return (
                f"{self.outside_fraction:.1%} of the ratios are outside [{NEAR_LOW}, {NEAR_HIGH}], more than "
                f"{limits.outside_fraction:.1%} (learner.agreement.max_outside_fraction)"
            )
        return None


def measure(log_ratio_N: np.ndarray) -> Agreement:
    """Sum up the differences of single tokens: float[N], log-probability of the learner minus that of the sampler."""
    log_N = log_ratio_N.astype(np.float64)
    if not len(log_N):
        return Agreement(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    difference_N = np.abs(log_N)
    with np.errstate(over="ignore", invalid="ignore"):
        ratio_N, k3_N = np.exp(log_N), np.expm1(log_N) - log_N
    return Agreement(
        tokens=len(log_N),
        mean=float(difference_N.mean()),
        p95=float(np.quantile(difference_N, 0.95, method="inverted_cdf")),
        max=float(difference_N.max()),
        outside_fraction=float(np.mean(~((ratio_N >= NEAR_LOW) & (ratio_N <= NEAR_HIGH)))),
        k3=float(k3_N.mean()),
    )


class Compared(NamedTuple):
    """The tokens that a check has found.

    Attributes:
        log_ratio: float32[N], log-probability of the learner minus that of the sampler.
        sampler: int32[N], number of the sampler; -1 if there were several, or it is not known.
    """

    log_ratio: np.ndarray
    sampler: np.ndarray


class AgreementMonitor:
    """Checks a step every so often. All processes of a gang make the same calls and hear the same."""

    def __init__(
        self,
        step: TrainStep,
        limits: Limits,
        *,
        every_steps: int,
        max_staleness: int,
        sampler_name: Callable[[int], str] = "sampler {}".format,
        keeps_keys: bool = False,
        on_alarm: OnAlarm = "warn",
    ) -> None:
        """Make a monitor; nothing is compiled.

        Args:
            step: scores tokens.
            limits: beyond which there is an alarm.
            every_steps: steps from the beginning of one check to that of the next; the first step begins one.
            max_staleness: oldest that a token may be when it is trained on, in versions.
            sampler_name: from a number in ``Rows.samplers`` to what an alarm calls the sampler.
            keeps_keys: whether samplers go on with the keys of older weights when new ones arrive. What they sample
                then, until the turn ends, is of no version's weights alone and is not compared.
            on_alarm: ``stop`` ends the run.
        """
        self._step, self._limits, self._every, self._name = step, limits, every_steps, sampler_name
        self.stops = on_alarm == "stop"
        self._patience = min(max_staleness, _MOST_VERSIONS)
        self._whole = NamedSharding(step.mesh, WHOLE)
        chosen = partial(comparable, keeps_keys=keeps_keys)
        self._count = jax.jit(lambda rows, version: jnp.sum(chosen(rows, version)), out_shardings=self._whole)
        self._differ = jax.jit(
            lambda logprob_RT, rows, version: (chosen(rows, version), logprob_RT - rows.logprobs, rows.samplers),
            out_shardings=self._whole,
        )
        self._idle = every_steps
        """Steps since the last check began."""
        self._version: int | None = None
        """That is being checked."""
        self._kept: nnx.State | None = None
        """Its weights, once it is not trained any more."""
        self._found: list[Compared] = []

    def warm_up(self, params: nnx.State, batch: Sequence[Rows]) -> None:
        """Compile what the micro-batches of ``batch`` need, one of each shape."""
        brought = self._step.bring_back(self._step.set_aside(params))
        for rows in batch:
            self._tokens_of(0, [rows])
            self._compare(brought, rows, 0)

    def __call__(
        self, params: nnx.State, batch: Sequence[Rows], version: int, next_version: int
    ) -> dict[str, float | str]:
        """Look at a batch before it is trained on.

        Args:
            params: that are being trained; later steps may overwrite them.
            batch: micro-batches on the devices.
            version: of ``params``.
            next_version: that comes of the step.

        Returns:
            If a check ended with this batch, ``agreement_version`` and, as ``agreement_*``, what :class:`Agreement`
            has; of a check that found no token the number of tokens alone. If limits were exceeded,
            ``agreement_alarm``, one line. Otherwise nothing.
        """
        self._idle += 1
        if self._version is None:
            if self._idle <= self._every:
                return {}
            self._idle, self._version = 1, version
        tokens = self._tokens_of(self._version, batch)
        if any(tokens):
            # Between steps the devices hold no gradients, and have room for as much.
            scorer = params if self._kept is None else self._step.bring_back(self._kept)
            self._found += [
                self._compare(scorer, rows, self._version) for rows, count in zip(batch, tokens, strict=True) if count
            ]
        enough = sum(len(found.log_ratio) for found in self._found) >= ENOUGH_TOKENS
        if enough or next_version - self._version > self._patience:
            return self._finish(self._version)
        if self._kept is None:
            self._kept = self._step.set_aside(params)
        return {}

    def _tokens_of(self, version: int, batch: Sequence[Rows]) -> list[int]:
        """How many tokens of each micro-batch, on all devices, can be compared with this version."""
        on_device = jax.device_put(np.int32(version), self._whole)
        return [int(count) for count in jax.device_get([self._count(rows, on_device) for rows in batch])]

    def _compare(self, params: nnx.State, rows: Rows, version: int) -> Compared:
        on_device = jax.device_put(np.int32(version), self._whole)
        differences: Any = self._differ(self._step.logprobs(params, rows).logprob, rows, on_device)
        chosen_RT, log_ratio_RT, samplers_RT = jax.device_get(differences)
        return Compared(log_ratio_RT[chosen_RT], samplers_RT[chosen_RT])

    def _finish(self, version: int) -> dict[str, float | str]:
        found, self._found, self._version, self._kept = self._found, [], None, None
        log_ratio_N = np.concatenate([each.log_ratio for each in found] or [np.empty(0, np.float32)])
        sampler_N = np.concatenate([each.sampler for each in found] or [np.empty(0, np.int32)])
        whole = measure(log_ratio_N)
        if not whole.tokens:
            return {"agreement_version": version, "agreement_tokens": 0}
        report: dict[str, float | str] = {"agreement_version": version}
        report |= {f"agreement_{name}": value for name, value in whole._asdict().items()}
        alarm = self._alarm(version, whole, log_ratio_N, sampler_N)
        return report if alarm is None else report | {"agreement_alarm": alarm}

    def _alarm(self, version: int, whole: Agreement, log_ratio_N: np.ndarray, sampler_N: np.ndarray) -> str | None:
        """What is wrong and who may be to blame; None if nothing is. One bad sampler of many is an alarm, too."""
        each = {int(number): measure(log_ratio_N[sampler_N == number]) for number in np.unique(sampler_N)}
        bad = {number: found for number, found in each.items() if found.excess(self._limits)}
        worst = max((found for found in bad.values() if found.tokens >= ENOUGH_TOKENS), key=_by_mean, default=None)
        excess, blamed = whole.excess(self._limits), whole
        if excess is None and worst is not None:
            excess, blamed = worst.excess(self._limits), worst
        if excess is None:
            return None
        named = [f"{self._name(number)} ({found.mean:.2g} nats)" for number, found in sorted(bad.items())]
        names = ", ".join(named[:_MOST_NAMES] + ["..."] * (len(named) > _MOST_NAMES))
        agreeing = sum(found.tokens >= _SOME_TOKENS for number, found in each.items() if number not in bad)
        whose = f"it is {names}; others that agree: {agreeing}" if agreeing else f"sampled by {names}"
        return (
            f"sampler and learner disagree about version {version}: {excess}, over {blamed.tokens} tokens; {whose}. "
            "Check that they have the same weights, temperature, precision and attention, or raise the limit if it is "
            "rounding"
        )


def comparable(rows: Rows, version: jax.Array, *, keeps_keys: bool) -> jax.Array:
    """bool[R, T]: whether the target was sampled by the weights of ``version``, and by them alone if ``keeps_keys``."""
    own_RT: jax.Array = rows.mask & (rows.versions == version)
    if not keeps_keys:
        return own_RT
    before_RT = jnp.pad(rows.mask, ((0, 0), (1, 0)))[:, :-1]
    same_RT = jnp.pad(rows.versions, ((0, 0), (1, 0)))[:, :-1] == rows.versions
    place_RT = jnp.broadcast_to(jnp.arange(rows.mask.shape[1]), rows.mask.shape)
    # The last position of a segment predicts nothing, so the turns of two segments never touch.
    begin_RT = jax.lax.cummax(jnp.where(rows.mask & ~before_RT, place_RT, -1), axis=1)
    change_RT = jax.lax.cummax(jnp.where(rows.mask & before_RT & ~same_RT, place_RT, -1), axis=1)
    return own_RT & (change_RT < begin_RT)


def _by_mean(found: Agreement) -> float:
    return found.mean
