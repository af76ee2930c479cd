"""Imports point one way: cluster → {actors, learner} → buffer, and each library has its place."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("actors", "buffer", "cluster", "learner")

ALLOWED = {
    "cluster": {"actors", "buffer", "cluster", "learner"},
    "actors": {"actors", "buffer"},
    "learner": {"buffer", "learner"},
    "buffer": {"buffer"},
}
LOCAL_SAMPLER = ROOT / "actors" / "samplers" / "local"


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(source: str) -> Iterator[str]:
    """Every module that the source names in an import, at the top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which package is meant"
            yield node.module or ""


def forbidden(path: Path, package: str, source: str) -> list[str]:
    found = []
    for name in imports(source):
        top = name.partition(".")[0]
        if top not in PACKAGES or top in ALLOWED[package]:
            continue
        if LOCAL_SAMPLER in path.parents and (name == "learner.models" or name.startswith("learner.models.")):
            continue
        found.append(name)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_lies_downstream(package):
    assert modules(package)
    offences = {
        str(path.relative_to(ROOT)): names
        for path in modules(package)
        if (names := forbidden(path, package, path.read_text()))
    }
    assert not offences


@pytest.mark.parametrize(
    ("package", "path", "source", "offence"),
    [
        ("learner", "learner/learner.py", "from actors.worker import RolloutWorker", "actors.worker"),
        ("buffer", "buffer/client.py", "def f():\n    import cluster.config", "cluster.config"),
        ("actors", "actors/worker.py", "from learner.models import decoder", "learner.models"),
        ("actors", "actors/samplers/local/engine.py", "import learner.packing", "learner.packing"),
    ],
)
def test_an_import_against_the_arrow_is_noticed(package, path, source, offence):
    assert forbidden(ROOT / path, package, source) == [offence]


def test_the_local_sampler_may_import_the_models():
    assert not forbidden(LOCAL_SAMPLER / "engine.py", "actors", "from learner.models.decoder import Decoder")


@pytest.mark.parametrize(
    ("package", "libraries"),
    [
        ("buffer", {"jax", "jaxlib", "flax", "optax", "orbax", "ray"}),
        ("actors", {"transformers", "torch"}),
        ("learner", {"transformers", "torch", "redis"}),
        ("cluster", {"transformers", "torch"}),
    ],
)
def test_a_package_stays_free_of_libraries_that_are_not_its_business(package, libraries):
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in modules(package)
        for name in imports(path.read_text())
        if name.partition(".")[0] in libraries
    }
    assert not found
