"""The errors a person can mend: reported as one line, without a traceback, with exit status 2."""

from __future__ import annotations

import sys


class ConfigError(ValueError):
    """The configuration cannot be used; each line names a key, its value, what is expected and what to do."""


class RunError(RuntimeError):
    """The run folder cannot be used as asked: it exists, is missing, is in use, or belongs to another model."""


class RayUnavailable(RuntimeError):
    """The Ray cluster that was asked for does not answer."""


class ServiceDied(RuntimeError):
    """The process of a service ended in the middle of a run: reported as one line, with exit status 1."""


class RunEnded(RuntimeError):
    """A run ended itself, as it was told to: reported as one line, with exit status 1."""


_ELSEWHERE = (
    ("actors.chat", "ChatError"),
    ("actors.environments", "EnvironmentSetupError"),
    ("actors.samplers.sglang.release", "ReleaseError"),
    ("buffer.errors", "BufferUnavailable"),
    ("buffer.errors", "FormatError"),
    ("buffer.errors", "NotOpen"),
    ("buffer.errors", "PortInUse"),
    ("buffer.errors", "ServerError"),
    ("cluster.waiting", "StartError"),
    ("learner.mesh", "MeshError"),
    ("learner.models.config", "ModelError"),
    ("learner.planning.chips", "PlanError"),
)


def user_errors() -> tuple[type[BaseException], ...]:
    """The errors a person can mend by changing what they typed or started.

    Those of other packages count once their module is loaded: before that nobody can have raised
    them, and a mistake in the configuration is told without waiting for imports.
    """
    loaded = [getattr(sys.modules[module], name) for module, name in _ELSEWHERE if module in sys.modules]
    return (ConfigError, RunError, RayUnavailable, *loaded)


def is_mendable(error: BaseException) -> bool:
    """Whether a person can mend ``error`` by changing what they typed or started."""
    if isinstance(error, user_errors()):
        return True
    # The plain BufferError is Redis refusing a call, as a server without Lua does; its subclasses speak for themselves.
    buffer_errors = sys.modules.get("buffer.errors")
    return buffer_errors is not None and type(error) is buffer_errors.BufferError


def root_cause(error: BaseException) -> BaseException:
    """The exception raised inside a Ray actor, if ``error`` is Ray's wrapping of one; else ``error``."""
    if "ray" in sys.modules:
        from ray.exceptions import RayTaskError

        if isinstance(error, RayTaskError):
            return error.cause
    return error
