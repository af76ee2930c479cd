"""What every section of the configuration is made of: its base class, and the types that several of them use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _absolute(path: Path) -> Path:
    # Actors may run elsewhere, with another working directory.
    return Path(os.path.expanduser(path)).absolute()


Seconds = Annotated[float, Field(gt=0, le=1e6)]  # a socket refuses to wait for 2^31 ms
Cpus = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]


class Section(BaseModel):
    """A part of the configuration: immutable, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
