"""Histories continued turn by turn are those that the chat template writes at once, token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_core.types import ToolCall, Turn
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.data.continuation import ChatContinuation

CHATML = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- for m in messages %}{%- if m.role == "tool" %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THINKING = CHATML.replace(
    "{{ m.content }}{% for c",
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}{% for c",
)
"""Writes an empty thought into the last turn, as Qwen3's does."""
OPENS_THOUGHT = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
).replace("{{ m.content }}{% for", "{{ (m.content.split('</think>') | last).strip() }}{% for")
"""Begins each turn with a thought, and strips those of earlier turns."""
HEADERS = """{{ bos_token }}
{%- for m in messages %}
{%- set role = "ipython" if m.role == "tool" else m.role %}<|start_header_id|>{{ role }}<|end_header_id|>

{% if m.tool_calls %}
{%- set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}
{%- else %}{{ m.content | trim }}{% endif %}<|eot_id|>{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}{# tools #}"""
ROLE_MARKERS = """[gMASK]<sop>{%- for m in messages %}{%- if m.role == "tool" %}<|observation|>
{{ m.content }}{%- else %}<|{{ m.role }}|>
{{ m.content }}{%- for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }}
<arg_key>value</arg_key><arg_value>{{ c.function.arguments | tojson }}</arg_value>
</tool_call>{%- endfor %}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|assistant|>
{% endif %}{# tools #}"""
"""Nothing closes a turn: the model draws the marker of the next role, as GLM does."""
CHANNELS = """{%- for m in messages %}
{%- if m.role == "assistant" %}
{%- if m.tool_calls %}
{%- set f = m.tool_calls[0].function %}<|start|>assistant to={{ f.name }}<|message|>{{ f.arguments | tojson }}<|call|>
{%- elif loop.last and not add_generation_prompt %}<|start|>assistant<|message|>{{ m.content }}<|return|>
{%- else %}<|start|>assistant<|message|>{{ m.content }}<|end|>
{%- endif %}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}{# tools #}"""
"""The model ends a turn with <|return|> or <|call|>, and the history has <|end|>, as gpt-oss's."""
BRACKETS = """{{ bos_token }}
{%- for m in messages %}
{%- if m.role == "user" %}[INST]{{ m.content }}[/INST]
{%- elif m.role == "tool" %}
{{- "[TOOL_RESULTS]" }}{"content": {{ m.content | tojson }}, "id": "{{ m.tool_call_id }}"}
{{- "[/TOOL_RESULTS]" }}
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for c in m.tool_calls %}
{%- set f = c.function %}{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}
{%- endfor %}]{{ eos_token }}
{%- else %}{{ m.content }}{{ eos_token }}
{%- endif %}
{%- endfor %}{# tools #}"""
REWRITES = """{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if loop.index == 1 %} of {{ messages | length }}{% endif %}
{{ m.content }}<|im_end|>
{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|user|>"),
    *("<|assistant|>", "<|observation|>", "[gMASK]", "<sop>", "<|start|>", "<|message|>", "<|end|>", "<|return|>"),
    *("<|call|>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
)
FAMILIES = {
    "chatml": (CHATML, ["<|im_end|>"], "<|im_end|>", "<|im_end|>"),
    "thinking": (THINKING, ["<|im_end|>"], "<|im_end|>", "<|im_end|>"),
    "headers": (HEADERS, ["<|eot_id|>"], "<|eot_id|>", "<|eot_id|>"),
    "role markers": (ROLE_MARKERS, ["<|user|>", "<|observation|>"], "<|user|>", "<|observation|>"),
    "channels": (CHANNELS, ["<|return|>", "<|call|>"], "<|return|>", "<|call|>"),
    "brackets": (BRACKETS, [], "</s>", "</s>"),
}
"""Template, tokens that end a turn beside </s>, and those that the model draws after an answer and after a call."""


def tokenizer_of(template):
    """A token for each character, and one for each special text."""
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: place for place, token in enumerate(["<unk>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=template
    )
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return fast


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


def test_plain_text_follows_without_marks():
    tokenizer = tokenizer_of(None)
    continuation = ChatContinuation(Chat(tokenizer=tokenizer, end_ids=frozenset([2])))
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
