"""The recipe: which of the leased trajectories are trained on, and what each of their tokens is worth.

Everything that a batch needs from the host happens here, in NumPy: length penalties, advantages, and what becomes of
groups that say nothing about the policy and of trajectories that were cut off.

Axes: T = tokens of a trajectory, K = its turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from buffer import Lease, Status, Trajectory
from learner.objectives import Credit
from learner.packing import Example

type Uninformative = Literal["train", "skip", "drop", "refill"]
"""What becomes of a group whose advantages are all 0, such as one of equal rewards.

* ``train``: it is trained on like any other; it may have a gradient by its entropy or its distance from a reference.
* ``skip``: it is left out but counts in the divisor of the loss. Without another gradient, that changes nothing.
* ``drop``: it is left out and does not count.
* ``refill``: as ``drop``, and more is leased until the batch has as many informative groups as a lease has groups
  (dynamic sampling: DAPO, arXiv:2503.14476, eq. 11).
"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch on the host.

    Attributes:
        examples: what to train on.
        informative_groups: groups with an advantage.
        skipped_divisor: what skipped groups would have added to the divisor of the loss.
        facts: numbers about the batch; see ``Batch``.
    """

    examples: list[Example]
    informative_groups: int
    skipped_divisor: float
    facts: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How leased groups become examples.

    Attributes:
        credit: from the rewards of turns to their advantages.
        divisor_of: what a sequence adds to the divisor of the loss, from the mask of its trained tokens.
        compares_batch: whether ``credit`` compares groups with each other; then it must see the whole batch, which a
            process of a gang does not.
        uninformative: what becomes of groups whose advantages are all 0.
        extra_leases: under ``refill``, most leases of one batch beyond the first; at most the buffer's max_staleness,
            because leased groups take up slots until they are acknowledged.
        mask_truncated: leave out trajectories that were cut off; they still count in the baseline of their group.
        length_penalty: from a trajectory's number of tokens to what is subtracted from its reward; None for nothing.
        sampler_number: from the name of a sampler to its number; -1 if that is not known.
    """

    credit: Credit
    divisor_of: Callable[[np.ndarray], float]
    compares_batch: bool = False
    uninformative: Uninformative = "skip"
    extra_leases: int = 0
    mask_truncated: bool = False
    length_penalty: Callable[[int], float] | None = None
    sampler_number: Callable[[str], int] = lambda name: -1

    def prepare(self, leases: Sequence[Lease]) -> Prepared:
        """Turn the groups of all ``leases`` into one batch, to be trained by the version of the first."""
        # Corrections of mean 1, which bounds what a group that was drawn against the odds may weigh.
        drawn = [
            (group, correction / lease.mean_correction)
            for lease in leases
            for group, correction in zip(lease.groups, lease.corrections, strict=True)
        ]
        # By task, so that sums round the same way in whichever order groups came, or came again after a restart.
        drawn.sort(key=lambda pair: (pair[0][0].task, pair[0][0].group))
        groups, corrections = [group for group, _ in drawn], [correction for _, correction in drawn]
        advantages = self.credit([[self._rewards(t) for t in group] for group in groups])
        examples: list[Example] = []
        informative, skipped_tokens, skipped_divisor, masked = 0, 0, 0.0, 0
        for group, group_advantages, correction in zip(groups, advantages, corrections, strict=True):
            kept = [
                (t, advantage_K)
                for t, advantage_K in zip(group, group_advantages, strict=True)
                if not (self.mask_truncated and t.status is Status.TRUNCATED)
            ]
            masked += len(group) - len(kept)
            useful = any(np.any(advantage_K) for _, advantage_K in kept)
            informative += useful
            if useful or self.uninformative == "train":
                examples += [
                    Example(
                        t.tokens,
                        t.loss_mask,
                        t.logprobs,
                        t.versions,
                        advantages=spread(correction * advantage_K, t.loss_mask),
                        rewards=spread(self._rewards(t), t.loss_mask),
                        is_cut=t.status is Status.TRUNCATED,
                        sampler=self.sampler_number(t.sampler),
                    )
                    for t, advantage_K in kept
                ]
                continue
            skipped_tokens += sum(int(t.loss_mask.sum()) for t, _ in kept)
            if self.uninformative == "skip":
                skipped_divisor += sum(self.divisor_of(t.loss_mask) for t, _ in kept)
        facts = _facts(leases) | {
            "zero_variance_groups": len(groups) - informative,
            "masked_trajectories": masked,
            "skipped_tokens": skipped_tokens,
        }
        return Prepared(examples, informative, skipped_divisor, facts)

    def wants_more(self, leases: Sequence[Lease], prepared: Prepared) -> bool:
        """Whether another lease is to be added to the batch that ``leases`` make.

        Judged by this process alone, so only a gang of one may refill.
        """
        return (
            self.uninformative == "refill"
            and prepared.informative_groups < len(leases[0].groups)
            and len(leases) <= self.extra_leases
        )

    def _rewards(self, trajectory: Trajectory) -> np.ndarray:
        """float[K], the rewards of the turns after the length penalty, which the last turn pays."""
        if self.length_penalty is None:
            return trajectory.rewards
        reward_K = trajectory.rewards.astype(np.float64)
        reward_K[-1] -= self.length_penalty(len(trajectory.tokens))
        return reward_K


def spread(x_K: np.ndarray, mask_T: np.ndarray) -> np.ndarray:
    """Give every sampled token what belongs to its turn, others 0: float32[T]; a turn is one run of sampled tokens.

    Raises:
        ValueError: there are more or fewer runs than turns.
    """
    begins_T = mask_T & ~np.concatenate([[False], mask_T[:-1]])
    runs = int(begins_T.sum())
    if runs != len(x_K):
        raise ValueError(f"the mask has {runs} runs of sampled tokens, but there are rewards of {len(x_K)} turns")
    return np.where(mask_T, x_K[np.cumsum(begins_T) - 1], 0.0).astype(np.float32)


def combine_facts(facts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Facts about a batch from those about its shards."""
    share = np.array([each["trajectories"] for each in facts]) / max(1, sum(each["trajectories"] for each in facts))
    combined: dict[str, float] = {}
    for name in facts[0]:
        values = np.array([each[name] for each in facts])
        match name:
            case "reward_mean" | "success_mean" | "staleness_mean":
                combined[name] = float(values @ share)
            case "padding_fraction":  # all have as many positions
                combined[name] = float(values.mean())
            case "staleness_max" | "leases":
                combined[name] = float(values.max())
            case _:
                combined[name] = float(values.sum())
    return combined


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _facts(leases: Sequence[Lease]) -> dict[str, float]:
    trajectories = [trajectory for lease in leases for trajectory in lease.trajectories]
    # A later lease of the same batch was judged by a later version than the one that trains it.
    staleness = np.array([leases[0].version - trajectory.oldest_version for trajectory in trajectories])
    return {
        "reward_mean": _mean([t.reward for t in trajectories]),
        "success_mean": _mean([float(t.metadata.get("success", 0.0)) for t in trajectories]),
        "staleness_mean": _mean(staleness),
        "staleness_max": int(staleness.max(initial=0)),
        "tokens": sum(len(t.tokens) for t in trajectories),
        "trajectories": len(trajectories),
        "leases": len(leases),
    }
