"""The learning curve: what the policy learned, and whether the machinery kept up."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.display import SUCCESS_WINDOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAIN, EVALUATION, REWARD, QUIET = "#1b7f8c", "#d1495b", "#8d6a9f", "#9aa5ab"


def plot_learning_curve(records: Sequence[Mapping[str, Any]], path: Path, *, title: str, staleness_limit: int) -> None:
    """Draw the records of ``metrics.jsonl`` as a PNG.

    Args:
        records: ``step`` and ``evaluation`` records; of several with the same step the last counts, because a
            resumed run repeats the steps after its checkpoint.
        path: the file to write; an earlier one is replaced at once.
        title: name of the run.
        staleness_limit: ``buffer.max_staleness``, drawn as a line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = _by_step(records, "step")
    evaluations = _by_step(records, "evaluation")
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    learned, staleness, idle = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 1])
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    _draw_learning(learned, steps, evaluations)
    _draw_staleness(staleness, steps, staleness_limit)
    _draw_idle(idle, steps)
    idle.set_xlabel("step")
    for axes in (learned, staleness, idle):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e9eb", linewidth=0.8)
        axes.set_axisbelow(True)
    staged = path.with_name(path.name + ".new")
    figure.savefig(staged, format="png", dpi=130)
    os.replace(staged, path)


def _draw_learning(axes: Axes, steps: list[Mapping[str, Any]], evaluations: list[Mapping[str, Any]]) -> None:
    at, window = [record["step"] for record in steps], f", mean of {SUCCESS_WINDOW} steps"
    success, reward = ([record[name] for record in steps] for name in ("success_mean", "reward_mean"))
    axes.plot(at, success, color=TRAIN, alpha=0.25, linewidth=1)
    axes.plot(at, _moving_mean(success), color=TRAIN, linewidth=2, label="training" + window)
    if reward != success:  # where success is the reward, one line says both
        axes.plot(at, _moving_mean(reward), color=REWARD, linewidth=1.5, label="reward" + window)
    if evaluations:
        where, value = ([record[name] for record in evaluations] for name in ("step", "success_mean"))
        episodes = evaluations[-1]["episodes"]
        axes.plot(where, value, "o--", color=EVALUATION, linewidth=1, label=f"evaluation, {episodes} tasks")
        for step, rate in zip(where, value, strict=True):
            axes.annotate(
                f"{rate:.0%}", (step, rate), textcoords="offset points", xytext=(0, 9), ha="center",
                color=EVALUATION, fontweight="bold",
            )  # fmt: skip
    axes.set_ylim(min(0.0, *reward, 0.0), 1.08)
    axes.set_ylabel("success")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False)


def _draw_staleness(axes: Axes, steps: list[Mapping[str, Any]], limit: int) -> None:
    at = [record["step"] for record in steps]
    mean, largest = ([record[name] for record in steps] for name in ("staleness_mean", "staleness_max"))
    axes.plot(at, largest, color=QUIET, linewidth=1, drawstyle="steps-mid", label="largest")
    axes.plot(at, mean, color=TRAIN, linewidth=1.5, label="mean")
    axes.axhline(limit, color=EVALUATION, linestyle=":", linewidth=1.2, label=f"limit {limit}")
    axes.set_ylim(-0.1, max(limit, 1) * 1.25)
    axes.set_ylabel("staleness\n(versions)")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


def _draw_idle(axes: Axes, steps: list[Mapping[str, Any]]) -> None:
    at = [record["step"] for record in steps]
    idle, busy = ([record[name] for record in steps] for name in ("idle_seconds", "step_seconds"))
    axes.bar(at, busy, width=1.0, color=TRAIN, alpha=0.7, label="training")
    axes.bar(at, idle, width=1.0, bottom=busy, color=QUIET, label="waiting")
    axes.set_ylabel("seconds\nper step")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


def _by_step(records: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    newest = {record["step"]: record for record in records if record["kind"] == kind}
    return [newest[step] for step in sorted(newest)]


def _moving_mean(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, i + 1 - SUCCESS_WINDOW) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
