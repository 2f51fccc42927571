"""Rows with wanted answers: what is learnt of them, and what becomes of long ones."""

import json

import numpy as np
import pytest
from digit_chat import TEMPLATE, collate, make_chat, words
from pydantic import ValidationError

from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_core.types import Share
from cosmos_rl_llm.config import LLMDataConfig
from cosmos_rl_llm.data.collate import encode_row
from cosmos_rl_llm.data.rows import load_rows

MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}</s>{% endgeneration %}{% else %}{{ m['content'] }}</s>{% endif %} {% endfor %}"
)
FORGETFUL = (  # as templates that strip the thinking of earlier turns do
    "{% for m in messages %}<{{ m['role'] }}>{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
    "</s> {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "12"},
    {"role": "assistant", "content": "34"},
    {"role": "user", "content": "5"},
    {"role": "assistant", "content": "6"},
]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_a_chat_that_the_template_rejects_is_told(template):
    chat = make_chat("{{ raise_exception('no such role') }}" + template)
    with pytest.raises(PromptError, match="the chat template rejects this prompt: no such role"):
        encode_row({"messages": CHAT}, chat=chat)


def test_a_chat_without_a_token_is_told():
    chat = make_chat("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(PromptError, match="no assistant token to learn"):
        encode_row({"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]}, chat=chat)


def test_a_column_of_chats_holds_lists(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": "hello"}), encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.jsonl:1: a chat must be a list of messages, not .*data\.messages_column"):
        load_rows(LLMDataConfig(path=str(file), messages_column="messages"))


def test_supervised_rows_learn_the_response_and_its_end():
    rows = [{"prompt": "12", "response": "34"}, {"prompt": "5", "response": "6"}]
    batch = collate(rows, make_chat())
    (microbatch,) = batch.microbatches
    assert words(microbatch.inputs["tokens"]) == list("123456")
    assert words(microbatch.inputs["labels"]) == ["3", "4", "</s>", "6", "</s>"]
    assert microbatch.terms.rollout_logprobs.tolist() == [0] * 5
    assert microbatch.terms.advantages.tolist() == [1] * 5
    assert (batch.num_terms, batch.num_rollouts) == (5, 2)
    assert batch.metrics == {
        "response_length_mean": 2.5,
        "response_length_max": 3,
        "packing_fraction": 0.06,
        "rows_dropped": 0,
    }


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_every_turn_of_the_assistant_is_learnt_with_its_end(template):
    found = make_chat(template).encode_answers({"messages": CHAT})
    assert "".join(words(found.tokens)) == "<user>12</s> <assistant>34</s> <user>5</s> <assistant>6</s> "
    assert words(found.tokens, found.learnt) == ["3", "4", "</s>", "6", "</s>"]


def test_what_lies_between_turns_is_masked():
    sample = encode_row({"messages": CHAT}, chat=make_chat(TEMPLATE))
    assert words(sample.prompt_tokens) == ["<user>", "1", "2", "</s>", " ", "<assistant>"]
    assert words(sample.tokens, sample.loss_mask) == ["3", "4", "</s>", "6", "</s>"]
    assert words(sample.tokens, ~sample.loss_mask) == [" ", "<user>", "5", "</s>", " ", "<assistant>"]
    assert sample.tokens[-1] == 0


def test_a_chat_of_one_answer_is_the_same_as_its_prompt_and_response():
    chat = make_chat(TEMPLATE)
    one = encode_row({"messages": CHAT[:2]}, chat=chat)
    other = encode_row({"prompt": CHAT[:1], "response": "34"}, chat=chat)
    assert np.array_equal(one.prompt_tokens, other.prompt_tokens)
    assert np.array_equal(one.tokens, other.tokens)
    assert np.array_equal(one.loss_mask, other.loss_mask)


def test_a_turn_that_no_template_closes_is_closed_at_the_end_of_the_chat():
    bare = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    bare += "{% if add_generation_prompt %}<assistant>{% endif %}"
    found = make_chat(bare).encode_answers({"messages": CHAT})
    assert words(found.tokens, found.learnt) == ["3", "4", "6", "</s>"]


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_way_out():
    with pytest.raises(PromptError, match=r"writes earlier turns differently.*\{% generation %\} marks"):
        encode_row({"messages": CHAT}, chat=make_chat(FORGETFUL))
    assert words(encode_row({"messages": CHAT[:2]}, chat=make_chat(FORGETFUL)).tokens) == ["3", "4", "</s>"]


def test_a_row_that_cannot_be_learnt_is_dropped_and_counted(tmp_path):
    file = tmp_path / "a.jsonl"
    odd = [{"messages": CHAT[1:2]}, {"messages": [{**CHAT[0], "tags": 5}, CHAT[1]]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in [{"messages": CHAT}, *odd]), encoding="utf-8")
    rows, _ = load_rows(LLMDataConfig(path=str(file), messages_column="messages"))
    chat = make_chat(TEMPLATE + "{% for m in messages %}{% for tag in m.tags or [] %}{{ tag }}{% endfor %}{% endfor %}")
    batch = collate(rows, chat)
    assert (batch.num_rollouts, batch.metrics["rows_dropped"]) == (1, 2)
    assert "nothing asks for it" in batch.rows_dropped[0]
    assert "'int' object is not iterable" in batch.rows_dropped[1]
    for row in rows[1:]:  # the same rows in reinforcement learning
        with pytest.raises(PromptError):
            chat.encode_prompt(row)


def test_a_row_without_an_answer_is_an_error():
    with pytest.raises(UserError, match=r"data.response_column, or .* data.messages_column"):
        collate([{"prompt": "1"}], make_chat())
    with pytest.raises(PromptError, match=r"nothing asks for it"):
        encode_row({"messages": CHAT[1:2]}, chat=make_chat(TEMPLATE))


def test_a_row_that_is_too_long_is_an_error_unless_the_recipe_says_otherwise():
    with pytest.raises(UserError, match=r"row of 4 tokens is longer than the context of 3.*begins '12'.*data.overlong"):
        collate([{"prompt": "12", "response": "3"}], make_chat(max_length=3))


LONG = [{"prompt": "12", "response": "3456"}, {"prompt": "1", "response": "2"}, {"prompt": "12345", "response": "6"}]


def test_long_rows_are_cut_and_counted():
    batch = collate(LONG, make_chat(max_length=5, overlong="truncate"))
    (microbatch,) = batch.microbatches
    assert words(microbatch.inputs["labels"]) == ["3", "4", "5", "2", "</s>"]
    assert (batch.num_terms, batch.num_rollouts) == (5, 2)
    assert (batch.metrics["rows_truncated"], batch.metrics["rows_dropped"]) == (1, 1)  # one had no room for an answer


def test_long_rows_are_dropped_and_counted():
    batch = collate(LONG, make_chat(max_length=5, overlong="drop"))
    assert words(batch.microbatches[0].inputs["labels"]) == ["2", "</s>"]
    assert (batch.metrics["rows_truncated"], batch.metrics["rows_dropped"]) == (0, 2)
    assert batch.rows_dropped[0] == "a row of 7 tokens, more than 5; it begins '12'"


def test_rows_are_dealt_to_shares_by_length():
    rows = [{"prompt": "1", "response": "2" * length} for length in (9, 9, 9, 3, 3, 3, 3, 3, 3)]
    batches = [collate(rows, make_chat(), share=Share(index=i, count=3)) for i in range(3)]
    assert [sum(len(m.inputs["tokens"]) for m in batch.microbatches) for batch in batches] == [18, 18, 18]
    assert {batch.num_terms for batch in batches} == {3 * 10 + 6 * 4}


def load(path, rows, **keys):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(LLMDataConfig(path=str(path), **keys))[0]


def test_a_column_of_chats_becomes_messages_and_the_prompt_of_the_last_answer(tmp_path):
    row = {"conversation": CHAT, "response": "not this"}
    (found,) = load(tmp_path / "a.jsonl", [row], messages_column="conversation", system_prompt="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert found["messages"] == [system, *CHAT]
    assert found["prompt"] == [system, *CHAT[:3]]
    assert "response" not in found


def test_a_chat_without_an_answer_is_named(tmp_path):
    with pytest.raises(UserError, match=r"a.jsonl:1: the chat has no assistant message"):
        load(tmp_path / "a.jsonl", [{"messages": CHAT[:1]}], messages_column="messages")
    with pytest.raises(UserError, match=r"a.jsonl:1: no column 'messages' \(data.messages_column\)"):
        load(tmp_path / "a.jsonl", [{"prompt": "x"}], messages_column="messages")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"response_column": "r"}, "remove response_column"),
        ({"chat_template": "none"}, "messages_column needs a chat template"),
    ],
)
def test_keys_that_clash_with_whole_chats_are_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        LLMDataConfig(path="a.jsonl", messages_column="m", **keys)
