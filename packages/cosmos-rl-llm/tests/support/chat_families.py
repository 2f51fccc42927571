"""Chat templates of six families, written for the tests, and a tokenizer that has their special tokens."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
