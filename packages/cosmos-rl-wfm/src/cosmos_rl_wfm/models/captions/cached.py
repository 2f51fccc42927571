"""Captions without a text encoder: embeddings that come with the data, and words as fixed random vectors."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.models.base import Condition


class CachedCaptions:
    """Embeds only the empty caption, as zeros; all others come from `pad_text`."""

    def __init__(self, *, width: int, length: int, pooled_width: int | None = None) -> None:
        self._width, self._length, self._pooled_width = width, length, pooled_width

    def __call__(self, captions: Sequence[str]) -> Condition:
        """Raises UserError for a caption that is not empty."""
        if unknown := [caption for caption in captions if caption]:
            raise UserError(
                f'the caption {unknown[0][:60]!r} has no embedding in the data and text.encoder = "cached" makes none; '
                'embed all captions beforehand, or set text.encoder = "model"'
            )
        text = torch.zeros(len(captions), self._length, self._width)
        pooled = None if self._pooled_width is None else torch.zeros(len(captions), self._pooled_width)
        return Condition(text=text, text_mask=torch.zeros(text.shape[:2], dtype=torch.bool), pooled=pooled)


def pad_text(embeddings: Sequence[Tensor], *, length: int, width: int, where: Sequence[str] = ()) -> Condition:
    """Embeddings [l, E] of captions -> Condition with text [B, length, E], cut or padded by zeros.

    `where` names the embeddings for messages. Raises UserError for one of another shape.
    """
    text = torch.zeros(len(embeddings), length, width)
    mask = torch.zeros(len(embeddings), length, dtype=torch.bool)
    for row, embedding in enumerate(embeddings):
        if embedding.ndim != 2 or embedding.shape[1] != width:
            name = where[row] if where else f"embedding {row}"
            raise UserError(
                f"{name} is {list(embedding.shape)}; the network takes [tokens, {width}]: embed the captions with the "
                "text encoder that it was trained with"
            )
        kept = embedding[:length]
        text[row, : len(kept)] = kept
        mask[row, : len(kept)] = True
    return Condition(text=text, text_mask=mask)


_WORD = re.compile(r"[^\W_]+|[^\w\s]")


class WordEncoder:
    """Maps a word to a Gaussian vector seeded by the word and the seed, without a vocabulary.

    The pooled vector of a caption is seeded by the whole caption in the same way.
    """

    def __init__(self, *, width: int, length: int, seed: int = 0, pooled_width: int | None = None) -> None:
        """`length`: most words of a caption; further words are dropped."""
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
