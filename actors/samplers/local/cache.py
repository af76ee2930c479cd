"""The slotted key/value cache: fixed-shape device arrays, and on the host what each slot holds.

A finished request leaves its keys in its slot. The next prompt that begins with them (the
next turn of the same episode) takes the slot over and only its new tokens are computed; a
prompt that shares a beginning with another slot (a sibling of its group, the same system
prompt) starts from a copy. Keys of older weights are never reused: ``forget`` empties free slots, and
what a running request keeps is for that request alone and gone when it ends.

Axes: L = layers, S = slots, K = key/value heads, C = cached positions, D = head dim,
P = prompt tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from learner.models.config import ModelConfig

WORTH_SHARING = 16
"""Tokens: a shorter common beginning is computed again sooner than it is copied or waited for."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a prompt goes.

    Attributes:
        slot: the slot it takes.
        reused: tokens of the prompt whose keys are there, or will be once ``donor`` was copied.
        donor: slot whose keys are to be copied first; None when nothing is copied.
    """

    slot: int
    reused: int
    donor: int | None


class SlotCache:
    """Keys and values of S slots, and the tokens they belong to.

    Attributes:
        keys_LSKCD: cached keys; positions at and beyond ``cached_S`` hold garbage that is never attended to.
        values_LSKCD: cached values.
        tokens_SC: int32, the tokens of each slot: prompt and what was sampled.
        length_S: int32, how many of ``tokens_SC`` are known.
        cached_S: int32, how many of these have keys; always the first ones.
        busy_S: bool, whether a request owns the slot.
    """

    def __init__(self, config: ModelConfig, *, slots: int, context_length: int, padding: int) -> None:
        """Allocate the arrays.

        Args:
            config: the model's shape.
            slots: S.
            context_length: most tokens of a slot.
            padding: extra positions, at least the longest chunk: a chunk is written whole, garbage behind its
                valid tokens included, and must never be pushed back by the end of the array.
        """
        capacity = context_length + padding
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, capacity, config.head_dim)
        self.keys_LSKCD: jax.Array = jnp.zeros(shape, jnp.float32)
        self.values_LSKCD: jax.Array = jnp.zeros(shape, jnp.float32)
        self.tokens_SC = np.zeros((slots, capacity), np.int32)
        self.length_S = np.zeros(slots, np.int32)
        self.cached_S = np.zeros(slots, np.int32)
        self.busy_S = np.zeros(slots, bool)
        self._outdated_S: np.ndarray = np.zeros(slots, bool)  # busy, with keys that older weights computed
        self._released_S = np.zeros(slots, np.int64)
        self._releases = 0

    @property
    def slots(self) -> int:
        """S."""
        return len(self.busy_S)

    def place(self, prompt_P: np.ndarray) -> Placement | None:
        """Where ``prompt_P`` should go; None when no slot is free, or when waiting is cheaper.

        Waiting is cheaper while a running request computes the keys of a long common beginning: the
        members of a group arrive together, and only the first of them should prefill their prompt.
        """
        free = np.flatnonzero(~self.busy_S)
        if not free.size:
            return None
        shared_S = self._shared(prompt_P)
        ready_S = np.minimum(shared_S, self.cached_S)
        donor = int(ready_S.argmax())
        best = int(ready_S[donor])
        coming = int(shared_S[self.busy_S].max(initial=0))
        if coming >= best + WORTH_SHARING:
            return None
        slot = self._slot_that_loses_least(free, ready_S)
        if best >= ready_S[slot] + WORTH_SHARING:
            return Placement(slot, best, donor)
        return Placement(slot, int(ready_S[slot]), None)

    def take(self, placement: Placement, tokens_P: np.ndarray) -> None:
        """Give the slot to a request whose known tokens are ``tokens_P``."""
        slot = placement.slot
        self.tokens_SC[slot, : len(tokens_P)] = tokens_P
        self.length_S[slot] = len(tokens_P)
        self.cached_S[slot] = placement.reused
        self.busy_S[slot] = True

    def release(self, slot: int) -> None:
        """End the ownership; the keys stay for a later prompt unless older weights computed some of them."""
        self._releases += 1
        self._released_S[slot] = self._releases
        self.busy_S[slot] = False
        if self._outdated_S[slot]:
            self._outdated_S[slot] = False
            self.cached_S[slot] = 0
        # A last token without keys is no use to a later prompt.
        self.length_S[slot] = self.cached_S[slot]

    def forget(self) -> None:
        """Note that the weights changed: no later prompt reuses a key computed until now. Owners keep theirs."""
        self.cached_S[~self.busy_S] = 0
        self.length_S[~self.busy_S] = 0
        self._outdated_S = self.busy_S & (self.cached_S > 0)

    def _shared(self, prompt_P: np.ndarray) -> np.ndarray:
        """Length of the common beginning of ``prompt_P`` and each slot's tokens; 0 where its keys are outdated.

        The last token has to be run in any case: its hidden state is what the next one is sampled from.
        """
        length = len(prompt_P) - 1
        differs_SC = self.tokens_SC[:, :length] != prompt_P[:length]
        first_S = np.where(differs_SC.any(axis=1), differs_SC.argmax(axis=1), length) if length else 0
        return np.where(self._outdated_S, 0, np.minimum(first_S, self.length_S))

    def _slot_that_loses_least(self, free: np.ndarray, ready_S: np.ndarray) -> int:
        """The slot the prompt continues or an empty one; else the one that has been free for longest."""
        whole = free[ready_S[free] == self.cached_S[free]]
        if whole.size:
            # Among equals (empty ones) the longest free; the key orders by (most reused, first released).
            return int(whole[np.lexsort((self._released_S[whole], -ready_S[whole]))[0]])
        return int(free[self._released_S[free].argmin()])
