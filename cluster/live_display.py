"""The display on a terminal: finished phases scroll away above, what goes on is redrawn in place below."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cluster.display import MovingSuccess, Pace, clock
from cluster.telemetry import Snapshot

REFRESH_PER_SECOND = 4
SPARKLINE_WIDTH = 24
BAR_WIDTH = 36
_BLOCKS = "▁▂▃▄▅▆▇█"


class LiveDisplay:
    """Phases as lines that are ticked off, the training as a panel.

    Args:
        stream: the terminal.
        width: columns; the terminal's own by default.
    """

    def __init__(self, stream: TextIO, *, width: int | None = None) -> None:
        self.console = Console(file=stream, highlight=False, width=width, force_terminal=True)
        self._spinner = Spinner("dots", style="cyan")
        self._name = ""
        self._detail = ""
        self._pace = Pace(None)
        self._snapshot: Snapshot | None = None
        self._success = MovingSuccess()
        self._live = Live(
            console=self.console, get_renderable=self._render, refresh_per_second=REFRESH_PER_SECOND, transient=True
        )

    def phase(self, name: str, total: int | None = None) -> None:
        """Tick off the phase before and show the new one."""
        self._end_phase("[green]✓[/]")
        self._name, self._detail, self._pace = name, "", Pace(total)

    def progress(self, done: int, detail: str = "") -> None:
        """Move the bar of the phase."""
        self._pace.mark(done)
        self._detail = detail

    def update(self, snapshot: Snapshot) -> None:
        """Redraw the panel of the training."""
        self._success.add(snapshot)
        self._pace.mark(snapshot.get("step", 0))
        self._snapshot = snapshot

    def note(self, text: str) -> None:
        """Print the text above."""
        self.console.print(Text("· ", style="cyan") + Text(text))

    def outcome(self, title: str, rows: Mapping[str, str]) -> None:
        """Tick off the last phase and print a table."""
        self._end_phase("[green]✓[/]")
        table = Table.grid(padding=(0, 3))
        for name, value in rows.items():
            table.add_row(Text(name, style="dim"), Text(value))
        self.console.print(Panel(table, title=Text(title, style="bold"), title_align="left", expand=False))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_phase("[green]✓[/]" if kind is None else "[red]✗[/]")
        self._live.stop()

    def _end_phase(self, mark: str) -> None:
        if not self._name:
            return
        line = Table.grid(padding=(0, 1))
        line.add_row(mark, self._name, Text(self._detail, style="dim"), Text(clock(self._pace.elapsed), style="dim"))
        snapshot, self._name, self._snapshot = self._snapshot, "", None
        if snapshot is not None:
            self.console.print(self._panel(snapshot))
        self.console.print(line)

    def _render(self) -> RenderableType:
        if self._snapshot is not None:
            return self._panel(self._snapshot)
        if not self._name:
            return Text("")
        line = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [self._spinner, self._name]
        if self._pace.total is not None:
            cells += [_bar(self._pace), f"{self._pace.done}/{self._pace.total}"]
        cells += [Text(self._detail, style="dim"), Text(clock(self._pace.elapsed), style="dim")]
        line.add_row(*cells)
        return line

    def _panel(self, snapshot: Snapshot) -> Panel:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {self._pace.done}/{self._pace.total}", style="bold"),
            _bar(self._pace),
            Text(f"elapsed {clock(self._pace.elapsed)}", style="dim"),
            Text(f"ETA {clock(self._pace.remaining)}", style="dim"),
        )
        body = Table.grid(padding=(0, 3))
        for row in _rows(snapshot, self._success):
            body.add_row(*row)
        title = Text.assemble((" training ", "bold cyan"), (f"version {snapshot.get('version', 0)} ", "dim"))
        return Panel(Group(head, Text(""), body), title=title, title_align="left", border_style="cyan", expand=False)


def sparkline(values: list[float], width: int) -> str:
    """The newest ``width`` points of values in [0, 1], thinned to cover the whole history."""
    if len(values) > width:
        values = [values[int((i + 1) * len(values) / width) - 1] for i in range(width)]
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int(max(0.0, value) * len(_BLOCKS)))] for value in values)


def _bar(pace: Pace) -> ProgressBar:
    return ProgressBar(
        total=pace.total or 1, completed=pace.done, width=BAR_WIDTH, complete_style="cyan", finished_style="green"
    )


def _rows(snapshot: Snapshot, success: MovingSuccess) -> list[tuple[Text, Text, Text, Text]]:
    """Two pairs of label and value per line: the policy left, the machinery right."""
    rate, reward = success.value, snapshot.get("reward_mean")
    idle, limit = snapshot.get("learner_idle_fraction"), snapshot.get("staleness_limit")
    mean, oldest = snapshot.get("staleness_mean"), snapshot.get("staleness_max")
    tokens, episodes = snapshot.get("sampler_tokens_per_second"), snapshot.get("episodes_per_second")
    apart, furthest = snapshot.get("agreement_mean"), snapshot.get("agreement_max")
    serving, wanted = snapshot.get("samplers_serving"), snapshot.get("samplers_wanted")
    of = "" if serving is None else f", {serving} of {wanted} serve"
    outstanding = [snapshot.get("groups_reserved"), snapshot.get("groups_ready"), snapshot.get("groups_leased")]
    curve = Text(sparkline(success.history, SPARKLINE_WIDTH), style="green")
    return [
        (*_pair("success", rate, "{:.0%}", "bold green"), *_pair("learner idle", idle, "{:.0%}", _idle_style(idle))),
        (Text(""), curve, *_pair("samplers", tokens, "{:,.0f} tokens/s" + of, "" if serving == wanted else "yellow")),
        (*_pair("reward", reward, "{:.2f}"), *_pair("episodes", episodes, "{:.1f}/s")),
        (
            *_pair("staleness", mean, "{:.1f} mean" + (f", {oldest} max of {limit}" if oldest is not None else "")),
            Text("buffer", style="dim"),
            Text(
                "–"
                if None in outstanding
                else "{} playing, {} ready, {} training".format(*outstanding)
                + (f" of {snapshot['groups_limit']}" if "groups_limit" in snapshot else "")
            ),
        ),
        (
            *_pair("agreement", apart, "{:.1e} nats" + (f", {furthest:.1e} max" if furthest is not None else "")),
            Text(""),
            Text(""),
        ),
    ]


def _pair(label: str, value: float | None, form: str, style: str = "") -> tuple[Text, Text]:
    return Text(label, style="dim"), Text("–" if value is None else form.format(value), style=style)


def _idle_style(idle: float | None) -> str:
    """The headline metric: green while the wheel turns, red when it mostly waits."""
    if idle is None:
        return ""
    return "green" if idle < 0.2 else "yellow" if idle < 0.5 else "red"
