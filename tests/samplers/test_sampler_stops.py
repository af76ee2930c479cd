"""Stop strings in sampled tokens, against a search of the whole text after every token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_examples import CONFIG, make_tokenizer
from tokenizers import Tokenizer, decoders, models

from actors.samplers.stops import StopStrings
from actors.tokenizers import END, write_character_tokenizer

TOKENIZER = make_tokenizer()
STOPS = ("ab", "abc", "é", "é€", "€b", "a b", "  ", "bé a", "the", "€€€", "nopxyz")


def _llama() -> Tokenizer:
    """Words with a mark for the space before them, and bytes for what no word holds, as SentencePiece writes them."""
    pieces = ["\u2581a", "\u2581", "a", "b", "\u2581the", *(f"<0x{byte:02X}>" for byte in "é€".encode())]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _end(tokenizer: Tokenizer, tokens: list[int], strings: list[str]) -> tuple[int, str] | None:
    """How many tokens it takes until the whole text holds one of ``strings``, and which."""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=False)
        for string in strings:
            if string in text:
                return end, string
    return None


@settings(max_examples=300, deadline=None)
@given(
    # Ids beyond the tokenizer's are those of a padded vocabulary: they stand for no text at all.
    st.lists(st.integers(0, CONFIG.vocab_size + 5), max_size=60),
    st.lists(st.sampled_from(STOPS), min_size=1, max_size=3),
)
def test_the_token_that_completes_a_string_is_found_wherever_its_bytes_are(
    tokens: list[int], strings: list[str]
) -> None:
    stops, expected = StopStrings(TOKENIZER), _end(TOKENIZER, tokens, strings)
    for end in range(1, (expected[0] if expected else len(tokens)) + 1):
        found = stops.completed(tokens[:end], strings)
        assert found == (expected[1] if expected and end == expected[0] else None)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=40), st.sampled_from(["a the", " a", "b", "ab a", "  "]))
def test_spaces_that_belong_to_words_are_found(tokens: list[int], string: str) -> None:
    tokenizer = _llama()
    expected = _end(tokenizer, tokens, [string])
    for end in range(1, (expected[0] if expected else len(tokens)) + 1):
        found = StopStrings(tokenizer).completed(tokens[:end], [string])
        assert found == (string if expected and end == expected[0] else None)


def test_a_character_of_three_byte_tokens_is_complete_with_the_third() -> None:
    stops, tokenizer = StopStrings(_llama()), _llama()
    euro = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert [stops.completed([2, *euro[:count]], ["€"]) for count in (1, 2, 3)] == [None, None, "€"]


def test_a_long_run_of_tokens_without_text_does_not_hide_the_beginning_of_a_string() -> None:
    silent = [CONFIG.vocab_size - 1] * 300
    a, b = TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("b")
    assert StopStrings(TOKENIZER).completed([a, *silent, b], ["ab"]) == "ab"
    assert StopStrings(TOKENIZER).completed([a, *silent], ["ab"]) is None


def test_of_two_strings_completed_at_once_the_first_given_is_named() -> None:
    abc = TOKENIZER.token_to_id("abc")
    assert StopStrings(TOKENIZER).completed([abc], ["c", "ab"]) == "c"
    assert StopStrings(TOKENIZER).completed([abc], ["ab", "c"]) == "ab"
    assert StopStrings(TOKENIZER).completed([abc], []) is None


def test_special_tokens_are_text(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    stops = StopStrings.of(tmp_path)
    assert stops is not None
    end = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id(END)
    assert stops.completed([20, end], [END]) == END


def test_a_folder_without_a_tokenizer_finds_nothing(tmp_path: Path) -> None:
    assert StopStrings.of(tmp_path) is None


@pytest.mark.parametrize("count", [1, 5])
def test_arrays_do_as_lists_do(count: int) -> None:
    import numpy as np

    tokens = np.full(count, TOKENIZER.token_to_id("ab"), np.int32)
    assert StopStrings(TOKENIZER).completed(tokens, ["ab"]) == "ab"
