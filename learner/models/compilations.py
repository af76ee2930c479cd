"""Counting the XLA compilations of this process.

After warm-up every shape is known, so a compilation is a mistake: it stalls the step.
Eager operations compile too and count.
"""

from __future__ import annotations

import threading

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


class CompilationCounter:
    """XLA backend compilations of this process since the counter was made.

    JAX reports a compilation also when its persistent cache had the result: those are subtracted.
    The counter listens for the life of the process; make one, not one per use.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    @property
    def count(self) -> int:
        """Compilations so far; the difference of two readings is what happened in between."""
        with self._lock:
            return self._count

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            self._add(1)

    def _on_event(self, event: str, **_: str | int) -> None:
        if event == _CACHE_HIT:
            self._add(-1)

    def _add(self, amount: int) -> None:
        with self._lock:
            self._count += amount
