"""Patience with the buffer: a store that is restarted does not end the training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from buffer import BufferUnavailable

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.5


def patiently[T](call: Callable[[], T], outage_seconds: float) -> T:
    """The result of ``call``, which must be safe to repeat, although the buffer may be away for a while.

    Raises:
        BufferUnavailable: it was away for ``outage_seconds``.
    """
    deadline = time.monotonic() + outage_seconds
    while True:
        try:
            return call()
        except BufferUnavailable as error:
            if time.monotonic() > deadline:
                raise BufferUnavailable(f"the learner waited {outage_seconds:g} s for the buffer: {error}") from error
            logger.warning("%s", error)
        time.sleep(_PAUSE_SECONDS)
