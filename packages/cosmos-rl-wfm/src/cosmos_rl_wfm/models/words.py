"""Captions as bags of fixed random vectors, one a word: nothing to download, nothing to learn. For demos and tests."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from cosmos_rl_wfm.models.base import Condition

_WORD = re.compile(r"[^\W_]+|[^\w\s]")


class WordEncoder:
    """A word's vector is drawn from a Gaussian that the word and the seed decide, so that there is no vocabulary.

    A caption's pooled vector is drawn in the same way for the whole caption.
    """

    def __init__(self, *, width: int, length: int, seed: int = 0, pooled_width: int | None = None) -> None:
        """`length`: most words of a caption; those after it are left out."""
        self._width, self._length, self._seed, self._pooled_width = width, length, seed, pooled_width

    def __call__(self, captions: Sequence[str]) -> Condition:
        """Return text [B, L, E] and mask; "" has no token."""
        text = torch.zeros(len(captions), self._length, self._width)
        mask = torch.zeros(len(captions), self._length, dtype=torch.bool)
        for row, caption in enumerate(captions):
            for place, word in enumerate(_WORD.findall(caption.lower())[: self._length]):
                text[row, place] = self._vector(word, self._width)
                mask[row, place] = True
        pooled = None
        if self._pooled_width is not None:
            pooled = torch.stack([self._vector(f"caption:{caption}", self._pooled_width) for caption in captions])
        return Condition(text=text, text_mask=mask, pooled=pooled)

    def _vector(self, word: str, width: int) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed * 2**32 + zlib.crc32(word.encode()))
        return torch.randn(width, generator=generator)
