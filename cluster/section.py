"""What every section of the configuration is made of: its base class, and the types that several of them use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _custom_resources(resources: dict[str, float]) -> dict[str, float]:
    # What Ray itself refuses, but when Redis and Ray are up and a run folder is there.
    if "CPU" in resources:
        raise ValueError("expected resources other than CPU, of which `cpus` says how many")
    if "GPU" in resources:
        raise ValueError("expected TPU or resources of your own: JAX runs on TPUs or CPUs here")
    if resources.get("TPU", 1) not in (1, 2, 4, 8):
        raise ValueError("expected 1, 2, 4 or 8 TPU chips for each process, as a host has them")
    return resources


def _absolute(path: Path) -> Path:
    # Actors may run elsewhere, with another working directory.
    return Path(os.path.expanduser(path)).absolute()


Seconds = Annotated[float, Field(gt=0, le=1e6)]  # a socket refuses to wait for 2^31 ms
Cpus = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
CustomResources = Annotated[dict[str, Annotated[float, Field(gt=0)]], AfterValidator(_custom_resources)]
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]


class Section(BaseModel):
    """A part of the configuration: immutable, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
