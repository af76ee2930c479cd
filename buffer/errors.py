"""What can go wrong with the buffer. Every message is one line: the value, the expectation, the remedy."""

from __future__ import annotations


class BufferError(RuntimeError):
    """Base of every error of the buffer."""


class BufferUnavailable(BufferError):
    """Redis cannot be reached, or does not answer, or does not let us in. Trying again later may help."""


class BufferFull(BufferUnavailable):
    """Redis is out of memory. Nothing was lost: the call had no effect, and trying again later may help."""


class NotOpen(BufferError):
    """The run has no control state in this Redis: nobody opened it, or the server lost its data."""


class WaitTimeout(BufferError):
    """A wait reached its deadline. The message says what is outstanding and for whom it waited."""


class Fenced(BufferError):
    """The call came from a learner epoch that a newer one has replaced, or from a lease that is over."""


class Forgotten(Fenced):
    """The server was killed and lost what this gang told it; the process that began the epoch tells it again."""


class FormatError(BufferError):
    """Bytes that are not what the reader understands: another format number, damage, or something else."""


class PortInUse(BufferError):
    """The port asked for is taken by another process."""


class ServerError(BufferError):
    """The embedded Redis server could not be started or stopped."""
