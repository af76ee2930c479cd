import struct
from pathlib import Path
from typing import Any

import pytest

from cluster.plots import plot_learning_curve


def step(number: int, success: float) -> dict[str, Any]:
    return {
        "kind": "step", "step": number, "success_mean": success, "reward_mean": success, "staleness_mean": 0.5,
        "staleness_max": 2, "idle_seconds": 0.1, "step_seconds": 1.0,
    }  # fmt: skip


def evaluation(number: int, success: float) -> dict[str, Any]:
    return {"kind": "evaluation", "step": number, "success_mean": success, "reward_mean": success, "episodes": 256}


def draw(path: Path, records: list[dict[str, Any]]) -> bytes:
    plot_learning_curve(records, path, title="quickstart-1", staleness_limit=2)
    return path.read_bytes()


def test_the_learning_curve_is_a_picture_of_readable_size(tmp_path):
    picture = draw(tmp_path / "curve.png", [evaluation(0, 0.3), step(1, 0.3), step(2, 0.5), evaluation(2, 0.8)])
    assert picture.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", picture[16:24])
    assert width >= 1000 and height >= 800
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]


@pytest.mark.parametrize("records", [[], [evaluation(0, 0.3)], [step(1, 0.3)]], ids=["none", "evaluation", "step"])
def test_a_run_that_was_stopped_early_has_a_picture_too(tmp_path, records):
    assert draw(tmp_path / "curve.png", records).startswith(b"\x89PNG")


def test_steps_repeated_after_a_resume_count_once(tmp_path):
    once = draw(tmp_path / "a.png", [step(1, 0.3), step(2, 0.6)])
    assert draw(tmp_path / "b.png", [step(1, 0.3), step(2, 0.1), step(2, 0.6)]) == once
    assert draw(tmp_path / "c.png", [step(1, 0.3), step(2, 0.1)]) != once


def test_warm_start_records_are_no_part_of_the_curve(tmp_path):
    plain = draw(tmp_path / "a.png", [step(1, 0.3)])
    assert draw(tmp_path / "b.png", [{"kind": "warm_start", "step": 1, "loss": 2.0}, step(1, 0.3)]) == plain
