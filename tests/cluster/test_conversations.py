from pathlib import Path

import pytest

from actors.chat import Chat
from actors.tokenizers import write_character_tokenizer
from cluster.conversations import load_conversations
from cluster.loading import load_config

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def chat(tmp_path):
    write_character_tokenizer(tmp_path)
    return Chat(tmp_path)


def load(chat, *overrides):
    config = load_config(QUICKSTART, ["model.warm_start.demonstrations=32", *overrides])
    return load_conversations(config, config.model.warm_start, chat)


def test_either_the_replies_are_learned_or_everything_that_something_predicts(chat):
    replies = load(chat, "model.warm_start.loss_on=replies")
    everything = load(chat, "model.warm_start.loss_on=all")
    for (tokens_S, mask_S), (same_tokens_S, all_S) in zip(replies, everything, strict=True):
        assert tokens_S.tolist() == same_tokens_S.tolist()
        letters = chat.decode_reply(tokens_S[mask_S]).replace("<|end|>", "")
        assert letters and set(letters) <= set("LDRU"), "a reply is one move and its end"
        assert not all_S[0] and all_S[1:].all()


def test_demonstrations_are_those_of_the_seed(chat):
    texts = [[tokens_S.tolist() for tokens_S, _ in load(chat, f"run.seed={seed}")] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
