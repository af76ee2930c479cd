import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
}


@pytest.mark.parametrize("extra", ["", "cpu", "tpu", "dev", "sampler"])
def test_the_tested_versions_are_within_the_bounds(extra):
    wanted = PROJECT["dependencies"] if not extra else PROJECT["optional-dependencies"][extra]
    for text in wanted:
        requirement = Requirement(text)
        pinned = PINS[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned, prereleases=True), f"{text} excludes the tested {pinned}"


def test_nothing_names_an_address_to_install_from():
    for name in ("constraints.txt", "pyproject.toml", "Makefile", ".ci/run", ".ci/find-python"):
        text = (ROOT / name).read_text()
        assert not re.search(r"index-url|find-links|file://", text), name


def find_python(path: Path, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(ROOT / ".ci" / "find-python")],
        env={"PATH": str(path), "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def tools(tmp_path):
    """A PATH with a shell and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("sh", "cat", "dirname"):
        found = shutil.which(tool)
        assert found
        (folder / tool).symlink_to(found)
    return folder


def script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_without_a_python_make_says_what_to_install(tools, tmp_path):
    done = find_python(tools, tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "no Python 3.12 or 3.13" in done.stderr
    assert "apt install python3.12 python3.12-venv" in done.stderr


def test_a_python_that_refuses_to_run_is_passed_over(tools, tmp_path):
    script(tools / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    script(tools / "python3", f'exec {os.path.realpath(sys.executable)} "$@"')
    assert find_python(tools, tmp_path).stdout.strip()


def test_a_python_of_a_version_manager_is_found(tools, tmp_path):
    real = os.path.realpath(sys.executable)
    script(tmp_path / ".pyenv" / "versions" / "3.12.9" / "bin" / "python", f'exec {real} "$@"')
    assert find_python(tools, tmp_path).stdout.strip()
