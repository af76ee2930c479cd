"""The report: tables for people, and one JSON object for machines."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.batch import Batch
from benchmarks.scaling import Costs
from benchmarks.throughput import CONTENDERS, Latency, Throughput
from benchmarks.workload import BATCH_GROUPS, GROUP_SIZE, MAX_GROUPS

_RATIOS = {"ratio_to_raw": "raw_redis", "ratio_to_ray_queue": "ray_queue", "ratio_to_stream": "redis_stream_pickle"}
"""MB/s of headrace in units of another contender's, by their names in the JSON object."""

_TARGETS = {
    ("ratio_to_raw", 50): 0.5,
    ("ratio_to_raw", 600): 0.75,
    ("ratio_to_ray_queue", 50): 5.0,
    ("ratio_to_ray_queue", 600): 2.0,
    ("ratio_to_stream", 50): 0.7,
}
_MOST_BATCH_RATIO = 1.3

_NOTES = f"""\
MB/s are of encoded bytes, 1 MB = 1e6 bytes. Of several rounds the median one by traj/s; in brackets the slowest and
the fastest. CPU s/GB: of the server, for a GB in and out. At most {MAX_GROUPS} groups are written and not yet read.
A write call is a group of {GROUP_SIZE}; only in ray_queue does its time hold waiting for room, since put waits.
A read call is a lease of {BATCH_GROUPS * GROUP_SIZE} in headrace, one trajectory in ray_queue, else a group; its time
holds waiting for the writers where the call waits: in headrace, redis_stream_pickle and ray_queue."""


