"""Heads that map a sequence of tokens to a few numbers: the critic, and the auxiliary targets of demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

QUERIES = 4
"""Number of attention queries: a single one cannot attend to two objects separately."""


class Readout(nn.Module):
    """Tokens -> one vector -> MLP -> outputs. In float32, independent of the trunk's dtype."""

    def __init__(
        self, width: int, *, outputs: int, pool: Literal["mean", "attention"], hidden: Sequence[int], detach: bool
    ) -> None:
        super().__init__()
        self.detach = detach
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, QUERIES, bias=False) if pool == "attention" else None
        widths = (width if self.query is None else QUERIES * width, *hidden)
        inner = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU(approximate="tanh"))]
        last = nn.Linear(widths[-1], outputs)
        nn.init.normal_(last.weight, std=0.01)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(*inner, last)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """tokens [B, N, width], mask [B, N] bool -> [B, outputs] float32."""
        tokens = self.norm((tokens.detach() if self.detach else tokens).to(self.norm.weight.dtype))
        scores = tokens.new_zeros(*tokens.shape[:2], 1) if self.query is None else self.query(tokens)
        weights = torch.softmax(scores.masked_fill(~mask[..., None], float("-inf")), dim=1)
        return self.layers((weights.transpose(1, 2) @ tokens).flatten(1)).float()
