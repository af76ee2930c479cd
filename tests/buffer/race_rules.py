"""What the processes of the race test share: how they wait for Redis, and how they write down what they did."""

import asyncio
import json
import os
import time
from pathlib import Path

from buffer import BufferUnavailable

PATIENCE_SECONDS = 60
"""Longest wait for anything that must happen; no check depends on how fast the machine is otherwise."""
_PAUSE_SECONDS = 0.1


class Rules:
    """What the test tells its processes: the buffer's address and name, and the bounds of staleness."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.records = self.folder / "learner.records"
        vars(self).update(json.loads((self.folder / "rules.json").read_text()))

    @staticmethod
    def write(folder, **rules):
        (folder / "rules.json").write_text(json.dumps(rules))


class Records:
    """Writes a file of JSON lines. A line that ``add`` has returned from is there, whatever is killed."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, event, **facts):
        os.write(self._file, (json.dumps({"event": event, "time": time.time()} | facts) + "\n").encode())
        os.fsync(self._file)


def recorded(path):
    """What ``Records`` wrote so far; the last line may be half written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def patiently(call, *arguments, **named):
    """Repeat the same call until Redis answers, as learners do."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return call(*arguments, **named)
        except BufferUnavailable:
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_SECONDS)


async def patiently_async(call, *arguments, **named):
    """Repeat the same call until Redis answers, as workers do."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await call(*arguments, **named)
        except BufferUnavailable:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(_PAUSE_SECONDS)
