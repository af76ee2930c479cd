"""The Lua scripts: each with its digest, as the server at hand wants it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Script:
    """One transition: its name, its whole source, and the digest that Redis knows it by."""

    name: str
    source: str
    digest: str


@cache
def script(name: str, flags: bool) -> Script:
    """Return the script ``name``; with ``flags``, as servers from 7.0 on want it.

    Above maxmemory a server refuses scripts that may write. Ours must still run, or a full store could never empty
    itself: 7.0 lets them say so, and 6.2 judges by the first write, which the ledger sees to. What a full store
    refuses is the payload, outside the scripts.
    """
    folder = files("buffer") / "scripts"
    source = (folder / "ledger.lua").read_text("utf-8") + (folder / f"{name}.lua").read_text("utf-8")
    if flags:
        source = "#!lua flags=allow-oom\n" + source
    return Script(name, source, sha1(source.encode(), usedforsecurity=False).hexdigest())
