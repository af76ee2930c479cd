"""Names of the keys of one run, and which payload instance holds which payload."""

from __future__ import annotations

import re
import zlib

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_CONTROL = re.compile(r"\{headrace:([A-Za-z0-9._-]{1,128})\}:control")

ANY_CONTROL = "{headrace:*}:control"
"""Pattern of the control keys of all runs."""


class Keys:
    """Names of the keys of one run. All carry one hash tag, so a cluster keeps them in one slot."""

    def __init__(self, run: str) -> None:
        if not _NAME.fullmatch(run):
            raise ValueError(f"run is {run!r}; expected 1 to 128 letters, digits, '.', '_' or '-': rename the run")
        self.run = run
        self.prefix = f"{{headrace:{run}}}:"
        self.control = f"{self.prefix}control"
        self.garbage = f"{self.prefix}garbage"
        self.journal = f"{self.prefix}journal"

    def payload(self, group: str, index: int, nonce: str) -> str:
        """Key of a member's bytes; the nonce makes it one of its own for each commit."""
        return f"{self.prefix}payload:{group}:{index}:{nonce}"

    def quarantined(self, group: str, index: int, nonce: str) -> str:
        """Key of a payload that could not be decoded."""
        return f"{self.prefix}quarantine:{group}:{index}:{nonce}"

    def wake(self, whom: str) -> str:
        """List on which ``whom`` (``ready``, ``lease`` or ``slots``) blocks."""
        return f"{self.prefix}wake:{whom}"


def instance_of(key: str, instances: int) -> int:
    """Position of the payload instance that holds the payload ``key``: one for all members of a group."""
    group = key.rsplit(":", 2)[0].rsplit(":", 1)[1]
    return zlib.crc32(group.encode()) % instances


def run_of(control: str) -> str | None:
    """Name of the run whose control key this is; None if it is none."""
    match = _CONTROL.fullmatch(control)
    return match[1] if match else None
