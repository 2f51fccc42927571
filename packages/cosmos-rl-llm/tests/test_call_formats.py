"""Calls of tools in the formats of seven families: a call, two calls, a broken one, one inside a thought."""

from __future__ import annotations

import json

import pytest
from call_families import FAMILIES, OTHER, SUM, TOOLS, Family, hermes, tokenizer

from cosmos_rl_core.types import ToolCall
from cosmos_rl_llm.tools.calls import CallFormat, ParsedTurn, find_call_format


@pytest.fixture(params=FAMILIES)
def family(request) -> Family:
    return FAMILIES[request.param]


def call_format(family: Family) -> CallFormat:
    return find_call_format(tokenizer(family.template, family.specials))


def test_format_is_that_of_the_chat_template():
    assert [call_format(family).name for family in FAMILIES.values()] == list(FAMILIES)
    assert find_call_format(tokenizer("{{ messages[0].content }}", ["</s>"])).name == ""


def test_text_and_call(family):
    assert call_format(family).parse(family.one, TOOLS) == ParsedTurn(text=family.text, calls=(SUM,))


def test_two_calls(family):
    assert call_format(family).parse(family.two, TOOLS) == ParsedTurn(text="", calls=(SUM, OTHER))


def test_broken_call_is_a_problem(family):
    parsed = call_format(family).parse(family.broken, TOOLS)
    assert not parsed.calls
    assert family.reason in parsed.problem, parsed


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.thinking])
def test_call_inside_a_thought_is_none(name):
    family = FAMILIES[name]
    parsed = call_format(family).parse(family.thinking, TOOLS)
    assert (parsed.text, parsed.calls, parsed.problem) == ("3", (), "")
    assert parsed.reasoning.endswith("?")


def test_every_beginning_of_a_turn_is_parsed(family):
    form = call_format(family)
    for text in (family.one, family.two, family.broken, family.thinking):
        for end in range(len(text)):
            form.parse(text[:end], TOOLS)


def test_message_is_read_again_by_the_template(family):
    form = call_format(family)
    message = form.message(form.parse(family.one, TOOLS))
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == SUM.arguments
    chat = form.for_template([{"role": "user", "content": "1 + 2?"}, message])
    text = form.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
    assert form.parse(text[text.index("1 + 2?") + 6 :], TOOLS).calls == (SUM,)


def test_thought_without_an_end_has_no_call_and_says_so():
    parsed = call_format(FAMILIES["hermes"]).parse(f"<think>so {hermes(1, 2)}<|im_end|>", TOOLS)
    assert (parsed.text, parsed.calls) == ("", ())
    assert parsed.problem == "a call is inside a thought that does not end"


def test_good_calls_beside_a_broken_one_are_kept():
    parsed = call_format(FAMILIES["hermes"]).parse(f"{hermes(1, 2)}<tool_call>[</tool_call>", TOOLS)
    assert parsed.calls == (SUM,)
    assert "no JSON" in parsed.problem


@pytest.mark.parametrize(
    "body",
    [
        "[" * 100_000,
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": "add", "arguments": {"note": "\\ud800"}}',
        '{"name": 7, "arguments": {}}',
        '{"arguments": {}}',
        '"add"',
        "",
    ],
)
def test_call_that_is_none_is_a_problem(body):
    parsed = call_format(FAMILIES["hermes"]).parse(f"<tool_call>{body}</tool_call>", TOOLS)
    assert not parsed.calls
    assert parsed.problem
    assert len(parsed.problem) < 400


def test_untyped_values_are_cast_by_the_schema():
    values = "<parameter=a>7</parameter><parameter=note>7</parameter>"
    text = f"</think><tool_call><function=add>{values}</function></tool_call>"
    (call,) = call_format(FAMILIES["qwen_xml"]).parse(text, TOOLS).calls
    assert call.arguments == {"a": 7, "note": "7"}


def test_json_of_an_answer_is_no_call_of_llama():
    form = call_format(FAMILIES["llama"])
    assert form.parse('{"name": "Ada"}<|eot_id|>', TOOLS) == ParsedTurn(text='{"name": "Ada"}')


def test_id_that_the_model_wrote_is_kept():
    parsed = call_format(FAMILIES["mistral"]).parse('[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}</s>', TOOLS)
    assert parsed.calls == (ToolCall(name="add", arguments={"a": 1}, id="a1b2c3d4e"),)


def test_response_template_of_the_tokenizer_is_used():
    call = {"open": "<call>", "close": "</call>", "repeats": True, "content": "json"}
    template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {"repeats": True, "join": ""},
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {**call, "transform": {"type": "function", "function": "{content}"}},
        },
    }
    family = FAMILIES["hermes"]
    form = find_call_format(tokenizer(family.template, family.specials, response_template=template))
    assert form.name == "response_template"
    good = '<think>so</think>ok<call>{"name": "add", "arguments": {"a": 1, "b": 2}}</call><|im_end|>'
    assert form.parse(good, TOOLS) == ParsedTurn(text="ok", reasoning="so", calls=(SUM,))
    broken = form.parse("<call>{</call>", TOOLS)
    assert not broken.calls
    assert "the turn cannot be read" in broken.problem
