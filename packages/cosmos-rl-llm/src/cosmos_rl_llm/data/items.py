"""Pictures and videos of supervised rows, read by the ranks of a replica together.

    rank r of W: rows r, r + W, ... --read--> outlines or errors --gather--> of all rows, on every rank
    rows dealt to this rank         --read--> pixels, of those that another rank has read

The lengths of all rows decide which rank trains on them, and depend on their pictures. An outline has everything but
the pixels, so that a rank decodes its part of the rows and those that it trains on, instead of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from cosmos_rl_core.errors import MediaError, SampleError, UserError
from cosmos_rl_core.types import Prompt
from cosmos_rl_llm.data.chat import Chat, learnt_messages
from cosmos_rl_llm.data.reading import side_by_side
from cosmos_rl_llm.media.item import Kind, MediaItem


class _Outline(msgspec.Struct, frozen=True, kw_only=True):
    """An item without its pixels."""

    kind: Kind
    shape: tuple[int, ...]
    """Of the pixels."""
    grid: tuple[int, int, int]
    seconds: float
    times: tuple[float, ...]

    @classmethod
    def of(cls, item: MediaItem) -> _Outline:
        return cls(kind=item.kind, shape=item.pixels.shape, grid=item.grid, seconds=item.seconds, times=item.times)

    def item(self) -> MediaItem:
        """Return the item with zeros for pixels, which take no memory."""
        pixels = np.broadcast_to(np.float32(0), self.shape)
        return MediaItem(kind=self.kind, pixels=pixels, grid=self.grid, seconds=self.seconds, times=self.times)


class _Read(msgspec.Struct, frozen=True, kw_only=True):
    """One row as its reader sends it."""

    outlines: tuple[_Outline, ...] = ()
    unreadable: str = ""
    """Reason of a picture or video that cannot be read."""
    wrong: str = ""
    """Error that ends the run."""


_decode = msgspec.msgpack.Decoder(list[_Read]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class RowItems:
    """The pictures and videos of a row."""

    items: Sequence[MediaItem] | None = None
    """Without pixels if another rank has read them; None for a model of text."""
    unreadable: str = ""
    """Why they cannot be read; empty if they can."""
    pixels: Callable[[], Sequence[MediaItem]] | None = None
    """Returns the items with pixels; None for a model of text. Raises UserError if they cannot be read here."""


def read_items(prompts: Sequence[Prompt], chat: Chat) -> list[RowItems]:
    """Return the items of rows; all ranks of `chat.ranks` call this together. Raises UserError on all of them.

    Of a model of text nothing is read.
    """
    if chat.vision is None:
        return [RowItems()] * len(prompts)
    ranks = chat.ranks()
    places = range(ranks.rank, len(prompts), ranks.size)
    taken = side_by_side(lambda place: chat.ahead.take(prompts[place], partial(_read, chat=chat)), places)
    own = dict(zip(places, taken, strict=True))
    sent = ranks.gather(msgspec.msgpack.encode([read for read, _ in own.values()]))
    of_ranks = [iter(_decode(data)) for data in sent]
    rows: list[RowItems] = []
    for place, prompt in enumerate(prompts):
        read = next(of_ranks[place % ranks.size])
        if read.wrong:
            raise UserError(read.wrong)
        if place in own:
            items = own[place][1]
            rows.append(RowItems(items=items, unreadable=read.unreadable, pixels=partial(tuple, items)))
        else:
            outlines = [outline.item() for outline in read.outlines]
            rows.append(RowItems(items=outlines, unreadable=read.unreadable, pixels=partial(_again, prompt, chat)))
    return rows


def begin_reading(prompts: Sequence[Prompt], chat: Chat) -> None:
    """Begin to read this rank's part of the rows that the next batch is expected to have, and return at once.

    Whoever calls it need not know them exactly: `read_items` reads what was not begun.
    """
    ranks = chat.ranks()
    chat.ahead.begin(prompts[ranks.rank :: ranks.size], partial(_read, chat=chat))


def _read(prompt: Prompt, chat: Chat) -> tuple[_Read, Sequence[MediaItem]]:
    try:
        items = _items(prompt, chat)
    except SampleError as error:
        return _Read(unreadable=error.reason), ()
    except UserError as error:
        return _Read(wrong=str(error)), ()
    return _Read(outlines=tuple(_Outline.of(item) for item in items)), items


def _again(prompt: Prompt, chat: Chat) -> Sequence[MediaItem]:
    try:
        return _items(prompt, chat)
    except MediaError as error:
        raise UserError(
            f"{error.reason}; another rank has read it: every machine of the policy needs the files of [data.media]"
        ) from error


def _items(prompt: Prompt, chat: Chat) -> Sequence[MediaItem]:
    return chat.of_row(prompt.row).items(learnt_messages(prompt.row), where=prompt.origin)
