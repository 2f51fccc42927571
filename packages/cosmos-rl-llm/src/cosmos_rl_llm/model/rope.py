"""Rotary embeddings that depend on a sequence's length (longrope, dynamic NTK), in rows of several sequences.

    lengths of the sequences [L]    12 12 .. 12 | 5000 5000 .. 5000        original length 4096
    transformers, of the row        the factors of 5000 for all of it
    `SequenceRope`                  short factors | those of 5000          as each sequence has alone

transformers takes the length from the largest position of its input. A rank's part of a row, or a decode step, need not
contain that position, and a packed row has those of other sequences too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

_KINDS = ("longrope", "dynamic")


class SequenceRope:
    """The rotary embeddings of a model that depend on the length; a model without them has none, and stays as it is.

    rope = SequenceRope(model)
    with rope.of(rope.lengths(lengths)):
        model(row)
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Change the embeddings of `model`, in place: inside of `of` they know the sequences of their input."""
        self.original = original_length(model.config.get_text_config())
        self._lengths: Tensor | None = None
        for module in model.modules() if self.original is not None else ():
            if (kinds := _kinds_of(module)) and kinds & {*_KINDS}:
                self._change(module, dynamic="dynamic" in kinds)

    def lengths(self, lengths: np.ndarray) -> Tensor | None:
        """Length of each token's sequence -> what the embeddings depend on, int64; None if all have the usual ones.

        All sequences up to the original length have the same factors, and their entries are 0.
        """
        if self.original is None or not (lengths > self.original).any():
            return None
        return torch.from_numpy(np.where(lengths > self.original, lengths, 0))

    @contextmanager
    def of(self, lengths: Tensor | None) -> Iterator[None]:
        """Let the forward pass inside compute with `lengths` [B, L], of the positions of its input."""
        self._lengths = lengths
        try:
            yield
        finally:
            self._lengths = None

    def _change(self, module: Any, *, dynamic: bool) -> None:
        inner = module.forward

        def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if self._lengths is None:
                return inner(x, position_ids, *args, **kwargs)
            lengths = self._lengths.to(position_ids.device)
            assert lengths.shape == position_ids.shape[-2:], (lengths.shape, position_ids.shape)
            if not dynamic:  # short factors or long ones
                lengths = lengths.clamp(max=(self.original or 0) + 1)
            result: tuple[Tensor, Tensor] | None = None
            for length in lengths.unique().tolist():
                if dynamic:  # it keeps the factors of the longest sequence so far until a short one comes
                    inner(x, torch.zeros_like(position_ids), *args, **kwargs)
                mine = lengths == length
                last = torch.full_like(position_ids[..., :1], max(length - 1, 0))  # determines the factors
                cos, sin = inner(x, torch.cat([torch.where(mine, position_ids, 0), last], dim=-1), *args, **kwargs)
                part, mine = (cos[..., :-1, :], sin[..., :-1, :]), mine[..., None]
                result = part if result is None else _chosen(mine, part, result)
            assert result is not None
            return result

        module.forward = forward


def original_length(config: PreTrainedConfig) -> int | None:
    """The length up to which all sequences have the same rotary embedding; None: they have it at any length."""
    tables = getattr(config, "rope_parameters", None) or {}
    tables = [tables] if "rope_type" in tables else [table for table in tables.values() if isinstance(table, Mapping)]
    lengths = {
        "longrope": lambda table: table["original_max_position_embeddings"],
        "dynamic": lambda _: config.max_position_embeddings,
    }
    return min(
        (lengths[table["rope_type"]](table) for table in tables if table.get("rope_type") in lengths), default=None
    )


def _kinds_of(module: Any) -> set[str]:
    kinds = vars(module).get("rope_type")
    return {kinds} if isinstance(kinds, str) else set(kinds.values()) if isinstance(kinds, Mapping) else set()


def _chosen(mine: Tensor, part: tuple[Tensor, Tensor], rest: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.where(mine, part[0], rest[0]), torch.where(mine, part[1], rest[1])
