"""A picture or video as a vision tower takes it, and the interface of a family of vision-language models."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from torch import Tensor

from cosmos_rl_llm.config import MediaSection
from cosmos_rl_llm.media.source import Fit, Video

if TYPE_CHECKING:
    from PIL.Image import Image


Kind = Literal["image", "video"]
KINDS = get_args(Kind)
NO_LIMITS = MediaSection()
"""Limits of the checkpoint's own processing alone."""


@dataclass(frozen=True, kw_only=True)
class MediaItem:
    """One picture or video, processed."""

    kind: Kind
    pixels: np.ndarray
    """[n, ...] float32: rows of the tower's input, such as patches [n, D] or tiles [n, 3, H, W]."""
    grid: tuple[int, int, int] = (1, 1, 1)
    """Patches along time, height and width, for families that have them."""
    seconds: float = 0.0
    """Time between two steps of the grid, of a video."""
    times: tuple[float, ...] = ()
    """Time of each step of the grid, of a video, or of each frame."""
    duration: float = 0.0
    """Seconds of the whole video."""

    @cached_property
    def digest(self) -> int:
        """63 bits of a hash of everything that the tower sees."""
        sums = hashlib.blake2b(np.ascontiguousarray(self.pixels).data, digest_size=8)
        sums.update(repr((self.kind, self.pixels.shape, self.grid, self.seconds)).encode())
        return int.from_bytes(sums.digest(), "little") >> 1


@dataclass(frozen=True, kw_only=True)
class View:
    """The pictures and videos of a sequence, and the tokens that show them."""

    items: tuple[MediaItem, ...] = ()
    index: np.ndarray | None = None
    """[prompt] int64: the place of each token's item, -1 for text; tokens after these are text. None: all are text."""
    positions: np.ndarray | None = None
    """[prompt], or [3, prompt]; tokens after these count on from the last. None: 0, 1, 2, ..."""

    @cached_property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """The view as arrays of rollouts; none for text."""
        if not self.items or self.index is None:
            return {}
        arrays = {
            "pixels": np.concatenate([item.pixels for item in self.items]),
            "item_rows": np.array([len(item.pixels) for item in self.items], np.int32),
            "item_kind": np.array([KINDS.index(item.kind) for item in self.items], np.int32),
            "item_grid": np.array([item.grid for item in self.items], np.int32),
            "item_seconds": np.array([item.seconds for item in self.items]),
            "item_index": self.index.astype(np.int32),
        }
        return arrays if self.positions is None else {**arrays, "prompt_positions": self.positions.astype(np.int32)}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray]) -> View:
        """Return the view of a rollout's arrays."""
        if "item_index" not in arrays:
            return EMPTY_VIEW
        parts = np.split(arrays["pixels"], np.cumsum(arrays["item_rows"])[:-1])
        rows = zip(
            parts, arrays["item_kind"], arrays["item_grid"].tolist(), arrays["item_seconds"].tolist(), strict=True
        )
        items = [
            MediaItem(kind=KINDS[kind], pixels=pixels, grid=(grid[0], grid[1], grid[2]), seconds=seconds)
            for pixels, kind, grid, seconds in rows
        ]
        index, positions = arrays["item_index"].astype(np.int64), arrays.get("prompt_positions")
        return cls(items=tuple(items), index=index, positions=positions)

    def first(self, length: int) -> View:
        """Return the view of the first `length` tokens, which end outside of a picture or video."""
        if self.index is None or len(self.index) <= length:
            return self
        index = self.index[:length]
        positions = None if self.positions is None else self.positions[..., :length]
        return View(items=self.items[: index.max(initial=-1) + 1], index=index, positions=positions)

    def index_of(self, length: int) -> np.ndarray:
        """Return the item of each of `length` tokens [length]."""
        prompt = np.zeros(0, np.int64) if self.index is None else self.index
        return np.concatenate([prompt, np.full(length - len(prompt), -1)])

    def positions_of(self, length: int) -> np.ndarray:
        """Return the positions of `length` tokens: [length] or [3, length]."""
        if self.positions is None:
            return np.arange(length)
        more = np.arange(length - self.positions.shape[-1]) + self.positions[..., -1].max() + 1
        return np.concatenate([self.positions, np.broadcast_to(more, (*self.positions.shape[:-1], len(more)))], axis=-1)

    def shift(self, length: int) -> int:
        """Return the position of a token after a prompt of `length`, minus its index."""
        return 0 if self.positions is None else int(self.positions[..., -1].max()) + 1 - length


EMPTY_VIEW = View()


def positions_of(views: Sequence[View], lengths: Sequence[int]) -> np.ndarray:
    """Return the positions of sequences end to end: [L], or [3, L] if any counts along three dimensions."""
    each = [view.positions_of(length) for view, length in zip(views, lengths, strict=True)]
    axes = max(positions.ndim for positions in each)
    return np.concatenate([np.broadcast_to(p, (3, p.shape[-1])) if axes == 2 else p for p in each], axis=-1)


