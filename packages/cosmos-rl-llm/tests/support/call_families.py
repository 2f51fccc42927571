"""Calls of tools in the formats of seven families of models, with chat templates in their style."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from cosmos_rl_core.types import ToolCall

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "note": {"type": "string"}},
        },
    },
}
TOOLS = [ADD]
SUM, OTHER = ToolCall(name="add", arguments={"a": 1, "b": 2}), ToolCall(name="add", arguments={"a": 3, "b": 4})


def tokenizer(template: str, specials: list[str], **options) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
        eos_token=specials[0],
        additional_special_tokens=specials,
        **options,
    )
    fast.chat_template = template
    return fast


CHATML = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}BEGINS{% endif %}{{ m.content }}{% for t in m.tool_calls or [] %}
<tool_call>
CALL
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
OPENS{% endif %}"""
JSON_CALL = '{"name": "{{ t.function.name }}", "arguments": {{ t.function.arguments | tojson }}}'
XML_CALL = """<function={{ t.function.name }}>
{% for key, value in t.function.arguments.items() %}<parameter={{ key }}>
{{ value }}
</parameter>
{% endfor %}</function>"""
PAIRS_CALL = """{{ t.function.name }}
{% for key, value in t.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value }}</arg_value>
{% endfor %}"""
THOUGHT = "{# </think> #}"
HARMONY = """{% for m in messages %}<|start|>{{ m.role }}{% for t in m.tool_calls or [] %}<|channel|>commentary
to=functions.{{ t.function.name }} <|constrain|>json<|message|>{{ t.function.arguments | tojson }}<|call|>{% else %}
<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}{% endfor %}<|start|>assistant"""
MISTRAL = """{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %}{{ m.content }}
{%- for t in m.tool_calls or [] %}[TOOL_CALLS]{{ t.function.name }}[ARGS]{{ t.function.arguments | tojson }}
{%- endfor %}</s>{% endif %}{% endfor %}{# [THINK] [/THINK] #}"""
DEEPSEEK = """{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜>{% else %}
{{- m.content }}{% for t in m.tool_calls or [] %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ t.function.name
+ '<｜tool▁sep｜>' + t.function.arguments }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>{% endfor %}{% endif %}{% endfor %}
{#- <think> </think> #}"""
LLAMA = """{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% for t in m.tool_calls or [] %}{"name": "{{ t.function.name }}", "parameters": {{ t.function.arguments | tojson }}}
{%- else %}{{ m.content }}{% endfor %}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant
<|end_header_id|>

{% endif %}"""


@dataclass(frozen=True)
class Family:
    template: str
    specials: list[str]
    one: str
    """A text, then add(1, 2)."""
    two: str
    """add(1, 2) and add(3, 4)."""
    broken: str
    reason: str
    thinking: str = ""
    """A call inside a thought, then the text "3"."""
    text: str = "Let me see."


def hermes(a: int, b: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


def xml(a: int, b: int) -> str:
    values = f"<parameter=a>\n{a}\n</parameter>\n<parameter=b>\n{b}\n</parameter>"
    return f"<tool_call>\n<function=add>\n{values}\n</function>\n</tool_call>"


def pairs(a: int, b: int) -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in (("a", a), ("b", b))
    )
    return f"<tool_call>add\n{values}</tool_call>"


def harmony(a: int, b: int, channel: str = "commentary") -> str:
    return f'<|channel|>{channel} to=functions.add <|constrain|>json<|message|>{{"a": {a}, "b": {b}}}<|call|>'


def deepseek_v3(a: int, b: int) -> str:
    body = f'add\n```json\n{{"a": {a}, "b": {b}}}\n```'
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{body}<｜tool▁call▁end｜>"


def deepseek_v31(a: int, b: int) -> str:
    return f'<｜tool▁call▁begin｜>add<｜tool▁sep｜>{{"a": {a}, "b": {b}}}<｜tool▁call▁end｜>'


