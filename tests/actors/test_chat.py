import functools
import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from actors.chat import Chat, ChatError

# Qwen2.5-Instruct's template without its tool branches: a default system prompt, a line break behind every message.
CHATML = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role != "system" %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# The pre-tokenisation of the Qwen family, which decides what can merge across the edge of a message.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="session")
def chatml_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatml")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CHATML, "go left, go right\n\nassistant user system holes and goals\n" * 9], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "eos_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.fixture(scope="session")
def chatml(chatml_folder):
    return Chat(chatml_folder)


def conversations(alphabet):
    # A reply that starts with white space can merge with the template's line break when it is tokenised again; that
    # is why replies never are, and why the whole rendering is no reference for such replies.
    given_text = st.text(alphabet, min_size=0, max_size=30)
    reply = given_text.map(lambda text: "r" + text)
    turns = st.lists(st.tuples(given_text, reply), min_size=1, max_size=5)

    def build(system, turns):
        messages = [{"role": "system", "content": system}] if system is not None else []
        for observation, text in turns:
            messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": text}]
        return messages

    return st.builds(build, st.none() | given_text, turns)


def turn_by_turn(chat, messages):
    """The tokens as an episode builds them: sampled replies stay, only what lies between is rendered."""
    pieces = []
    for position, message in enumerate(messages):
        if message["role"] == "assistant":
            before = messages[:position]
            pieces.append(chat.follow_up(before, reply_ended=True) if pieces else chat.prompt(before))
            pieces.append(chat.encode_reply(message["content"]))
    return np.concatenate(pieces)


@functools.cache
def reference(folder):
    return PreTrainedTokenizerFast.from_pretrained(folder)


def whole(folder, messages, end):
    """The tokens of the conversation rendered at once by another implementation, up to the last end token."""
    ids = reference(folder).apply_chat_template(messages, tokenize=True)
    return ids[: len(ids) - ids[::-1].index(end)]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(conversations("AHG.LDRU \n<|>d{%"))
def test_characters_built_turn_by_turn_equal_the_conversation_rendered_at_once(chat, character_folder, messages):
    assert turn_by_turn(chat, messages).tolist() == whole(character_folder, messages, chat.end_token)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(conversations("go left'sé \n1.<|>{"))
def test_chatml_built_turn_by_turn_equals_the_conversation_rendered_at_once(chatml, chatml_folder, messages):
    assert turn_by_turn(chatml, messages).tolist() == whole(chatml_folder, messages, chatml.end_token)


@pytest.mark.parametrize("name", ["chat", "chatml"])
def test_a_supervised_example_has_the_tokens_of_an_episode_and_trains_on_the_replies_alone(name, request):
    chat = request.getfixturevalue(name)
    messages = [
        {"role": "user", "content": "A.\n.G"},
        {"role": "assistant", "content": "R"},
        {"role": "user", "content": ".A\n.G"},
        {"role": "assistant", "content": "Down"},
    ]
    tokens, loss_mask = chat.supervised(messages)
    assert tokens.dtype == np.int32 and loss_mask.dtype == np.bool_
    assert tokens.tolist() == turn_by_turn(chat, messages).tolist()
    trained = [*chat.encode_reply("R"), *chat.encode_reply("Down")]
    assert tokens[loss_mask].tolist() == trained
    assert loss_mask[-1]


@pytest.mark.parametrize("name", ["chat", "chatml"])
def test_a_reply_cut_before_its_end_gets_the_missing_end_token_as_given(name, request):
    chat = request.getfixturevalue(name)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    ended = chat.follow_up(messages, reply_ended=True)
    cut = chat.follow_up(messages, reply_ended=False)
    assert cut.tolist() == [chat.end_token, *ended]
    assert chat.end_token in ended  # the end of the observation


def test_what_comes_behind_a_reply_does_not_depend_on_its_text(chat):
    def behind(text):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
        return chat.follow_up([*messages, {"role": "user", "content": "b"}], reply_ended=True).tolist()

    assert behind("L") == behind("<|user|>é\n") == behind("")


def test_several_messages_behind_a_reply_are_all_rendered(chat):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    tokens = chat.follow_up(messages, reply_ended=True)
    assert chat.decode_reply(tokens) == "<|system|>c<|end|><|user|>d<|end|><|assistant|>"


def test_stop_tokens_hold_the_end_of_turn_and_another_end_of_sequence(chat, chatml):
    assert chat.stop_tokens == (chat.end_token,)
    assert chatml.stop_tokens == (chatml.encode_reply("")[0], 0)


def test_decoding_drops_only_a_final_stop_token(chat):
    tokens = [*chat.encode_reply("a"), *chat.encode_reply("b")]
    assert chat.decode_reply(tokens) == "a<|end|>b"
    assert chat.decode_reply(tokens[:1]) == "a"
    assert chat.decode_reply([]) == ""


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(character_folder, tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(character_folder, folder)
    (folder / name).unlink()
    with pytest.raises(ChatError, match=f"no {name}"):
        Chat(folder)


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}", "syntax error"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "end with one token"),
        ("{% for m in messages %}{{ m.content | upper }}<|end|>{% endfor %}", "exactly once"),
    ],
)
def test_an_unusable_template_is_refused_at_once(character_folder, tmp_path, template, complaint):
    folder = tmp_path / "model"
    shutil.copytree(character_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    with pytest.raises(ChatError, match=complaint):
        Chat(folder)


def test_a_template_is_sandboxed(character_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(character_folder, folder)
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ChatError, match="unsafe"):
        Chat(folder)


def test_refusals_of_template_and_tokenizer_are_chat_errors(chat, chatml):
    with pytest.raises(ChatError, match="unknown role tool"):
        chatml.prompt([{"role": "tool", "content": "x"}])
    with pytest.raises(ChatError, match="cannot encode"):
        chat.prompt([{"role": "user", "content": "é"}])
    with pytest.raises(ChatError, match="message behind it"):
        chat.follow_up([{"role": "user", "content": "x"}], reply_ended=True)
    with pytest.raises(ChatError, match="last message"):
        chat.supervised([{"role": "user", "content": "x"}])
