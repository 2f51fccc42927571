"""Pictures and videos of the sequences of a packed row, as tensors of `Microbatch.inputs`.

    item_index [L]    number of the token's showing, -1 for text        item_kind [n]      place in KINDS
    item_shown [m]    item of each showing                              item_grid [n, 3]
    item_digest [n]   hash of what the tower sees                       item_rows [n]      rows of `pixels` of each item
    batch_kinds [k]   places in KINDS of the kinds in the whole batch   pixels [sum of rows, ...]

A showing is an item in a sequence. Equal items of a microbatch are kept once. `batch_kinds` is the same on every rank
that trains on the batch, and is there for text too where other microbatches have items.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_llm.media.item import KINDS, MediaItem, VisionFamily, positions_of, view_of


def pack_items(of_sequences: Sequence[Sequence[MediaItem]], item_index: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return the tensors of the items of sequences; empty without items.

    item_index: [length] of each sequence: the place of each token's item among the sequence's, -1 for text.
    """
    numbers: dict[int, int] = {}
    kept: list[MediaItem] = []
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


def batch_kinds(items: Iterable[MediaItem]) -> dict[str, Tensor]:
    """Return the input `batch_kinds` of a batch that shows `items`; empty without items."""
    kinds = sorted({KINDS.index(item.kind) for item in items})
    return {"batch_kinds": torch.tensor(kinds)} if kinds else {}


def add_blanks(inputs: Mapping[str, Tensor], family: VisionFamily, *, always: bool) -> Mapping[str, Tensor]:
    """Append a sequence without terms, which shows a blank item, for each kind that the batch has and the row lacks.

    Ranks that gather the tower's parameters together then run it equally often, forward and backward. The gradient of
    the blank items is zero: no term is predicted from their tokens. `always`: show one in batches of text too.
    """
    here = inputs["item_kind"].tolist() if "item_kind" in inputs else []
    of_batch = inputs["batch_kinds"].tolist() if "batch_kinds" in inputs else [0] * always
    kinds = [KINDS[kind] for kind in of_batch if kind not in here]
    if not kinds:
        return inputs
    blanks = [family.blank(kind) for kind in kinds]
    tokens = [np.full(family.num_tokens(item), family.token_ids[item.kind]) for item in blanks]
    views = [view_of(ids, [item], family) for ids, item in zip(tokens, blanks, strict=True)]
    lengths = [len(ids) for ids in tokens]
    added = pack_items([view.items for view in views], [view.index_of(n) for view, n in zip(views, lengths)])
    if here:
        added["item_index"] += len(inputs["item_shown"])
        added["item_shown"] += len(inputs["item_kind"])
    numbers = torch.arange(len(kinds)).repeat_interleave(torch.tensor(lengths))
    added["tokens"] = torch.from_numpy(np.concatenate(tokens))
    added["sequence_index"] = inputs["sequence_index"][-1] + 1 + numbers
    if "routes" in inputs:
        added["routes"] = inputs["routes"].new_zeros(len(numbers), *inputs["routes"].shape[1:])
    known = {"item_index": torch.full_like(inputs["tokens"], -1), **inputs}
    joined = {name: torch.cat([known[name], more]) if name in known else more for name, more in added.items()}
    positions = [inputs["positions"], torch.from_numpy(positions_of(views, lengths))]
    axes = max(each.ndim for each in positions)
    joined["positions"] = torch.cat([each.expand(3, -1) if axes == 2 else each for each in positions], dim=-1)
    return {**inputs, **joined}


def two_way_items(inputs: Mapping[str, Tensor], family: VisionFamily | None, *, length: int) -> np.ndarray | None:
    """Return the showing of each of `length` tokens, -1 for text and padding; None unless attention is two-way."""
    if family is None or not family.two_way or "item_index" not in inputs:
        return None
    index = inputs["item_index"].numpy()
    return np.pad(index, (0, length - len(index)), constant_values=-1)


def digests(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the digest of each token's item [L] int64, -1 for text."""
    of_showings = torch.cat([inputs["item_digest"][inputs["item_shown"]], torch.tensor([-1])])
    return of_showings[inputs["item_index"]]


def items_of(inputs: Mapping[str, Tensor], taken: Tensor) -> list[MediaItem]:
    """Return the items that the tokens `taken` [l] show, in the order of their first tokens."""
    index = inputs["item_index"][taken]
    showings = dict.fromkeys(index[index >= 0].tolist())
    pixels = np.split(inputs["pixels"].numpy(), np.cumsum(inputs["item_rows"].numpy())[:-1])
    items = []
    for number in inputs["item_shown"][list(showings)].tolist():
        time, height, width = inputs["item_grid"][number].tolist()
        kind = KINDS[int(inputs["item_kind"][number])]
        items.append(MediaItem(kind=kind, pixels=pixels[number], grid=(time, height, width)))
    return items
