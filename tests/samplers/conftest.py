"""The contract tests know nothing of the sampler behind ``served``: another joins as one more of ``MAKERS``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from sampler_examples import Served, make_local, make_sglang_jax

MAKERS: dict[str, Callable[[], Any]] = {"local": make_local, "sglang_jax": make_sglang_jax}


@pytest.fixture(scope="session", params=list(MAKERS))
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    sampler = MAKERS[request.param]()
    yield Served(sampler)
    sampler.close()


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)
