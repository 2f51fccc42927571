"""Text in Pillow's bitmap font: drawn for data and tests, and read back by comparing with each letter.

    frame --cut into 6 x 11 windows--> correlation with every letter --best first, no overlap--> letters in their places

The font has one width, so that a letter is a window and nothing has to be segmented.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image, ImageDraw, ImageFont

from cosmos_rl_wfm.rewards.video import luma

WIDTH, HEIGHT = 6, 11
"""Pixels of a letter's cell."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
BATCH = 65_536
"""Windows compared at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A letter seen in a frame."""

    letter: str
    row: int
    """Of the cell's upper edge, in pixels of the font."""
    column: int
    """Of its left edge."""


class GlyphReader:
    """Reads text drawn by `draw_text` at one scale, light on dark or dark on light, through mild noise."""

    def __init__(self, *, scale: int = 1, letters: str = LETTERS, min_correlation: float = 0.8) -> None:
        if scale < 1 or not letters or not 0 < min_correlation <= 1:
            raise ValueError("GlyphReader takes scale >= 1, one letter or more, and min_correlation in (0, 1]")
        self._scale = scale
        self._letters = letters
        self._min = min_correlation
        cells = np.stack([_cell(letter) for letter in letters]).astype(np.float32).reshape(len(letters), -1)
        centred = cells - cells.mean(axis=1, keepdims=True)
        self._templates = centred / np.linalg.norm(centred, axis=1, keepdims=True)  # [letters, cell]

    def read(self, frames: np.ndarray) -> list[str]:
        """uint8 [N, H, W, 3] -> N texts: lines from top to bottom and words, joined by blanks."""
        return [" ".join(_words(self._letters_in(_shrunk(luma(frame), self._scale)))) for frame in frames]

    def _letters_in(self, image: np.ndarray) -> list[Found]:
        if image.shape[0] < HEIGHT or image.shape[1] < WIDTH:
            return []
        windows = sliding_window_view(image, (HEIGHT, WIDTH))
        shape, windows = windows.shape[:2], windows.reshape(-1, HEIGHT * WIDTH)
        best, which = self._compare(windows)
        taken = np.zeros(image.shape, bool)
        found = []
        for place in np.argsort(-best, kind="stable"):
            if best[place] < self._min:
                break
            row, column = divmod(int(place), shape[1])
            cell = taken[row : row + HEIGHT, column : column + WIDTH]
            if not cell.any():
                cell[:] = True
                found.append(Found(letter=self._letters[which[place]], row=row, column=column))
        return found

    def _compare(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[N, cell] -> the highest correlation of each window with a letter, of either sign, and which letter it is."""
        best, which = np.zeros(len(windows), np.float32), np.zeros(len(windows), np.int64)
        for start in range(0, len(windows), BATCH):
            part = windows[start : start + BATCH]
            centred = part - part.mean(axis=1, keepdims=True)
            norm = np.linalg.norm(centred, axis=1)
            flat = norm < 0.5  # nothing drawn: the noise of an empty window correlates by chance
            score = np.abs(centred @ self._templates.T) / np.maximum(norm, 1e-6)[:, None]
            score[flat] = 0
            which[start : start + BATCH] = score.argmax(axis=1)
            best[start : start + BATCH] = score.max(axis=1)
        return best, which


def draw_text(
    text: str, *, height: int, width: int, scale: int = 1, row: int = 0, column: int = 0, ink: int = 255, paper: int = 0
) -> np.ndarray:
    """Return a frame uint8 [height, width, 3] with `text` at (row, column); "\\n" starts a line."""
    image = Image.new("L", (-(-width // scale), -(-height // scale)), paper)
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(text.split("\n")):
        draw.text((column // scale, row // scale + number * HEIGHT), line, fill=ink, font=_font())
    large = np.asarray(image).repeat(scale, 0).repeat(scale, 1)[:height, :width]
    return np.repeat(large[..., None], 3, axis=-1)


@cache
def _font() -> ImageFont.ImageFont:
    return ImageFont.load_default_imagefont()


def _cell(letter: str) -> np.ndarray:
    return draw_text(letter, height=HEIGHT, width=WIDTH)[..., 0]


def _shrunk(image: np.ndarray, scale: int) -> np.ndarray:
    """Mean over squares of scale x scale pixels; what is left over at the edge is dropped."""
    height, width = image.shape[0] // scale, image.shape[1] // scale
    return image[: height * scale, : width * scale].reshape(height, scale, width, scale).mean(axis=(1, 3))


def _words(found: Iterable[Found]) -> list[str]:
    """Letters whose rows are closer than half a cell are a line; a gap of half a cell ends a word."""
    lines: list[list[Found]] = []
    for letter in sorted(found, key=lambda one: one.row):
        if lines and letter.row - lines[-1][0].row < HEIGHT / 2:
            lines[-1].append(letter)
        else:
            lines.append([letter])
    words: list[str] = []
    for line in lines:
        end = None
        for letter in sorted(line, key=lambda one: one.column):
            if end is None or letter.column - end >= WIDTH / 2:
                words.append("")
            words[-1] += letter.letter
            end = letter.column + WIDTH
    return words
