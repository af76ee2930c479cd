"""What docs/buffer.md shows works as shown."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_runs(tmp_path):
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "buffer.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{example}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("version 1, 0 of at most 3 groups outstanding")


def test_the_tests_that_hold_the_invariants_are_there():
    named = re.findall(r"`(test_\w+\.py)(?:::(test_\w+)\*?)?", (ROOT / "docs" / "buffer.md").read_text())
    assert len(named) > 10
    for file, test in named:
        path = ROOT / "tests" / "buffer" / file
        assert path.is_file(), file
        assert test in path.read_text(), f"{file}::{test}"
