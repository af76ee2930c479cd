import subprocess

import pytest
from jobs import QUICKSTART, SMALL, command, environment


@pytest.fixture
def train(tmp_path):
    """Runs ``headrace train`` to its end; returns the finished process."""

    def run(*overrides, timeout=280):
        return subprocess.run(
            command("train", QUICKSTART, *SMALL, f"run.folder={tmp_path}", *overrides),
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run
