from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_llm.data.chat import Chat, find_end_ids, set_chat_template

CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 :.?+=\n"


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a character, and <s>, </s>, <end>."""
    words = ["<unk>", "<s>", "</s>", "<end>", *LETTERS]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="</s>", additional_special_tokens=["<s>", "<end>"]
    )
    tokenizer.chat_template = template
    return tokenizer


def make_chat(template: str | None = CHATML, **keys) -> Chat:
    return Chat(tokenizer=make_tokenizer(template), end_ids=frozenset({2}), **keys)


def ask(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_messages_go_through_the_template():
    encoded = make_chat().encode_prompt({"prompt": ask("hi")})
    text, tokens = encoded.text, encoded.tokens
    assert text == "<s>user:hi</s>\n<s>assistant:"
    assert tokens.dtype == np.int32
    assert len(tokens) == len("user:hi") + 2 + 1 + 1 + len("assistant:")


def test_plain_text_is_only_tokenised():
    encoded = make_chat(None).encode_prompt({"prompt": "2+2="})
    text, tokens = encoded.text, encoded.tokens
    assert text == "2+2="
    assert len(tokens) == 4


def learn(chat: Chat, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The tokens of prompt and answer."""
    encoded = chat.encode_answers(row)
    return encoded.tokens[~encoded.learnt].tolist(), encoded.tokens[encoded.learnt].tolist()


def test_the_response_ends_with_the_turn_and_not_after_it():
    chat = make_chat()
    _, answer = learn(chat, {"prompt": ask("hi"), "response": "yes."})
    assert chat.decode(answer) == "yes."
    assert answer[-1] == 2  # </s>, without the line end that the template writes after it


def test_a_plain_response_is_closed_with_the_eos_token():
    _, answer = learn(make_chat(None), {"prompt": "2+2=", "response": "4"})
    assert answer[-1] == 2
    assert len(answer) == 2


def test_a_template_that_rewrites_the_prompt_leaves_the_bare_response():
    chat = make_chat("{{ messages | length }}{% if add_generation_prompt %}?{% endif %}")
    _, answer = learn(chat, {"prompt": ask("hi"), "response": "ok"})
    assert chat.decode(answer) == "ok"
    assert answer[-1] == 2


def test_prompt_and_response_are_what_the_template_writes():
    chat = make_chat()
    row = {"prompt": ask("hi"), "response": "yes."}
    whole = chat.tokenizer.apply_chat_template(
        [*row["prompt"], {"role": "assistant", "content": "yes."}], tokenize=False
    )
    assert isinstance(whole, str)
    assert chat.encode_answers(row).tokens.tolist() == chat.tokenizer(whole)["input_ids"]


def test_a_template_may_reject_a_prompt():
    chat = make_chat("{{ raise_exception('no system messages') }}")
    with pytest.raises(PromptError, match=r"a.jsonl:3: the chat template rejects .*no system messages"):
        chat.encode_prompt({"prompt": ask("hi")}, where="a.jsonl:3")


def test_a_prompt_needs_a_token():
    with pytest.raises(PromptError, match=r"a.jsonl:3: the prompt has no tokens"):
        make_chat(None).encode_prompt({"prompt": ""}, where="a.jsonl:3")


def test_a_tokenizer_without_a_template_is_an_error_unless_plain_text_is_wanted():
    set_chat_template(make_tokenizer(None), "none")
    with pytest.raises(UserError, match=r'has no chat template; set data.chat_template .* "none"'):
        set_chat_template(make_tokenizer(None), None)


def test_a_template_comes_from_the_config_or_a_file(tmp_path):
    tokenizer = make_tokenizer()
    set_chat_template(tokenizer, "{{ messages }}")
    assert tokenizer.chat_template == "{{ messages }}"
    (tmp_path / "t.jinja").write_text("from file {{ messages }}")
    set_chat_template(tokenizer, str(tmp_path / "t.jinja"))
    assert tokenizer.chat_template == "from file {{ messages }}"
    with pytest.raises(UserError, match="no such file"):
        set_chat_template(tokenizer, str(tmp_path / "u.jinja"))


def test_end_ids_are_those_of_tokenizer_and_generation_config():
    tokenizer = make_tokenizer()
    assert find_end_ids(tokenizer, None) == {2}
    assert find_end_ids(tokenizer, 3) == {2, 3}
    assert find_end_ids(tokenizer, [3, 1]) == {1, 2, 3}
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="has no end-of-sequence token"):
        find_end_ids(tokenizer, None)


@pytest.mark.parametrize(
    ("template", "is_shown"),
    [
        ("auto", False),
        ("{{ bos_token }}hello", False),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", False),
        ("{{ messages[0].content }}", True),
        ("{% for part in messages[0].content %}{{ part.text }}{% endfor %}", True),
        ("{{ raise_exception('wants two messages') }}", True),  # its rows will say so
    ],
)
def test_a_template_contains_the_messages(template, is_shown):
    if is_shown:
        set_chat_template(make_tokenizer(), template)
        return
    with pytest.raises(UserError, match=r"data\.chat_template = .* does not contain the messages of a chat"):
        set_chat_template(make_tokenizer(), template)