@dataclass(frozen=True, kw_only=True)
class VisionFamily(ABC):
    """Models with one way to process pictures, to write placeholders and to number positions."""

    image_processor: Any
    """transformers' image processor of the checkpoint, in its form without torchvision."""
    token_ids: Mapping[str, int]
    """The token that the tower's outputs replace, by kind. It is never sampled."""
    files: Mapping[str, str]
    """Names and texts of the processing's files, which a trained checkpoint has too."""
    two_way: bool = False
    """Whether the tokens of a picture attend to each other in both directions."""

    @property
    @abstractmethod
    def placeholders(self) -> Mapping[str, str]:
        """Text that the chat template writes for an item, by its kind."""

    @abstractmethod
    def image(self, picture: Image, limits: MediaSection = NO_LIMITS) -> MediaItem:
        """Process an RGB picture.

        Raises MediaError for one that the family does not take, and UserError for limits that it does not have.
        """

    @abstractmethod
    def fit(self, limits: MediaSection) -> Fit:
        """Return how frames of a video are resized as they are decoded. Raises like `image`."""

    @abstractmethod
    def video(self, video: Video, limits: MediaSection = NO_LIMITS) -> MediaItem:
        """Process a video, whose frames `fit` may have resized. Raises like `image`."""

    @abstractmethod
    def expansion(self, item: MediaItem) -> str:
        """Return the text in place of the item's placeholder, with a token for each output of the tower."""

    @abstractmethod
    def num_tokens(self, item: MediaItem) -> int:
        """Return the number of the item's placeholder tokens."""

    def positions(self, tokens: np.ndarray, items: Sequence[MediaItem]) -> np.ndarray | None:
        """Return the positions of tokens [L]: [3, L] along time, height and width, or None for 0, 1, 2, ..."""
        return None

    @abstractmethod
    def blank(self, kind: Kind) -> MediaItem:
        """Return a black item as small as the tower takes: a rank without pictures runs the tower on it."""

    @abstractmethod
    def inputs(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        """Return the keywords of the model's forward pass with these items, in the order of their tokens."""

    def vllm_inputs(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        """Return what the model's processor in vLLM returns for these items, before it is split by item."""
        return self.inputs(items)


def expand_spans(spans: Sequence[str], items: Sequence[MediaItem], family: VisionFamily) -> list[str]:
    """Replace the placeholders in the pieces of a rendered chat by the expansions of `items`, in order.

    Raises ValueError if the numbers or the kinds differ.
    """
    left, signs = iter(items), family.placeholders
    written = sum(text.count(sign) for text in spans for sign in signs.values())
    if written < len(items):
        names = " and ".join(dict.fromkeys(signs[item.kind] for item in items))
        raise ValueError(
            f"{len(items)} pictures and videos, and the chat template writes {written or 'none'} of their placeholders "
            f"{names}: set data.chat_template to one that writes them"
        )
    expanded: list[str] = []
    for text in spans:
        pieces: list[str] = []
        rest = text
        while places := {kind: place for kind, sign in signs.items() if (place := rest.find(sign)) >= 0}:
            kind = min(places, key=places.__getitem__)
            item = next(left, None)
            if item is None:
                raise ValueError(f"{written} placeholders in the chat, and {len(items)} pictures and videos of the row")
            if kind != item.kind:
                raise ValueError(f"a placeholder of kind {kind!r} where the row has {item.kind!r}")
            before, rest = rest[: places[kind]], rest[places[kind] + len(signs[kind]) :]
            pieces += [before, family.expansion(item)]
        expanded.append("".join([*pieces, rest]))
    return expanded


def view_of(tokens: np.ndarray, items: Sequence[MediaItem], family: VisionFamily) -> View:
    """Return the view of a prompt's tokens [L], which show `items` in order. Raises ValueError if they do not."""
    places = np.flatnonzero(np.isin(tokens, list(family.token_ids.values())))
    if not items and len(places):  # the model would look the token up
        raise ValueError(
            f"the text has token {tokens[places[0]]}, which stands for a picture or video: remove "
            f"{' and '.join(dict.fromkeys(family.placeholders.values()))} from it"
        )
    if not items:
        return EMPTY_VIEW
    sizes = [family.num_tokens(item) for item in items]
    if len(places) != sum(sizes):
        raise ValueError(f"{len(places)} placeholder tokens, and {sum(sizes)} outputs of the vision tower")
    index = np.full(len(tokens), -1)
    index[places] = np.repeat(np.arange(len(items)), sizes)
    return View(items=tuple(items), index=index, positions=family.positions(tokens, items))
