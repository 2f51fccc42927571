"""OCR reward: compares the text in a clip with the text that its caption quotes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from PIL import Image
from pydantic import Field, PrivateAttr, model_validator

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_wfm.rewards.pretrained import Exclusive
from cosmos_rl_wfm.rewards.video import group_videos, row_text, sample_frames

_QUOTED = re.compile(r'"([^"]+)"|“([^“”]+)”')


class OcrReward(Strict):
    """max(0, 1 - edit distance / length of the wanted text), mean over the sampled frames: in [0, 1].

    Flow-GRPO's reward for rendered text (Liu et al. 2025, arXiv 2505.05470): case and blanks are ignored,
    and a frame has distance 0 if its text contains the wanted text.
    """

    loads_model: ClassVar[bool] = True

    reader: str = "easyocr"
    """"easyocr", "paddleocr" or "pytesseract", if installed, or a `TextReader` of your own as "module:attribute"."""
    reader_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reader, such as {languages = ["en", "de"]} for easyocr."""
    column: str = "caption"
    """Column of the row with the quoted text; several quotations are joined."""
    num_frames: int = Field(default=4, ge=1)
    """Evenly spaced frames of a clip that are read."""
    _reader: Exclusive[TextReader] = PrivateAttr()

    @model_validator(mode="after")
    def _reader_takes_options(self) -> Self:
        try:
            inspect.signature(reader_class(self.reader)).bind(**self.reader_options)
        except UserError as error:
            raise ValueError(str(error)) from None
        except TypeError as error:
            raise ValueError(f"reader_options do not fit the reader {self.reader!r}: {error}") from None
        return self

    def model_post_init(self, context: Any, /) -> None:
        make = reader_class(self.reader)
        self._reader = Exclusive(lambda: make(**self.reader_options))

    def __call__(self, group: RolloutGroup) -> list[float]:
        expected = quoted(row_text(group, self.column))
        clips = [sample_frames(video, self.num_frames) for video in group_videos(group)]
        with self._reader.use() as reader:
            texts = [reader.read(clip) for clip in clips]
        return [sum(match(text, expected) for text in read) / len(read) for read in texts]


def quoted(caption: str) -> str:
    """Return the text in double quotes.

    Raises:
        UserError: there is none.
    """
    parts = [straight or curly for straight, curly in _QUOTED.findall(caption)]
    text = " ".join(parts).strip()
    if not _bare(text):
        raise UserError(f'the caption {caption[:80]!r} quotes no text; put the wanted text in double quotes: "STOP"')
    return text


def match(text: str, expected: str) -> float:
    """Return max(0, 1 - edit distance / length of `expected`), ignoring blanks and case; 1 if `text` contains it."""
    text, expected = _bare(text), _bare(expected)
    if expected in text:
        return 1.0
    return max(0.0, 1.0 - edit_distance(text, expected) / len(expected))


def edit_distance(a: str, b: str) -> int:
    """Return the Levenshtein distance: the fewest insertions, deletions and replacements that turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        left, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            left, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, left + (letter != other))
    return row[-1]


def _bare(text: str) -> str:
    return "".join(text.split()).casefold()


class TextReader(Protocol):
    """Reads frames.

    texts = reader.read(frames)     # one per frame, "" if there is none; lines and words joined by blanks
    """

    def read(self, frames: np.ndarray) -> list[str]:
        """uint8 [N, H, W, 3] -> N texts."""
        ...


class EasyOcr:
    """The package easyocr."""

    def __init__(self, *, languages: Sequence[str] = ("en",), gpu: bool = False) -> None:
        easyocr: Any = _package("easyocr")
        self._reader = easyocr.Reader(list(languages), gpu=gpu, verbose=False)

    def read(self, frames: np.ndarray) -> list[str]:
        return [" ".join(self._reader.readtext(np.ascontiguousarray(frame[..., ::-1]), detail=0)) for frame in frames]


class PaddleOcr:
    """The package paddleocr, version 3."""

    def __init__(self, *, language: str = "en") -> None:
        paddleocr: Any = _package("paddleocr")
        self._reader = paddleocr.PaddleOCR(
            lang=language,
            use_doc_orientation_classify=False,
            use_doc_unwarping=False,
            use_textline_orientation=False,
        )

    def read(self, frames: np.ndarray) -> list[str]:
        bgr = [np.ascontiguousarray(frame[..., ::-1]) for frame in frames]
        return [" ".join(page["rec_texts"]) for frame in bgr for page in self._reader.predict(frame)]


class Tesseract:
    """The package pytesseract and the program tesseract."""

    def __init__(self, *, language: str = "eng") -> None:
        self._package: Any = _package("pytesseract")
        self._language = language

    def read(self, frames: np.ndarray) -> list[str]:
        read = self._package.image_to_string
        return [" ".join(read(Image.fromarray(frame), lang=self._language).split()) for frame in frames]


READERS: Mapping[str, Callable[..., TextReader]] = {
    "easyocr": EasyOcr,
    "paddleocr": PaddleOcr,
    "pytesseract": Tesseract,
}
DISTRIBUTIONS = {"easyocr": ("easyocr",), "paddleocr": ("paddleocr", "paddlepaddle"), "pytesseract": ("pytesseract",)}
"""Names of a reader's packages on an index."""


def reader_class(name: str) -> Callable[..., TextReader]:
    """Return the reader of that name, or a custom one as "module:attribute". Raises UserError for an unknown one."""
    if name in READERS:
        return READERS[name]
    if ":" not in name:
        raise UserError(
            f"no reader is called {name!r}; known: {', '.join(READERS)}; or a custom reader as module:attribute"
        )
    return plugins.attribute(name, kind="reader")


def _package(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UserError(
            f"reader = {module!r} needs a missing package: {pip_install(*DISTRIBUTIONS[module])}"
        ) from error
