"""Rendered pages of samples: grids and animations, with captions and rewards in Pillow's built-in font.

    Row (caption, clips, labels)        -- contact_grid --> one image: one line per clip, one column per frame
                                        -- animation -----> frames:    one line per Row, one column per clip
    Question (text, pictures, answers)  -- answer_grid ---> one image: one line per Question, pictures beside answers

Small clips are enlarged by integer factors without smoothing.
"""

from __future__ import annotations

import io
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

PAPER, EDGE, INK, FAINT = (255, 255, 255), (208, 215, 222), (31, 35, 40), (110, 119, 129)
MARGIN, GAP = 14, 6
"""Pixels around a page, and between its cells."""
TITLE, LABEL, SMALL = 15, 14, 11
"""Font sizes in pixels."""
REWARD_WIDTH, ANSWER_WIDTH = 96, 420
PICTURES_A_ROW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRow:
    """One prompt on a page."""

    title: str
    """Its caption."""
    clips: tuple[np.ndarray, ...]
    """uint8 [F, h, w, 3] each, in display size (`fit_clip`)."""
    labels: tuple[tuple[str, ...], ...]
    """Lines of text of each clip; the first one is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt with pictures, and the answers to it."""

    text: str
    pictures: tuple[np.ndarray, ...]
    """uint8 [h, w, 3] each, in display size (`fit_clip`)."""
    answers: tuple[tuple[tuple[str, ...], str], ...]
    """Reward and its parts, and the response of each rollout."""


def fit_clip(video: np.ndarray, *, cell: int, max_frames: int) -> np.ndarray:
    """uint8 [F, H, W, 3] -> at most `max_frames` frames whose longer side is about `cell` pixels.

    A smaller clip is enlarged by the nearest integer factor, a larger one is downsampled by averaging.
    """
    kept = video[np.linspace(0, len(video) - 1, min(len(video), max_frames)).round().astype(int)]
    height, width = kept.shape[1:3]
    if max(height, width) <= cell:
        return enlarge(kept, round(cell / max(height, width)))
    scale = cell / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.stack([np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX)) for frame in kept])


def enlarge(video: np.ndarray, factor: int) -> np.ndarray:
    """uint8 [F, H, W, 3] -> [F, factor H, factor W, 3], by repeating pixels."""
    return video.repeat(factor, axis=1).repeat(factor, axis=2)


def as_gif(pages: Sequence[Image.Image], *, fps: float) -> bytes:
    """Return a looping GIF; all frames share one palette, so that static parts do not flicker."""
    shown = [np.asarray(pages[i]) for i in np.linspace(0, len(pages) - 1, min(len(pages), 8)).round().astype(int)]
    palette_bytes = (
        Image.fromarray(np.concatenate(shown)).quantize(252, method=Image.Quantize.MEDIANCUT).getpalette() or []
    )
    colours = np.asarray(palette_bytes[: 252 * 3], int).reshape(-1, 3)
    own = np.asarray([PAPER, INK, FAINT, EDGE])
    near = np.abs(colours[:, None] - own).max(axis=-1).min(axis=-1) < 8  # Pillow would use them instead of own
    palette = Image.new("P", (1, 1))
    palette.putpalette(np.concatenate([own, colours[~near]]).ravel().tolist())
    first, *rest = (page.quantize(palette=palette, dither=Image.Dither.NONE) for page in pages)
    buffer = io.BytesIO()
    first.save(buffer, format="GIF", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)
    return buffer.getvalue()


def contact_grid(rows: Sequence[PageRow], *, heading: str = "", columns: int = 8) -> Image.Image:
    """Return one image: for each Row its title, then one line per clip with its label and at most `columns` frames."""
    label_width = max(_text_width(text, size) for row in rows for lines in row.labels for text, size in _sized(lines))
    lines = [_still_lines(row, columns=columns, label_width=label_width) for row in rows]
    return _page([line for group in lines for line in group], heading=heading)


def animation(rows: Sequence[PageRow], *, heading: str = "") -> list[Image.Image]:
    """Return the frames of a video: for each Row its title, and its clips side by side with labels below.

    It is as long as the longest clip; shorter clips stay at their last frame.
    """
    length = max(len(clip) for row in rows for clip in row.clips)
    return [
        _page([line for row in rows for line in _running_lines(row, at=at)], heading=heading) for at in range(length)
    ]


def answer_grid(questions: Sequence[Question], *, heading: str = "") -> Image.Image:
    """Return one image: for each Question its pictures at the left, at the right its text and the answers."""
    return _page([_answer_line(question) for question in questions], heading=heading)


def beside(pictures: Sequence[np.ndarray]) -> Image.Image:
    """Return pictures, uint8 [h, w, 3] each, as one image, from left to right."""
    return _beside([_framed(picture) for picture in pictures])


def _answer_line(question: Question) -> Image.Image:
    rewards = [_label(labels, width=REWARD_WIDTH, height=0) for labels, _ in question.answers]
    answers = [
        _text([(line, LABEL, INK) for line in _wrapped(" ".join(text.split()), LABEL, width=ANSWER_WIDTH, most=4)],
              width=ANSWER_WIDTH)
        for _, text in question.answers
    ]  # fmt: skip
    lines = [_beside([reward, answer]) for reward, answer in zip(rewards, answers, strict=True)]
    title = _text(
        [(line, TITLE, INK) for line in _wrapped(question.text, TITLE, width=REWARD_WIDTH + ANSWER_WIDTH, most=4)],
        width=REWARD_WIDTH + ANSWER_WIDTH,
    )
    rows = [
        question.pictures[first : first + PICTURES_A_ROW] for first in range(0, len(question.pictures), PICTURES_A_ROW)
    ]
    shown = _below([beside(row) for row in rows], gap=GAP)
    return _beside([shown, _below([title, *lines], gap=GAP)])


