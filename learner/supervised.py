"""Supervised fine-tuning: cross-entropy on given token streams, with the packing and the step of the learner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from flax import nnx

from learner.gang import Gang
from learner.packing import Example, Ladder, pack
from learner.step import TrainStep


def supervised_example(tokens: np.ndarray, loss_mask: np.ndarray) -> Example:
    """An example to imitate.

    Args:
        tokens: int32[S].
        loss_mask: bool[S], true where the token is to be learned; the first cannot be.
    """
    nothing = np.zeros(len(tokens), np.float32)
    return Example(tokens, loss_mask, nothing, nothing.astype(np.int32), nothing)


def train_supervised(
    step: TrainStep,
    params: nnx.State,
    examples: Sequence[Example],
    *,
    ladder: Ladder,
    steps: int,
    batch_size: int,
    seed: int,
    stop: threading.Event,
    on_step: Callable[[dict[str, float]], None],
    gang: Gang = Gang(),  # noqa: B008 - it is immutable
) -> nnx.State | None:
    """Imitate ``examples`` for ``steps`` updates and return the parameters; None if it was stopped before.

    Args:
        step: a training step with the ``cross_entropy`` objective and temperature 1.
        params: where training starts; left as they are.
        examples: from :func:`supervised_example`; in a gang, all of them in every process.
        ladder: shapes to pack into; in a gang, those of this process's part of a micro-batch.
        steps: updates to make.
        batch_size: examples of one update; drawn without replacement until all were used.
        seed: of the order of the examples.
        stop: return after the step in hand.
        on_step: called after every step with step, loss, accuracy (share of the learned tokens that are
            the most probable one), entropy, grad_norm, learning_rate, trained_tokens, tokens and tokens_per_second.
        gang: the processes that train together, each on its share of a batch; all make the same call.

    Raises:
        ValueError: there are fewer examples than ``batch_size``.
        PackingError: an example does not fit the ladder.
    """
    if len(examples) < batch_size:
        raise ValueError(f"{len(examples)} examples are fewer than batch_size={batch_size}; add some or lower it")
    state = step.warm_up(step.initialise(params))
    chosen = _choose(len(examples), batch_size, seed)
    for number in range(1, steps + 1):
        start = time.monotonic()
        batch = [examples[i] for i in next(chosen)]
        packed = pack(batch[gang.index :: gang.count], ladder)
        said = gang.gather([stop.is_set(), *ladder.count(packed)])
        if said[:, 0].any():
            return None
        packed = ladder.fill_up(packed, said[:, 1:].max(axis=0))
        state, on_device = step(state, [step.put(rows) for rows in packed], version=0)
        metrics = {name: float(value) for name, value in jax.device_get(on_device).items()}
        tokens = sum(len(example.tokens) for example in batch)
        seconds = time.monotonic() - start
        on_step({"step": number, **metrics, "tokens": tokens, "tokens_per_second": tokens / seconds})
    return state.params


def _choose(count: int, batch_size: int, seed: int) -> Iterator[np.ndarray]:
    """Indices of each batch: one pass after another, each in a new order."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(count)
        for start in range(0, count - batch_size + 1, batch_size):
            yield order[start : start + batch_size]
