"""The contract tests know nothing of the sampler behind ``served``: another joins as one more of ``KINDS``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from sampler_examples import Served, in_folder, make_local, make_sglang, make_sglang_jax, write_checkpoint
from sglang_engine import make_engine
from sglang_server import DocumentedServer

from actors.samplers.sglang.engine import SglangEngine

KINDS = ("local", "sglang_jax", "sglang")
FILTERING = ("local", "sglang_jax")
"""Kinds that serve top-k, top-p and min-p; the other refuses them."""


@pytest.fixture(scope="session", params=KINDS)
def served(request: pytest.FixtureRequest) -> Served:
    return request.getfixturevalue(f"served_{request.param}")


@pytest.fixture(scope="session", params=FILTERING)
def filtering(request: pytest.FixtureRequest) -> Served:
    return request.getfixturevalue(f"served_{request.param}")


@pytest.fixture(scope="session")
def served_local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with closing(make_local(model=write_checkpoint(tmp_path_factory.mktemp("local")), filters=True)) as sampler:
        yield Served(sampler)


@pytest.fixture(scope="session")
def served_sglang_jax(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with closing(make_sglang_jax(tmp_path_factory.mktemp("sglang-jax"), filters=True)) as sampler:
        yield Served(sampler)


@pytest.fixture(scope="session")
def documented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocumentedServer]:
    model = write_checkpoint(tmp_path_factory.mktemp("server"))
    with closing(DocumentedServer(make_local(model=model, name="server"))) as server:
        yield server


@pytest.fixture(scope="session")
def served_sglang(documented: DocumentedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("sglang")
    with closing(make_sglang(folder, documented.url)) as sampler:
        yield Served(sampler, in_folder(folder))


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> SglangEngine:
    """SGLang-Jax's, stepped by the tests themselves."""
    return make_engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)