def _still_lines(row: PageRow, *, columns: int, label_width: int) -> list[Image.Image]:
    strips = []
    for clip, lines in zip(row.clips, row.labels, strict=True):
        chosen = np.linspace(0, len(clip) - 1, min(len(clip), columns)).round().astype(int)
        cells = [_framed(clip[place]) for place in chosen]
        strips.append(_beside([_label(lines, width=label_width, height=cells[0].height), *cells]))
    width = max(strip.width for strip in strips)
    return [_title(row.title, width=width), *strips]


def _running_lines(row: PageRow, *, at: int) -> list[Image.Image]:
    columns = []
    for clip, lines in zip(row.clips, row.labels, strict=True):
        cell = _framed(clip[min(at, len(clip) - 1)])
        label = _label(lines, width=max(cell.width, 56), height=0)
        columns.append(_below([cell, label], gap=3))
    strip = _beside(columns)
    return [_title(row.title, width=max(strip.width, 160)), strip]


def _page(lines: Sequence[Image.Image], *, heading: str) -> Image.Image:
    width = max(line.width for line in lines)
    head = [_text([(heading, LABEL, FAINT)], width=width)] if heading else []
    body = _below([*head, *lines], gap=GAP)
    even = [side + side % 2 for side in (body.width + 2 * MARGIN, body.height + 2 * MARGIN)]  # H.264 needs even sizes
    page = Image.new("RGB", (even[0], even[1]), PAPER)
    page.paste(body, (MARGIN, MARGIN))
    return page


def _framed(frame: np.ndarray) -> Image.Image:
    """Add a hairline around a frame, so that the edge of a white clip is visible."""
    cell = Image.new("RGB", (frame.shape[1] + 2, frame.shape[0] + 2), EDGE)
    cell.paste(Image.fromarray(frame), (1, 1))
    return cell


def _title(text: str, *, width: int) -> Image.Image:
    return _text([(line, TITLE, INK) for line in _wrapped(text, TITLE, width=width, most=2)], width=width, above=6)


def _label(lines: Sequence[str], *, width: int, height: int) -> Image.Image:
    colours = [INK] + [FAINT] * (len(lines) - 1)
    fitted = [
        (_cut(text, size, width=width), size, colour)
        for (text, size), colour in zip(_sized(lines), colours, strict=True)
    ]
    return _text(fitted, width=width, height=height)


def _text(
    lines: Sequence[tuple[str, int, tuple[int, ...]]], *, width: int, above: int = 0, height: int = 0
) -> Image.Image:
    """Render lines of (text, size, colour), vertically centred in `height` if that is larger."""
    needed = above + sum(_line_height(size) for _, size, _ in lines)
    image = Image.new("RGB", (max(1, width), max(1, needed, height)), PAPER)
    draw = ImageDraw.Draw(image)
    y = above + max(0, height - needed) // 2
    for text, size, colour in lines:
        draw.text((0, y), text, fill=colour, font=_font(size))
        y += _line_height(size)
    return image


def _beside(images: Sequence[Image.Image]) -> Image.Image:
    width = sum(image.width for image in images) + GAP * (len(images) - 1)
    strip = Image.new("RGB", (width, max(image.height for image in images)), PAPER)
    x = 0
    for image in images:
        strip.paste(image, (x, 0))
        x += image.width + GAP
    return strip


def _below(images: Sequence[Image.Image], *, gap: int) -> Image.Image:
    height = sum(image.height for image in images) + gap * (len(images) - 1)
    column = Image.new("RGB", (max(image.width for image in images), height), PAPER)
    y = 0
    for image in images:
        column.paste(image, (0, y))
        y += image.height + gap
    return column


def _sized(lines: Sequence[str]) -> list[tuple[str, int]]:
    return [(text, SMALL if place else LABEL) for place, text in enumerate(lines)]


@lru_cache(maxsize=256)  # called again for each frame of a video
def _wrapped(text: str, size: int, *, width: int, most: int) -> list[str]:
    """Wrap a text into at most `most` lines; the last one is truncated."""
    lines: list[str] = []
    words = text.split()
    while words and len(lines) < most - 1:
        count = 1
        while count < len(words) and _text_width(" ".join(words[: count + 1]), size) <= width:
            count += 1
        lines.append(_cut(" ".join(words[:count]), size, width=width))
        words = words[count:]
    return [*lines, _cut(" ".join(words), size, width=width)] if words else lines or [""]


@lru_cache(maxsize=256)
def _cut(text: str, size: int, *, width: int) -> str:
    if _text_width(text, size) <= width:
        return text
    fits = bisect_right(range(len(text)), width, key=lambda length: _text_width(text[:length] + "…", size))
    return text[: max(0, fits - 1)].rstrip() + "…"


def _text_width(text: str, size: int) -> int:
    return math.ceil(_font(size).getlength(text))


def _line_height(size: int) -> int:
    return round(size * 1.35)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
