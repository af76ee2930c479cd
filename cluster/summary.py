"""The outcome of a run in numbers: ``summary.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from buffer import OUTCOMES, Stats


def summarise_run(
    records: Sequence[Mapping[str, Any]],
    stats: Stats,
    *,
    sampler_kind: str,
    staleness_limit: int,
    sampler_totals: Mapping[str, float],
    sampler_restarts: int,
    seconds: float,
) -> dict[str, Any]:
    """What ``summary.json`` holds.

    Args:
        records: of ``metrics.jsonl``; those of all starts of a resumed run.
        stats: of the buffer, at the end.
        sampler_kind: ``sampler.kind``.
        staleness_limit: ``buffer.max_staleness``.
        sampler_totals: what ``SamplerPool.totals`` counted since this start.
        sampler_restarts: times that one was started anew since this start.
        seconds: of this start, from the first to the last moment.

    Returns:
        ``success_before`` and ``success_after`` are None as long as nothing was evaluated at the start and at the
        end. ``agreement`` is that of sampler and learner: ``checks`` that found tokens, ``no_tokens`` that found none,
        ``alarms``; what the ``last`` check of the first kind found, and of each number the ``worst`` of all.
        ``swaps`` are those of weights while samplers served, as these last told: how often, for how many seconds one
        could not decode on average until it had switched, and the share that this is of the learner's step. In
        ``groups``, ``reserved`` is the sum of all the others.
    """
    # A run resumed after a crash makes the steps after its checkpoint again: the last record of each counts.
    steps = list({record["step"]: record for record in records if record["kind"] == "step"}.values())
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    last_step = int(steps[-1]["step"]) if steps else 0
    before = next((e for e in evaluations if e["step"] == 0), None)
    after = next((e for e in reversed(evaluations) if e["step"] == last_step > 0), None)
    return {
        "sampler": sampler_kind,
        "sampler_restarts": sampler_restarts,
        "swaps": _swaps(sampler_totals, steps),
        "success_before": before and before["success_mean"],
        "success_after": after and after["success_mean"],
        "episodes_evaluated": after["episodes"] if after else 0,
        "seconds": round(seconds, 1),
        "steps": last_step,
        "version": stats.version,
        "trajectories_trained": sum(int(s["trajectories"]) for s in steps),
        "staleness_max_trained": max((int(s["staleness_max"]) for s in steps), default=None),
        "staleness_limit": staleness_limit,
        "compilations_after_warmup": int(sampler_totals["compilations_after_warmup"])
        + max((int(s["compilations_after_warmup"]) for s in steps), default=0),
        "learner_idle_fraction": steps[-1]["learner_idle_fraction"] if steps else None,
        "agreement": _agreement(steps),
        "groups": {
            "reserved": stats.counters["reserved"],
            **{name: stats.counters[name] for name in OUTCOMES},
            "ready": stats.ready,
            "running": stats.reserved,
            "leased": stats.leased,
        },
    }


def outcome_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """The summary for a person: label → value."""
    groups = summary["groups"]
    rows = {
        "success before": _share(summary["success_before"]),
        "success after": _share(summary["success_after"]),
        "steps": f"{summary['steps']}, {summary['trajectories_trained']} trajectories",
        "staleness": f"at most {summary['staleness_max_trained'] or 0}, allowed {summary['staleness_limit']}",
        "learner idle": _share(summary["learner_idle_fraction"]),
        "compilations after warm-up": str(summary["compilations_after_warmup"]),
        "groups": ", ".join(f"{count} {name}" for name, count in groups.items() if count),
        "seconds": f"{summary['seconds']:.0f}",
    }
    if summary["sampler_restarts"]:
        rows["samplers started anew"] = str(summary["sampler_restarts"])
    swaps = summary["swaps"]
    if swaps["step_share"] is not None:
        rows["new weights held up a sampler"] = (
            f"{1e3 * swaps['seconds_mean']:,.2f} ms, {swaps['step_share']:.2%} of a step"
        )
    agreement = summary["agreement"]
    if agreement["worst"] is not None:
        rows["sampler and learner differ by"] = f"{agreement['worst']['max']:.1e} nats at most"
    if agreement["alarms"]:
        rows["alarms"] = f"{agreement['alarms']} of {agreement['checks']} checks of sampler and learner"
    return rows


_COMPARED = ("mean", "p95", "max", "outside_fraction", "k3")


def _agreement(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of sampler and learner; see :func:`summarise_run`."""
    ended = [step for step in steps if "agreement_version" in step]
    found = [step for step in ended if step["agreement_tokens"]]
    last = {name: found[-1][f"agreement_{name}"] for name in ("version", "tokens", *_COMPARED)} if found else None
    return {
        "checks": len(found),
        "no_tokens": len(ended) - len(found),
        "alarms": sum("agreement_alarm" in step for step in found),
        "worst": {name: max(step[f"agreement_{name}"] for step in found) for name in _COMPARED} if found else None,
        "last": last,
    }


def _swaps(totals: Mapping[str, float], steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of weights; see :func:`summarise_run`."""
    count = int(totals["swaps"])
    mean = totals["swap_seconds"] / count if count else None
    step = sum(step["step_seconds"] for step in steps) / len(steps) if steps else None
    return {"count": count, "seconds_mean": mean, "step_share": mean / step if mean is not None and step else None}


def _share(value: float | None) -> str:
    return "not known" if value is None else f"{value:.1%}"