@dataclass(slots=True)
class Report:
    """What was measured.

    Attributes:
        rounds: what each contender did in each round, by kilobytes and name; its median round counts.
        batch: the part lease_100mb.
        costs: the part scaling, by stored groups.
    """

    rounds: dict[int, dict[str, list[Throughput]]] = field(default_factory=dict)
    batch: Batch | None = None
    costs: dict[int, Costs] = field(default_factory=dict)

    def add(self, contender: str, throughput: Throughput) -> None:
        """Add what a contender did in one round at one size."""
        self.rounds.setdefault(throughput.kilobytes, {}).setdefault(contender, []).append(throughput)

    def median(self, contender: str) -> dict[int, Throughput]:
        """Return a contender's median round by kilobytes, where it was measured."""
        return {
            kilobytes: sorted(by_name[contender], key=lambda one: one.read)[(len(by_name[contender]) - 1) // 2]
            for kilobytes, by_name in self.rounds.items()
            if contender in by_name
        }

    def ratios(self, name: str) -> dict[int, float]:
        """Return one of ``_RATIOS`` by kilobytes, where both were measured."""
        others = self.median(_RATIOS[name])
        return {
            kilobytes: ours.mb_out / others[kilobytes].mb_out
            for kilobytes, ours in self.median("headrace").items()
            if kilobytes in others
        }

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object; what was not measured is not in it."""
        result: dict[str, Any] = {str(kilobytes): {} for kilobytes in self.rounds}
        for contender in CONTENDERS:
            for kilobytes, throughput in self.median(contender).items():
                result[str(kilobytes)][contender] = {
                    "mb_s": round(throughput.mb_out, 2),
                    "traj_s": round(throughput.read, 1),
                    "p99_ms": round(throughput.write.p99, 3),
                }
        for name in _RATIOS:
            if ratios := self.ratios(name):
                result[name] = {str(kilobytes): round(ratio, 3) for kilobytes, ratio in ratios.items()}
        if self.batch:
            result["lease_100mb"] = {
                "headrace_ms": round(self.batch.headrace_ms, 2),
                "pipelined_get_ms": round(self.batch.pipelined_get_ms, 2),
                "ratio": round(self.batch.ratio, 3),
            }
        if self.costs:
            result["scaling"] = {
                str(stored): {name: round(cost, 1) for name, cost in costs.items()}
                for stored, costs in self.costs.items()
            }
        return result

    def print(self, console: Console) -> None:
        """Print every table that has rows."""
        for kilobytes in self.rounds:
            console.print(self._throughput_table(kilobytes))
        if self.rounds:
            console.print(_NOTES, highlight=False)
        if self.batch:
            rows = [[f"{self.batch.headrace_ms:.1f}", f"{self.batch.pipelined_get_ms:.1f}", f"{self.batch.ratio:.2f}"]]
            console.print(_table("256 trajectories, 100 MB, best of 5", ["lease, decode ms", "GET ms", "ratio"], rows))
        if self.costs:
            console.print(_scaling_table(self.costs))
        if rows := self._target_rows():
            console.print(_table("Targets", ["", "measured", "target", ""], rows))

    def _throughput_table(self, kilobytes: int) -> Table:
        columns = ["", "traj/s", "MB/s in", "MB/s out", "write ms p50/p99/p99.9", "calls", "read ms p50/p99/p99.9"]
        rows = []
        for contender in CONTENDERS:
            if one := self.median(contender).get(kilobytes):
                rates = [each.mb_out for each in self.rounds[kilobytes][contender]]
                rows.append(
                    [
                        contender,
                        f"{one.read:.0f}",
                        f"{one.mb_in:.1f}",
                        f"{one.mb_out:.1f} ({min(rates):.0f}–{max(rates):.0f})",
                        *_latency(one.write),
                        *_latency(one.lease),
                        "–" if one.redis_cpu is None else f"{100 * one.redis_cpu:.0f} %",
                        "–" if one.redis_cpu_per_gb is None else f"{one.redis_cpu_per_gb:.2f}",
                    ]
                )
        return _table(f"{kilobytes} KB trajectories", [*columns, "calls", "Redis CPU", "CPU s/GB"], rows)

    def _target_rows(self) -> list[list[str]]:
        rows = []
        for (name, kilobytes), least in _TARGETS.items():
            ratio = self.ratios(name).get(kilobytes)
            if ratio is not None:
                met = "met" if ratio >= least else "missed"
                rows.append([f"{name}, {kilobytes} KB", f"{ratio:.2f}", f"≥ {least:g}", met])
        if self.batch:
            met = "met" if self.batch.ratio <= _MOST_BATCH_RATIO else "missed"
            rows.append(["lease_100mb ratio", f"{self.batch.ratio:.2f}", f"≤ {_MOST_BATCH_RATIO:g}", met])
        return rows


def print_machine(console: Console, redis_version: str, seed: int) -> None:
    """Print what a reader must know to compare these numbers with others."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("redis", "hiredis", "numpy", "ray"))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    facts = {
        "machine": f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}",
        "load average": f"{load} (1, 5, 15 minutes, at the end)",
        "software": f"Redis {redis_version}, Python {platform.python_version()}, {packages}",
        "seed": str(seed),
        "command": " ".join(["python -m benchmarks.buffer", *sys.argv[1:]]),
    }
    for name, fact in facts.items():
        console.print(f"{name}: {fact}", highlight=False, markup=False, soft_wrap=True)


def _scaling_table(costs: dict[int, Costs]) -> Table:
    names = list(next(iter(costs.values())))
    columns = ["stored groups", *(name.replace("_us", " µs") for name in names)]
    rows = [[f"{stored:,}", *(f"{cost[name]:.0f}" for name in names)] for stored, cost in costs.items()]
    return _table(f"Median cost of a call; groups of one small trajectory, leases of {BATCH_GROUPS}", columns, rows)


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left", no_wrap=not position)
    for row in rows:
        table.add_row(*row)
    return table


def _latency(latency: Latency) -> tuple[str, str]:
    values = " / ".join(f"{value:.3g}" for value in (latency.p50, latency.p99, latency.p999))
    return values, str(latency.calls)


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
