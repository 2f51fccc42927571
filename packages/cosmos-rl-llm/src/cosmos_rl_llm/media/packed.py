"""Pictures and videos of the sequences of a packed row, as tensors of `Microbatch.inputs`.

    item_index [L]    number of the token's showing, -1 for text        item_kind [n]      place in KINDS
    item_shown [m]    item of each showing                              item_grid [n, 3]
    item_digest [n]   hash of what the tower sees                       item_rows [n]      rows of `pixels` of each item
                                                                        pixels [sum of rows, ...]

A showing is an item in a sequence. Equal items of a microbatch are kept once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_llm.media.item import KINDS, Item


def pack_items(of_sequences: Sequence[Sequence[Item]], item_index: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return the tensors of the items of sequences; empty without items.

    item_index: [length] of each sequence: the place of each token's item among the sequence's, -1 for text.
    """
    numbers: dict[int, int] = {}
    kept: list[Item] = []
    shown: list[int] = []
    columns: list[np.ndarray] = []
    for items, index in zip(of_sequences, item_index, strict=True):
        columns.append(np.where(index < 0, -1, index + len(shown)))
        for item in items:
            if item.digest not in numbers:
                numbers[item.digest] = len(kept)
                kept.append(item)
            shown.append(numbers[item.digest])
    if not kept:
        return {}
    return {
        "item_index": torch.from_numpy(np.concatenate(columns)),
        "item_shown": torch.tensor(shown),
        "item_digest": torch.tensor([item.digest for item in kept]),
        "item_kind": torch.tensor([KINDS.index(item.kind) for item in kept]),
        "item_grid": torch.tensor([item.grid for item in kept]),
        "item_rows": torch.tensor([len(item.pixels) for item in kept]),
        "pixels": torch.from_numpy(np.concatenate([item.pixels for item in kept])),
    }


def digests(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the digest of each token's item [L] int64, -1 for text."""
    of_showings = torch.cat([inputs["item_digest"][inputs["item_shown"]], torch.tensor([-1])])
    return of_showings[inputs["item_index"]]


def items_of(inputs: Mapping[str, Tensor], taken: Tensor) -> list[Item]:
    """Return the items that the tokens `taken` [l] show, in the order of their first tokens."""
    index = inputs["item_index"][taken]
    showings = dict.fromkeys(index[index >= 0].tolist())
    pixels = np.split(inputs["pixels"].numpy(), np.cumsum(inputs["item_rows"].numpy())[:-1])
    found = []
    for number in inputs["item_shown"][list(showings)].tolist():
        time, height, width = inputs["item_grid"][number].tolist()
        kind = KINDS[int(inputs["item_kind"][number])]
        found.append(Item(kind=kind, pixels=pixels[number], grid=(time, height, width)))
    return found
