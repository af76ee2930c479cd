"""Stop strings: looked for in the text of sampled tokens as these come.

Tokens go in and tokens come out; only the question whether a generation ends is asked of its text. The answer is a
function of the tokens alone, so that nothing has to be kept for a request that loses its slot.

Axes: N = sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
from tokenizers import Tokenizer

HALF_CHARACTER = "\ufffd"
"""What the bytes of an unfinished or invalid character are decoded to."""
_SLACK = 8
"""Tokens beyond those that a stop string can have: the window may begin within a character or with a space."""


class StopStrings:
    """Finds stop strings in the text of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Decode with ``tokenizer``; special tokens are part of the text."""
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """For the tokenizer of a model folder; None if there is no ``tokenizer.json``."""
        path = folder / "tokenizer.json"
        return cls(Tokenizer.from_file(str(path))) if path.is_file() else None

    def completed(self, tokens_N: Sequence[int] | np.ndarray, strings: Sequence[str]) -> str | None:
        """The first of ``strings`` in the text of ``tokens_N``, if the last token completes one.

        Only the end of the text is decoded: as many tokens as the longest string has bytes reach back far enough,
        because a token stands for a byte at least; where some stand for nothing, it takes more of them.
        """
        if not strings:
            return None
        longest = max(len(string) for string in strings)
        width = max(len(string.encode()) for string in strings) + _SLACK
        while True:
            text = self._text(tokens_N[-width:])
            found = next((string for string in strings if string in text), None)
            if found is not None or width >= len(tokens_N):
                return found
            # What the last token adds to a text is no longer than its own. Half characters at the front are no text.
            if len(text.lstrip(HALF_CHARACTER)) > longest + len(self._text(tokens_N[-1:])):
                return None
            width *= 2

    def _text(self, tokens_N: Sequence[int] | np.ndarray) -> str:
        text: str = self._tokenizer.decode(np.asarray(tokens_N).tolist(), skip_special_tokens=False)
        return text
