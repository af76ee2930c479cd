"""``python -m benchmarks.objectives``: which objective learns best from stale trajectories, on the quickstart's task.

Every objective is trained at every staleness on every seed, for equally many steps of equally many trajectories, by
``headrace train`` itself; without staleness only the first, because all ratios are 1 there and the gradients the same.
The warm start is made once per seed and shared. What is compared is the success of greedy play on tasks that never
occur in training, and the mean success of the last quarter of the training's episodes.

Runs that are finished are kept under ``--folder`` and not made again, so a comparison can be interrupted and extended.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from cluster.runfolder import read_metrics

CONFIG = "configs/quickstart.yaml"
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "ppo_clip": (),
    "decoupled_ppo": ("objective.name=decoupled_ppo", "objective.proximal=interpolated"),
    "cispo": ("objective.name=cispo",),
}


def main() -> None:
    """Make the runs that are missing, print a table, and one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(prog="benchmarks.objectives", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/objectives"), help="where the runs are kept")
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 2, 4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for seed in arguments.seeds:
        model = warm_start(arguments.folder, seed)
        for staleness in arguments.staleness:
            for name in arguments.objectives if staleness else arguments.objectives[:1]:
                outcome = compare(arguments.folder, model, name, staleness, seed, arguments.steps)
                results.setdefault(name, {}).setdefault(str(staleness), []).append(outcome)
                print(f"{name:14} staleness {staleness} seed {seed} {outcome}", flush=True)
    print_table(results)
    if arguments.json:
        print(json.dumps({"steps": arguments.steps, "seeds": arguments.seeds, "results": results}))


def warm_start(folder: Path, seed: int) -> Path:
    """The model folder that all runs of a seed begin with."""
    name = f"warm-{seed}"
    _headrace("sft", folder, name, (f"run.seed={seed}",), done=folder / name / "initial_model" / "config.json")
    return folder / name / "initial_model"


def compare(folder: Path, model: Path, objective: str, staleness: int, seed: int, steps: int) -> dict[str, float]:
    """Numbers of one run, which is made unless it exists."""
    name = f"{objective}-s{staleness}-seed{seed}-{steps}"
    overrides = (
        f"run.seed={seed}",
        f"model.path={model}",
        "model.architecture=null",
        "model.warm_start=null",
        f"buffer.max_staleness={staleness}",
        f"learner.steps={steps}",
        *OBJECTIVES[objective],
    )
    _headrace("train", folder, name, overrides, done=folder / name / "summary.json")
    records = read_metrics(folder / name / "metrics.jsonl")
    made = [record for record in records if record["kind"] == "step"]
    before, *_, after = [record["success_mean"] for record in records if record["kind"] == "evaluation"]
    last = made[-len(made) // 4 :]
    return {
        "success_before": round(before, 3),
        "success_after": round(after, 3),
        "training_success": round(fmean(record["success_mean"] for record in last), 3),
        "staleness_mean": round(fmean(record["staleness_mean"] for record in made), 2),
        "effective_sample_size": round(fmean(record["effective_sample_size"] for record in made), 3),
        "trained_tokens": sum(record["trained_tokens"] for record in made),
    }


def print_table(results: dict[str, dict[str, list[dict[str, float]]]]) -> None:
    """Means over seeds, and lowest and highest."""
    for name, by_staleness in results.items():
        for staleness, outcomes in by_staleness.items():
            after = [outcome["success_after"] for outcome in outcomes]
            training = fmean(outcome["training_success"] for outcome in outcomes)
            print(
                f"{name:14} staleness {staleness}: after {fmean(after):.3f} ({min(after):.3f} to {max(after):.3f}), "
                f"last quarter of training {training:.3f}"
            )


def _headrace(command: str, folder: Path, name: str, overrides: Sequence[str], *, done: Path) -> None:
    if done.exists():
        return
    shutil.rmtree(folder / name, ignore_errors=True)  # an interrupted run is made again from its beginning
    settings: list[Any] = [f"run.folder={folder}", f"run.name={name}", "telemetry.display=plain", *overrides]
    subprocess.run([sys.executable, "-m", "cluster", command, CONFIG, *settings], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