def within(*calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


DEEPSEEK_SPECIALS = [
    "<｜end▁of▁sentence｜>",
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
]
FAMILIES = {
    "hermes": Family(
        CHATML.replace("CALL", JSON_CALL).replace("OPENS", "").replace("BEGINS", "") + THOUGHT,
        ["<|im_end|>", "<|im_start|>"],
        one=f"Let me see.\n{hermes(1, 2)}<|im_end|>",
        two=f"{hermes(1, 2)}\n{hermes(3, 4)}<|im_end|>",
        broken='<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": }}\n</tool_call><|im_end|>',
        reason="a call is no JSON: Expecting value at character",
        thinking=f"<think>\n{hermes(9, 9)}?\n</think>\n\n3<|im_end|>",
    ),
    "qwen_xml": Family(
        CHATML.replace("CALL", XML_CALL).replace("OPENS", "<think>\n").replace("BEGINS", "<think>\n</think>\n"),
        ["<|im_end|>", "<|im_start|>"],
        one=f"</think>Let me see.\n{xml(1, 2)}<|im_end|>",
        two=f"</think>{xml(1, 2)}\n{xml(3, 4)}<|im_end|>",
        broken="</think><tool_call>\n<function=add>\na=1\n</function>\n</tool_call><|im_end|>",
        reason="the call of add has text that is no <parameter=KEY>",
        thinking=f"{xml(9, 9)}?\n</think>\n\n3<|im_end|>",
    ),
    "glm": Family(
        CHATML.replace("CALL", PAIRS_CALL).replace("OPENS", "").replace("BEGINS", "") + THOUGHT,
        ["<|im_end|>", "<|im_start|>"],
        one=f"Let me see.\n{pairs(1, 2)}<|im_end|>",
        two=f"{pairs(1, 2)}\n{pairs(3, 4)}<|im_end|>",
        broken="<tool_call>add(1, 2)<more></tool_call>",
        reason="the call of add(1, 2) has text that is no <arg_key>KEY",
        thinking=f"<think>{pairs(9, 9)}?</think>\n3<|im_end|>",
    ),
    "harmony": Family(
        HARMONY,
        ["<|return|>", "<|start|>", "<|end|>", "<|call|>", "<|channel|>", "<|message|>", "<|constrain|>"],
        one=f"<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{harmony(1, 2)}",
        two=f"{harmony(1, 2)}<|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
        '{"a": 3, "b": 4}<|call|>',
        broken='<|channel|>commentary to=functions.add<|message|>{"a": 1<|call|>',
        reason="the arguments of add is no JSON",
        thinking="<|channel|>analysis<|message|>call functions.add with {}?<|end|><|start|>assistant"
        "<|channel|>final<|message|>3<|return|>",
    ),
    "mistral": Family(
        MISTRAL,
        ["</s>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"],
        one='Let me see.[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}</s>',
        two='[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, '
        '{"name": "add", "arguments": {"a": 3, "b": 4}}]</s>',
        broken="[TOOL_CALLS]add[ARGS][1, 2]</s>",
        reason="the arguments of add are [1, 2] instead of an object",
        thinking='[THINK][TOOL_CALLS]add[ARGS]{"a": 9}?[/THINK]3</s>',
    ),
    "deepseek": Family(
        DEEPSEEK,
        DEEPSEEK_SPECIALS,
        one=f"Let me see.{within(deepseek_v31(1, 2))}",
        two=within(deepseek_v3(1, 2), "\n", deepseek_v3(3, 4)),
        broken=within(deepseek_v3(1, 2).replace("}", "")),
        reason="the arguments of add is no JSON",
        thinking=f"<think>{deepseek_v31(9, 9)}?</think>3<｜end▁of▁sentence｜>",
    ),
    "llama": Family(
        LLAMA,
        ["<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<|start_header_id|>", "<|end_header_id|>"],
        one='Let me see.{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>',
        two='<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}; '
        '{"type": "function", "name": "add", "parameters": {"a": 3, "b": 4}}<|eom_id|>',
        broken="<|python_tag|>add.call(a=1)<|eom_id|>",
        reason="a call is no JSON",
    ),
}
