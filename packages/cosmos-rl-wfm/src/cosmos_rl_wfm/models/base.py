"""Inputs of models, and the letters of their tensors' dimensions; the model is `models/model.py`.

    video uint8 [B, F, H, W, 3] -- encode --> latents [B, C, f, h, w] -- noise, velocity --> latents -- decode --> video
    captions                    -- encode_text --> Condition

Letters: B samples, F frames, H W pixels; C f h w channels, frames, height and width of latents; L E tokens and width of
text.
Rectified flow throughout: x_t = (1 - t) x_0 + t noise with t in [0, 1], and the network predicts v = noise - x_0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The condition that B samples are generated for. Tensors begin with [B], except captions that samples share."""

    text: Tensor
    """[B, L, E]: embedded captions; with `text_rows` [U, L, E], one for the samples that share it."""
    text_mask: Tensor
    """[B, L] or [U, L] bool: False for padding."""
    text_rows: Tensor | None = None
    """[B] int64: each sample's row of `text` and `text_mask`; None: row b for sample b."""
    given: Tensor | None = None
    """[B, C, f, h, w]: clean latents with the given frames (image or video to video); None: no frame is given."""
    given_mask: Tensor | None = None
    """[B, f] bool: the frames of `given` that are given."""
    pooled: Tensor | None = None
    """[B, P]: one vector for the whole caption, for networks that take it beside the tokens (SD3)."""
    image: Tensor | None = None
    """[B, N, I]: embedded first frame, for networks that take it beside the text (Wan2.1 image to video)."""

    def to(self, device: torch.device) -> Condition:
        """Return the condition on another device."""
        return self._each(lambda tensor: tensor.to(device))

    def select(self, index: Tensor) -> Condition:
        """Return the samples `index` [N] int64, repeated where it repeats them. Shared captions stay as they are."""
        shared = () if self.text_rows is None else ("text", "text_mask")
        return self._each(lambda tensor: tensor[index.to(tensor.device)], but=shared)

    def gathered(self) -> Condition:
        """Return the condition with a copy of its caption for every sample."""
        if self.text_rows is None:
            return self
        return replace(self, text=self.text[self.text_rows], text_mask=self.text_mask[self.text_rows], text_rows=None)

    def with_text(self, other: Condition) -> Condition:
        """Return the condition with the one caption of `other` [1], for example the unconditional one of guidance."""
        pooled = None if self.pooled is None or other.pooled is None else other.pooled.expand_as(self.pooled)
        count = len(self.text if self.text_rows is None else self.text_rows)
        rows = torch.zeros(count, dtype=torch.int64, device=other.text.device)
        return replace(self, text=other.text, text_mask=other.text_mask, text_rows=rows, pooled=pooled)

    def _each(self, change: Callable[[Tensor], Tensor], *, but: Sequence[str] = ()) -> Condition:
        held = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in but}
        return replace(self, **{name: change(tensor) for name, tensor in held.items() if tensor is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a clip."""

    frames: int
    """1 for an image."""
    height: int
    """Pixels."""
    width: int
