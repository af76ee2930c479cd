"""What is measured of a run while it trains, and its way to the Prometheus endpoint of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypedDict, get_type_hints


class Snapshot(TypedDict, total=False):
    """The state of a run at one moment; what is not known yet is left out.

    Each entry is also a Ray metric, described by its annotation.
    """

    step: Annotated[int, "Optimizer steps done"]
    version: Annotated[int, "Policy version"]
    success_mean: Annotated[float, "Share of successful episodes in the newest batch"]
    reward_mean: Annotated[float, "Mean total reward in the newest batch"]
    staleness_mean: Annotated[float, "Mean staleness of the newest batch, in versions"]
    staleness_max: Annotated[int, "Largest staleness of the newest batch, in versions"]
    staleness_limit: Annotated[int, "Largest staleness allowed, in versions"]
    agreement_mean: Annotated[float, "Mean difference of sampler's and learner's log-probabilities when last checked"]
    agreement_max: Annotated[float, "Largest difference of sampler's and learner's log-probabilities then"]
    learner_idle_fraction: Annotated[float, "Share of the time since the first step that the learner waited for data"]
    sampler_tokens_per_second: Annotated[float, "Tokens sampled per second by all samplers"]
    samplers_serving: Annotated[int, "Samplers that workers ask"]
    samplers_wanted: Annotated[int, "Samplers that there are when all have started"]
    sampler_restarts: Annotated[int, "Times that a sampler was started anew"]
    sampler_version_lag: Annotated[int, "Learner's version less the oldest that a serving sampler holds"]
    requests_asked_again: Annotated[int, "Requests lost with their sampler and asked again"]
    episodes_per_second: Annotated[float, "Episodes ended per second"]
    episodes_failed: Annotated[int, "Episodes that ended through no fault of the policy"]
    groups_reserved: Annotated[int, "Groups being played"]
    groups_ready: Annotated[int, "Groups waiting for the learner"]
    groups_leased: Annotated[int, "Groups at the learner"]
    groups_limit: Annotated[int, "Most groups outstanding"]


class RayMetrics:
    """Gauges ``headrace_<entry>`` of a run, tagged with its name; Prometheus sees them as ``ray_headrace_<entry>``.

    Make it after Ray is up. Ray exports a value some seconds after it was set.
    """

    def __init__(self, run: str) -> None:
        from ray.util.metrics import Gauge

        self._tags = {"run": run}
        self._gauges = {
            name: Gauge(f"headrace_{name}", description=description, tag_keys=("run",))
            for name, description in _descriptions().items()
        }
        self._groups = Gauge(
            "headrace_groups", description="Groups by what became of them", tag_keys=("run", "outcome")
        )

    def set(self, snapshot: Snapshot) -> None:
        """Set every gauge that the snapshot has a value for."""
        for name, value in snapshot.items():
            self._gauges[name].set(float(value), tags=self._tags)  # type: ignore[arg-type]

    def set_groups(self, counters: Mapping[str, int]) -> None:
        """Set the group counters of the buffer: reserved, acked, stale, expired, abandoned, ..."""
        for outcome, count in counters.items():
            self._groups.set(float(count), tags={**self._tags, "outcome": outcome})


def _descriptions() -> dict[str, str]:
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(Snapshot, include_extras=True).items()}
