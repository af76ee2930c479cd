"""Who may enter an engine: as many requests as hold a bounded number of tokens together; the others wait in line.

A request is counted with all the tokens that it may come to hold, its prompt and the most it samples, so that what has
entered fits however long it becomes. The line is first come, first served, and nobody waits in it beyond its deadline:
the callers wait, each for its own request, and there are no more of these than the callers have episodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


def checked_tokens_in_flight(asked: int | None, *, slots: int, context_length: int) -> int:
    """The bound that was asked for, or what a cache of ``slots`` conversations of ``context_length`` holds.

    Raises:
        ValueError: the longest request would never be let in.
    """
    if asked is None:
        return slots * context_length
    if asked < context_length:
        raise ValueError(
            f"tokens_in_flight is {asked}; expected at least the context length of {context_length}, the longest "
            "request: raise it, or leave it out"
        )
    return asked


class Admission[T]:
    """Counts the tokens of the requests that are in, and keeps the line of those that are not.

    Attributes:
        most_tokens: bound on what those that are in may hold together.
        tokens: what they may come to hold.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.tokens = 0
        self._line: OrderedDict[T, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        """Requests in the line."""
        return len(self._line)

    def join(self, request: T, tokens: int, deadline: float) -> None:
        """Put ``request`` at the end of the line.

        Args:
            request: hashable by identity.
            tokens: what it may come to hold, at most ``most_tokens``.
            deadline: how long it waits, in seconds of the clock that ``late`` is told.
        """
        self._line[request] = (tokens, deadline)

    def enter(self) -> Iterator[T]:
        """Those from the head of the line for whom there is room; they are in from then on."""
        while self._line:
            request, (tokens, _) = next(iter(self._line.items()))
            if self.tokens + tokens > self.most_tokens:
                return
            del self._line[request]
            self.tokens += tokens
            yield request

    def leave(self, tokens: int) -> None:
        """Give back what a request that was in might have held."""
        self.tokens -= tokens

    def late(self, now: float) -> list[T]:
        """Take those out of the line whose deadline has passed."""
        late = [request for request, (_, deadline) in self._line.items() if deadline < now]
        for request in late:
            del self._line[request]
        return late

    def withdraw(self, request: T) -> bool:
        """Take one out of the line; whether it was there."""
        return self._line.pop(request, None) is not None

    def clear(self) -> list[T]:
        """Take everybody out of the line."""
        everybody = list(self._line)
        self._line.clear()
        return everybody
