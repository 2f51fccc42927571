"""Conditions of a prompt's samples: the embedded caption and the given frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cosmos_rl_core.data.video import ByteCache
from cosmos_rl_core.errors import PromptError, SampleError
from cosmos_rl_core.types import Prompt
from cosmos_rl_wfm.data.clips import ClipReader
from cosmos_rl_wfm.models.base import Condition
from cosmos_rl_wfm.models.config import GivenSection

if TYPE_CHECKING:
    from torch import Tensor

    from cosmos_rl_wfm.models.model import DiffusersModel

_CPU = torch.device("cpu")


class Conditions:
    """Makes conditions, on the CPU; embedded captions are cached. One thread calls it at a time."""

    def __init__(
        self, model: DiffusersModel, reader: ClipReader, given: GivenSection, *, captions: ByteCache[Condition]
    ) -> None:
        """Take the reader of one [data] section.

        captions: embedded ones in host memory, [1] each; may be shared with the conditions of other sections. Its limit
            is in bytes since captions are large: 512 x 100,352 numbers in Predict2.5, 98 MiB in bfloat16.
        """
        self._model, self._reader, self._given = model, reader, given
        self._captions = captions
        self._unconditional: Condition | None = None

    @property
    def unconditional(self) -> Condition:
        """The condition [1] of the model's negative prompt, for guidance."""
        if self._unconditional is None:
            self._unconditional = self._model.encode_text([self._model.traits.negative_prompt]).to(_CPU)
        return self._unconditional

    def of(self, prompt: Prompt) -> Condition:
        """Return the condition [1] of a prompt. Raises PromptError for a row without a caption or given frames."""
        caption = prompt.row.get("caption")
        if not isinstance(caption, str):
            raise PromptError(f"{prompt.origin}: the row has no caption")
        condition = self.of_caption(caption, prompt.row)
        if not self._given.max_frames:
            return condition
        rng = np.random.default_rng(prompt.sample_id)
        try:
            video = self._reader.clip(prompt.row, rng).video
        except SampleError as error:
            raise PromptError(error.reason) from error
        return self.with_given(condition, torch.from_numpy(video)[None], rng)

    def of_caption(self, caption: str, row: Mapping[str, Any], *, text: np.ndarray | None = None) -> Condition:
        """Return the condition [1] of a caption alone: from the row's own embedding or the model's encoder.

        `text` float32 [L, E] is the row's embedding, where it was read before.
        """
        source = self._reader.text_source(row) if caption else None
        key = caption, source  # rows may share a caption and have different embeddings
        if (known := self._captions.get(key)) is not None:
            return known
        embedding = self._reader.text(row) if source is not None and text is None else text
        if embedding is None:
            condition = self._model.encode_text([caption]).to(_CPU)
        else:
            condition = self._model.cached_text([torch.from_numpy(embedding)], where=[str(row.get("key", caption))])
        self._captions.put(key, condition, condition.nbytes)
        return condition

    def with_given(self, condition: Condition, video: Tensor, rng: np.random.Generator) -> Condition:
        """Add the first latent frames of `video` uint8 [1, F, H, W, 3] to the condition; `rng` samples their number."""
        section = self._given
        if not section.max_frames:
            return condition
        count = int(rng.integers(section.min_frames, section.max_frames + 1))
        return self._model.with_given(condition, video, counts=torch.tensor([count]))


def joined(conditions: Sequence[Condition], counts: Sequence[int]) -> Condition:
    """Return conditions [1] as one [B], each repeated for its number of samples in `counts`. All have the same parts.

    Each caption is stored once.
    """
    first, *others = conditions
    each = {
        name: torch.cat([tensor, *(getattr(other, name) for other in others)])
        for name, tensor in first.tensors().items()
    }
    rows = torch.arange(len(conditions))
    shared = replace(first, **each, text_rows=rows.to(first.text.device))
    return shared.select(rows.repeat_interleave(torch.tensor(counts)))


def arrays_of(condition: Condition) -> dict[str, np.ndarray]:
    """Return a condition [1] as the arrays of a rollout or a row."""
    return {
        name: (tensor[0].float() if tensor.is_floating_point() else tensor[0]).cpu().numpy()
        for name, tensor in condition.tensors().items()
    }
