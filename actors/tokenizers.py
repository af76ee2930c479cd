"""A character tokenizer for small policies, written as an ordinary Hugging Face folder.

One token per character and no merges: what the policy reads is what the environment
printed, and the vocabulary stays around a hundred entries.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

ROLES = ("system", "user", "assistant")
END = "<|end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (PAD, END, *(f"<|{role}|>" for role in ROLES))
CHARACTERS = "\n" + string.digits + string.ascii_letters + string.punctuation + " "
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_character_tokenizer(folder: Path) -> int:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with a chat template; returns the vocabulary's size.

    The vocabulary is printable ASCII and newline, one token each, and one special token per role,
    ``<|end|>`` (end of a message) and ``<|pad|>`` (id 0). Any other character is an error when encoded,
    never silently dropped.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))  # without an unknown token: an unknown character raises
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": END,
        "pad_token": PAD,
        "bos_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return len(vocabulary)
