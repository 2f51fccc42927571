"""The prompt on which engine and policy are compared: beyond the windows of the model's attention, if that is allowed.

    window 4096, model.max_length = 32768      4160 tokens: beyond the window
    window 4096, model.max_length = 2048       2032 tokens: no sequence of the recipe is longer
    no window                                  512 tokens

The text is of random tokens: a text that repeats itself is predicted as well from the part inside of a window.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cosmos_rl_core.errors import PromptError
from cosmos_rl_core.types import Prompt, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from cosmos_rl_core.recipe.run import RunConfig

EXACT_TOLERANCE, ROUNDED_TOLERANCE = 3e-4, 0.1
"""Mean difference of engine and policy in nats a token, above which they differ: in float32, and in other dtypes."""
RESPONSE = 16
"""Tokens that are generated after it."""
_BEYOND = 64
"""Length above that of a window."""
_USUAL = 512
"""Length for a model without windows."""
_LONGEST = 8192 + _BEYOND
"""Longest prompt, so that the start of a run does not take long."""


def prompt_beyond_window(config: RunConfig) -> tuple[Prompt, Sampling]:
    """Return the long prompt of a recipe. Imports no torch before it is called. Raises as `long_prompt`."""
    from cosmos_rl_llm.model.causal_lm import load_tokenizer, read_config
    from cosmos_rl_llm.model.checkpoint import checkpoint_of, resolve

    source = resolve(checkpoint_of(config.model))
    text = read_config(source)[0].get_text_config()
    limit = config.rollout.options.get("max_model_len") or config.model.max_length
    limit = limit or getattr(text, "max_position_embeddings", None)
    return long_prompt(load_tokenizer(source), text, limit=limit, sampling=config.rollout.sampling.build())


def engine_tolerance(config: RunConfig) -> float:
    """Return the mean difference in nats a token that rounding explains."""
    engine = (config.rollout.options.get("dtype") if config.rollout.engine == "vllm" else None) or "float32"
    return EXACT_TOLERANCE if engine == config.model.dtype == "float32" else ROUNDED_TOLERANCE


def long_prompt(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, *, limit: int | None, sampling: Sampling
) -> tuple[Prompt, Sampling]:
    """Return a prompt of plain text, and sampling parameters for short responses.

    config: of the model's text part. limit: maximum tokens of prompt and response. Raises PromptError if the limit
    leaves no room.
    """
    response = min(RESPONSE, sampling.max_terms)
    most = min(_LONGEST, _LONGEST if limit is None else limit - response)
    bounds = sorted(set(boundaries(config)))
    passed = [bound for bound in bounds if bound < most]
    if passed == bounds or most == _LONGEST:
        length = min(most, passed[-1] + _BEYOND if passed else _USUAL)
    else:
        length = most
    text, num_tokens = _text(tokenizer, length)
    prompt = Prompt(sample_id=0, row={"prompt": text}, origin=_describe(num_tokens, bounds, most=most))
    return prompt, replace(sampling, max_terms=response, stop=())


def boundaries(config: PreTrainedConfig) -> Iterator[int]:
    """Yield the lengths above which the model computes in another way: windows, chunks, rotary embeddings."""
    from cosmos_rl_llm.model.miniature import WINDOWS
    from cosmos_rl_llm.model.rope import original_length

    kinds = getattr(config, "layer_types", None) or ["unknown"]
    is_windowed = getattr(config, "use_sliding_window", True) and any("full" not in kind for kind in kinds)
    names = (*WINDOWS, "attention_chunk_size") if is_windowed else ()
    for length in (*(getattr(config, name, None) for name in names), original_length(config)):
        if isinstance(length, int) and length > 0:
            yield length


def _describe(num_tokens: int, bounds: list[int], *, most: int) -> str:
    text = f"a prompt of {num_tokens} tokens"
    if not bounds:
        return text
    if num_tokens > bounds[-1]:
        return f"{text}, beyond the model's window of {bounds[-1]}"
    why = "and none is compared that is longer" if most == _LONGEST else "which no sequence of this recipe exceeds"
    return f"{text}, within the model's window of {bounds[-1]}, {why}"


def _text(tokenizer: PreTrainedTokenizerBase, length: int) -> tuple[str, int]:
    """Return the longest text of random tokens that has at most `length` tokens, and their number."""
    from cosmos_rl_llm.data.chat import Chat

    chat = Chat(tokenizer=tokenizer, end_ids=frozenset())
    tokens = np.random.default_rng(0).integers(0, len(tokenizer), size=2 * max(1, length))

    def num_tokens(count: int) -> int:
        return len(chat.encode_prompt({"prompt": chat.decode(tokens[:count])}).tokens)

    count = bisect_right(range(1, len(tokens)), length, key=num_tokens)
    if length < 1 or count < 1:
        raise PromptError(f"a prompt of {length} tokens has no text")
    return chat.decode(tokens[:count]), num_tokens(count)
