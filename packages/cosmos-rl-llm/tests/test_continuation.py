"""Histories continued turn by turn are those that the chat template writes at once, token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from chat_families import CHATML, FAMILIES, OPENS_THOUGHT, REWRITES, tokenizer_of

from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_core.types import ToolCall, Turn
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.data.continuation import ChatContinuation


def continuation_of(family):
    template, ends, *_ = FAMILIES[family]
    tokenizer = tokenizer_of(template)
    ids = frozenset(tokenizer.convert_tokens_to_ids(token) for token in ["</s>", *ends])
    return ChatContinuation(Chat(tokenizer=tokenizer, end_ids=ids)), tokenizer


def drawn(tokenizer, text, **parsed):
    terms = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    size = len(terms)
    return Turn(
        terms=terms,
        logprobs=np.zeros(size, np.float32),
        versions=np.zeros(size, np.int32),
        finish_reason="stop",
        **parsed,
    )


def whole(tokenizer, messages):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


USER, AGAIN = {"role": "user", "content": "Add 1 and 2."}, {"role": "user", "content": "And 3?"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_continued_turn_by_turn_is_the_chat_rendered_at_once(family):
    continuation, tokenizer = continuation_of(family)
    stop = FAMILIES[family][2]
    history = continuation.open([USER]).terms.tolist()
    opening = len(history)
    for said, answer in (("It is 3.", AGAIN), ("Then 6.", USER)):
        text = f"<|message|>{said}{stop}" if family == "channels" else said + stop
        turn = drawn(tokenizer, text)
        history += [*turn.terms.tolist(), *continuation.extend(turn, [answer]).tolist()]
    chat = [
        USER,
        {"role": "assistant", "content": "It is 3."},
        AGAIN,
        {"role": "assistant", "content": "Then 6."},
        USER,
    ]
    rendered = whole(tokenizer, chat)
    if family == "channels":  # the model's own stop token is the history
        returns, end = map(tokenizer.convert_tokens_to_ids, ("<|return|>", "<|end|>"))
        assert history.count(returns) == 2
        history = [end if token == returns else token for token in history]
    assert history == rendered
    assert history[:opening] == rendered[:opening]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_answers_a_call(family):
    continuation, tokenizer = continuation_of(family)
    call = ToolCall(name="add", arguments={"a": 1}, id="abcdefghi")
    asked = {"id": call.id, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    answer = {"role": "tool", "content": "3", "name": "add", "tool_call_id": call.id}
    rendered = whole(tokenizer, [USER, {"role": "assistant", "content": "", "tool_calls": [asked]}, answer])
    before = continuation.open([USER]).terms.tolist()
    assert rendered[: len(before)] == before
    stop = tokenizer.convert_tokens_to_ids(FAMILIES[family][3])
    said = rendered[len(before) : rendered.index(stop, len(before)) + 1]
    turn = replace(drawn(tokenizer, ""), terms=np.array(said, np.int32), calls=(call,))
    appended = continuation.extend(turn, [answer])
    assert [*before, *said, *appended.tolist()] == rendered


def test_a_turn_that_ends_with_another_stop_token_keeps_it():
    continuation, tokenizer = continuation_of("chatml")
    turn = drawn(tokenizer, "It is 3.</s>")
    appended = tokenizer.decode(continuation.extend(turn, [AGAIN]))
    assert appended == "\n<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n"


def test_a_turn_that_ended_without_a_stop_token_is_closed():
    continuation, tokenizer = continuation_of("chatml")
    appended = tokenizer.decode(continuation.extend(drawn(tokenizer, "It is 3. STOP"), [AGAIN]))
    assert appended.startswith("<|im_end|>\n<|im_start|>user\n")


def test_another_stop_token_than_the_next_role_leaves_its_marker():
    continuation, tokenizer = continuation_of("role markers")
    appended = tokenizer.decode(continuation.extend(drawn(tokenizer, "It is 3.</s>"), [AGAIN]))
    assert appended == "<|user|>\nAnd 3?<|assistant|>\n"


def test_a_prompt_that_opens_a_thought_can_be_continued():
    tokenizer = tokenizer_of(OPENS_THOUGHT)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    continuation = ChatContinuation(Chat(tokenizer=tokenizer, end_ids=frozenset([end])))
    turn = continuation.parse(drawn(tokenizer, "one, two</think>\n\nIt is 3.<|im_end|>"))
    assert (turn.text, turn.reasoning) == ("It is 3.", "one, two")
    appended = tokenizer.decode(continuation.extend(turn, [AGAIN]))
    assert appended.endswith("And 3?<|im_end|>\n<|im_start|>assistant\n<think>\n")


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_first_token_that_differs():
    tokenizer = tokenizer_of(REWRITES)
    with pytest.raises(UserError, match=r"writes earlier turns differently .* '1' becomes '3'"):
        ChatContinuation(Chat(tokenizer=tokenizer, end_ids=frozenset([2])))


@pytest.mark.parametrize("template", [None, CHATML])
def test_plain_text_follows_without_marks(template):
    tokenizer = tokenizer_of(template)
    continuation = ChatContinuation(Chat(tokenizer=tokenizer, end_ids=frozenset([2])), plain=True)
    assert tokenizer.decode(continuation.open([USER]).terms) == "Add 1 and 2."
    assert tokenizer.decode(continuation.extend(drawn(tokenizer, "3</s>"), [AGAIN])) == "And 3?"


def test_an_environment_that_says_nothing_and_does_not_end_is_an_error():
    continuation, tokenizer = continuation_of("chatml")
    with pytest.raises(PromptError, match="answered nothing"):
        continuation.extend(drawn(tokenizer, "3<|im_end|>"), [])


def test_branches_are_laid_end_to_end():
    continuation, _ = continuation_of("chatml")
    first, second = continuation.open([USER]), continuation.open([AGAIN])
    arrays = continuation.arrays([(first, np.array([5, 6], np.int32)), (second, np.array([7], np.int32))])
    assert arrays["tokens"].tolist() == [5, 6, 7]
    assert arrays["branch_lengths"].tolist() == [[len(first.terms), 2], [len(second.terms), 1]]
    assert arrays["branch_prompts"].tolist() == second.terms.tolist()
