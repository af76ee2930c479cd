import string

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from actors.tokenizers import SPECIAL_TOKENS

TEXT = "A..H\n.H~G " + string.printable[:95] + "  \n\n"


def test_one_token_per_character_and_back(character_folder):
    tokenizer = Tokenizer.from_file(str(character_folder / "tokenizer.json"))
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert len(ids) == len(TEXT)
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    assert len(set(tokenizer.encode(string.printable[:95] + "\n").ids)) == 96


def test_special_tokens_are_single_tokens_apart_from_characters(character_folder):
    tokenizer = Tokenizer.from_file(str(character_folder / "tokenizer.json"))
    assert tokenizer.encode("".join(SPECIAL_TOKENS)).ids == [0, 1, 2, 3, 4]
    assert len(tokenizer.encode("<|nobody|>").ids) == len("<|nobody|>")
    assert tokenizer.get_vocab_size() == 101


def test_transformers_reads_the_folder_and_agrees(character_folder):
    reference = PreTrainedTokenizerFast.from_pretrained(character_folder)
    ours = Tokenizer.from_file(str(character_folder / "tokenizer.json"))
    assert reference.encode(TEXT) == ours.encode(TEXT).ids
    assert reference.decode(reference.encode(TEXT)) == TEXT
    assert reference.eos_token == "<|end|>" and reference.pad_token_id == 0


def test_a_character_outside_the_vocabulary_is_not_dropped(character_folder):
    tokenizer = Tokenizer.from_file(str(character_folder / "tokenizer.json"))
    with pytest.raises(Exception, match="vocabulary"):
        tokenizer.encode("déjà vu")
