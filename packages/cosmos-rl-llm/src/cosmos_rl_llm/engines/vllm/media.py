"""Pictures and videos of a prompt in the form of vLLM's requests: processed tensors and their places among the tokens.

    Encoded.tokens   <bos> <image> <image> ... what is it ?      as they are: vLLM expands nothing and tokenises nothing
    Encoded.view     items, and the item of each token    --->   placeholders: offset, length, and which tokens of these
                     pixels, grids                        --->   mm_kwargs, batched as the model's class in vLLM says

A video of tiles (SmolVLM, InternVL) is for vLLM a picture with as many tiles, whose tokens have text between them.

The name under which vLLM caches a tower's output, and keys and values after it, is a hash of the pixels and the version
of the weights: equal texts with other pictures differ, and so do equal pictures after the weights have changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cosmos_rl_core.errors import PromptError
from cosmos_rl_llm.media.item import View, VisionFamily
from cosmos_rl_llm.media.qwen import QwenVision

if TYPE_CHECKING:
    from vllm.inputs.engine import EngineInput
    from vllm.v1.engine.async_llm import AsyncLLM


class VllmMedia:
    """Makes requests with the pictures of one model."""

    def __init__(self, llm: AsyncLLM, family: VisionFamily) -> None:
        self._llm = llm
        self._processor = llm.renderer.get_mm_processor()
        self._dtype: torch.dtype = llm.model_config.dtype
        self._family = family

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that are never sampled: the placeholders, which would ask for further pictures."""
        return tuple(self._family.token_ids.values())

    def check(self, view: View, *, where: str) -> None:
        """Raise PromptError for a picture or video with more tokens than vLLM keeps of a tower's outputs."""
        most = max(map(self._family.num_tokens, view.items), default=0)
        limit = self._llm.input_processor.mm_encoder_cache_size
        if most > limit:
            raise PromptError(
                f"{where}: a picture or video of {most} tokens, and vLLM takes up to {limit}; raise "
                "max_num_batched_tokens in rollout.options.extra"
            )

    def prompt(self, tokens: np.ndarray, view: View, *, version: int) -> EngineInput:
        """Return a request's prompt of tokens [prompt] that show the items of `view`, at least one."""
        from transformers import BatchFeature
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems

        family, items = self._family, view.items
        inputs = {name: self._cast(name, value) for name, value in family.vllm_inputs(items).items()}
        leads, kinds = 0, ["image"] * len(items)
        if isinstance(family, QwenVision):
            leads, kinds = int(family.timestamps), [item.kind for item in items]
            if family.tokens_per_second is not None and "video" in kinds:
                seconds = [item.seconds for item in items if item.kind == "video"]
                inputs["second_per_grid_ts"] = torch.tensor(seconds)
        fields = self._processor._get_mm_fields_config(BatchFeature(inputs), {})
        return mm_input(
            tokens.tolist(),
            mm_kwargs=MultiModalKwargsItems.from_hf_inputs(BatchFeature(inputs), fields),
            mm_hashes=_by_kind(kinds, [f"{item.digest:x}-{version}" for item in view.items]),
            mm_placeholders=_by_kind(kinds, placeholders(view, leads=leads)),
            cache_salt=str(version),
        )

    def _cast(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return value.to(self._dtype) if name.startswith("pixel_values") else value


def placeholders(view: View, *, leads: int = 0) -> list[Any]:
    """Return the tokens of each item of a view in vLLM's form: first token, length, mask of its own tokens.

    leads: tokens before those of a video that belong to it. vLLM looks for the start of Qwen3-VL's steps there.
    """
    from vllm.multimodal.inputs import PlaceholderRange

    assert view.index is not None
    ranges = []
    for number, item in enumerate(view.items):
        places = np.flatnonzero(view.index == number)
        first = int(places[0]) - (leads if item.kind == "video" else 0)
        length = int(places[-1]) + 1 - first
        shown = torch.from_numpy(view.index[first : first + length] == number)
        ranges.append(PlaceholderRange(offset=first, length=length, is_embed=None if shown.all() else shown))
    return ranges


def _by_kind(kinds: Sequence[str], values: Sequence[Any]) -> Mapping[str, list[Any]]:
    by_kind: dict[str, list[Any]] = {}
    for kind, value in zip(kinds, values, strict=True):
        by_kind.setdefault(kind, []).append(value)
    return by_kind
