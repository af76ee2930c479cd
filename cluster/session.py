"""What every command has around its work: Ray, and the signals that ask it to stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.config import Config
from cluster.ray_runtime import ray_runtime
from cluster.services import cpus_of
from cluster.signals import StopRequest, stop_on_signals


class Stopped(Exception):
    """The command was asked to stop, and there is nothing to finish."""


class Session:
    """A command at work.

    Attributes:
        stop: whether somebody asked it to stop.
        logs: folder with the logs of all actors, on the machine of Ray's head.
        shortage: what Ray lacks for this command's actors, which wait until a node brings it; None if nothing.
    """

    def __init__(self, stop: StopRequest, logs: str, shortage: str | None) -> None:
        self.stop = stop
        self.logs = logs
        self.shortage = shortage

    def watch(self) -> None:
        """Raise Stopped if somebody asked to stop."""
        if self.stop.requested.is_set():
            raise Stopped


@contextmanager
def session(config: Config) -> Iterator[Session]:
    """Ray for the length of the block, and signals turned into a request to stop.

    Raises:
        RayUnavailable: the Ray that was asked for does not answer.
    """
    telemetry = config.telemetry
    ray = ray_runtime(cpus=cpus_of(config), dashboard=telemetry.dashboard, metrics_port=telemetry.metrics_port)
    with ray as runtime, stop_on_signals() as stop:
        asked = cpus_of(config)
        shortage = None
        if asked > runtime.cpus:
            shortage = (
                f"the Ray cluster has {runtime.cpus} CPUs and the run asks for {asked:g}: it waits for more nodes; "
                "learner.cpus, sampler.cpus and actors.cpus say how many it asks for"
            )
        yield Session(stop, f"{runtime.session_folder}/logs", shortage)
