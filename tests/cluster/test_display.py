import io

import pytest

from cluster.display import MovingSuccess, Pace, PlainDisplay, SilentDisplay, clock, open_display
from cluster.live_display import LiveDisplay, sparkline
from cluster.telemetry import Snapshot

SNAPSHOT: Snapshot = {
    "step": 3,
    "version": 4,
    "success_mean": 0.5,
    "reward_mean": 0.25,
    "staleness_mean": 1.25,
    "staleness_max": 2,
    "staleness_limit": 2,
    "agreement_mean": 4.1e-7,
    "agreement_max": 3.2e-6,
    "learner_idle_fraction": 0.125,
    "sampler_tokens_per_second": 5234.4,
    "samplers_serving": 1,
    "samplers_wanted": 2,
    "episodes_per_second": 21.3,
    "groups_reserved": 12,
    "groups_ready": 14,
    "groups_leased": 16,
    "groups_limit": 48,
}


def lines(stream: io.StringIO) -> list[str]:
    """What was written, without the clock in front."""
    return [line.partition("] ")[2] or line for line in stream.getvalue().splitlines()]


def test_a_stream_that_is_no_terminal_gets_plain_lines():
    assert isinstance(open_display("auto", plain_every_seconds=1, stream=io.StringIO()), PlainDisplay)
    assert isinstance(open_display("rich", plain_every_seconds=1, stream=io.StringIO()), LiveDisplay)
    assert isinstance(open_display("none", plain_every_seconds=1, stream=io.StringIO()), SilentDisplay)


def test_plain_lines_tell_the_phases_and_the_state():
    stream = io.StringIO()
    with PlainDisplay(stream, every_seconds=0) as display:
        display.phase("starting Ray")
        display.phase("warm start", total=40)
        display.progress(40, "loss 1.20")
        display.phase("training", total=3)
        display.update(SNAPSHOT)
        display.outcome("quickstart-1", {"success": "88 %"})
    assert lines(stream) == [
        "starting Ray",
        "warm start, 40 in all",
        "warm start 40/40  loss 1.20",
        "training, 3 in all",
        "step 3/3  version 4  success 50%  reward 0.25  staleness 1.2 (max 2)  idle 12%  tokens/s 5,234"
        "  samplers 1/2  episodes/s 21.3  ETA –",
        "quickstart-1",
        "    success  88 %",
    ]


def test_plain_lines_are_thinned_but_the_last_state_is_never_lost():
    stream = io.StringIO()
    with PlainDisplay(stream, every_seconds=3600) as display:
        display.phase("training", total=100)
        for step in range(1, 51):
            display.update({"step": step})
    assert [line for line in lines(stream) if line.startswith("step")] == ["step 50/100  ETA 0:00"]


def test_the_last_unit_of_a_phase_is_always_printed():
    stream = io.StringIO()
    display = PlainDisplay(stream, every_seconds=3600)
    display.phase("evaluating", total=2)
    display.progress(1)
    display.progress(2)
    assert lines(stream)[-1] == "evaluating 2/2"


def rendered(*snapshots: Snapshot) -> str:
    stream = io.StringIO()
    with LiveDisplay(stream, width=100) as display:
        display.phase("starting Redis")
        display.phase("training", total=150)
        for snapshot in snapshots:
            display.update(snapshot)
    return stream.getvalue()


def test_the_live_display_shows_every_measure():
    text = rendered(SNAPSHOT)
    for part in (
        "starting Redis", "step 3/150", "version 4", "50%", "0.25", "1.2 mean, 2 max of 2", "12%",
        "5,234 tokens/s, 1 of 2 serve", "21.3/s", "12 playing, 14 ready, 16 training", "of 48",
        "4.1e-07 nats, 3.2e-06 max",
    ):  # fmt: skip
        assert part in text


def test_the_live_display_bears_a_state_that_knows_nothing_yet():
    assert "step 0/150" in rendered({"step": 0, "version": 0})


def test_the_live_display_marks_the_phase_that_failed():
    stream = io.StringIO()
    with pytest.raises(RuntimeError), LiveDisplay(stream, width=80) as display:
        display.phase("starting Ray")
        raise RuntimeError
    assert "✗" in stream.getvalue()


def test_moving_success_counts_each_step_once():
    success = MovingSuccess()
    for step, rate in ((1, 0.0), (1, 0.0), (1, 0.0), (2, 1.0)):
        success.add({"step": step, "success_mean": rate})
    assert success.value == 0.5
    for step in range(3, 20):
        success.add({"step": step, "success_mean": 1.0})
    assert success.value == 1.0


def test_pace_extrapolates_the_recent_speed(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    pace = Pace(100)
    pace.mark(0)
    assert pace.remaining is None
    now = 20.0
    pace.mark(10)
    assert pace.remaining == 180.0
    now = 30.0
    assert pace.remaining == 170.0


@pytest.mark.parametrize(("seconds", "text"), [(None, "–"), (5.9, "0:05"), (65, "1:05"), (3725, "1:02:05")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_a_sparkline_covers_the_whole_history():
    assert sparkline([0.0, 0.5, 1.0], 8) == "▁▅█"
    assert sparkline([i / 99 for i in range(100)], 4) == "▂▄▆█"
