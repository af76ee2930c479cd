"""``headrace sft``: the warm start alone, with its model as the result."""

from __future__ import annotations

from contextlib import ExitStack

from cluster.config import Config
from cluster.display import open_display
from cluster.errors import ConfigError
from cluster.inputs import check_inputs
from cluster.policy import prepare_policy
from cluster.runfolder import RunFolder
from cluster.session import Stopped, session


def sft(config: Config) -> int:
    """Imitate the conversations of ``model.warm_start``; returns the exit status.

    Raises:
        ConfigError: there is no such section, or its conversations cannot be used.
    """
    settings = config.telemetry
    if config.model.warm_start is None:
        raise ConfigError("model.warm_start=null: expected a section that says what to imitate, and for how many steps")
    check_inputs(config)
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder.open(config))
        display = stack.enter_context(open_display(settings.display, plain_every_seconds=settings.plain_every_seconds))
        display.note(f"run {folder.name}, kept in {folder.root}")
        display.phase("starting Ray")
        work = stack.enter_context(session(config))
        try:
            model = prepare_policy(config, folder, display, work.watch)
        except Stopped:
            display.note("stopped; the warm start begins anew next time")
            return work.stop.exit_status
        losses = [record["loss"] for record in folder.read_metrics() if record["kind"] == "warm_start"]
        display.outcome("trained", {"model": str(model), "last loss": f"{losses[-1]:.3f}" if losses else "not known"})
    return 0
