"""vLLM's parsers find the same calls."""

from __future__ import annotations

import importlib.util
import json

import pytest
from call_families import FAMILIES, TOOLS, tokenizer

from cosmos_rl_llm.tools.calls import find_call_format

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
    pytest.mark.filterwarnings("ignore"),  # of vLLM's imports
]
PARSERS = {
    "hermes": ("hermes", "hermes"),
    "qwen_xml": ("qwen3_coder", "qwen3_coder"),
    "glm": ("glm47", "glm47"),
    "mistral": ("mistral", "mistral"),
    "deepseek": ("deepseek_v31", "deepseek_v3"),
    "llama": ("llama3_json", "llama3_json"),
}
"""The parsers of a family's fixtures `one` and `two`. That of gpt-oss downloads its vocabulary."""


@pytest.mark.parametrize(("name", "place"), [(name, place) for name in PARSERS for place in (0, 1)])
def test_vllm_finds_the_same_calls(name, place):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    family = FAMILIES[name]
    lacks = ("[ARGS]", "[CALL_ID]") if (name, place) == ("mistral", 1) else ()  # models that write a list have none
    words = tokenizer(family.template, [each for each in family.specials if each not in lacks])
    words.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>"])
    words.add_tokens(["<arg_value>", "</arg_value>"])
    text = (family.one, family.two)[place]
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=TOOLS, model="m")
    parser = ToolParserManager.get_tool_parser(PARSERS[name][place])(words, request.tools)
    output = text.removesuffix(family.specials[0]).removesuffix("<|eom_id|>")  # vLLM's text has no stop token
    found = parser.extract_tool_calls(output, request).tool_calls
    calls = find_call_format(words).parse(text, TOOLS).calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in found] == [
        (call.name, call.arguments) for call in calls
    ]
