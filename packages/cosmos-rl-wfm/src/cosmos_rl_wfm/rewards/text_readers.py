"""Readers of the text in frames, based on optional packages for optical character recognition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from PIL import Image

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError


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
        easyocr: Any = _package("easyocr", "easyocr")
        self._reader = easyocr.Reader(list(languages), gpu=gpu, verbose=False)

    def read(self, frames: np.ndarray) -> list[str]:
        return [" ".join(self._reader.readtext(np.ascontiguousarray(frame[..., ::-1]), detail=0)) for frame in frames]


class PaddleOcr:
    """The package paddleocr, version 3."""

    def __init__(self, *, language: str = "en") -> None:
        paddleocr: Any = _package("paddleocr", "paddleocr paddlepaddle")
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
        self._package: Any = _package("pytesseract", "pytesseract")
        self._language = language

    def read(self, frames: np.ndarray) -> list[str]:
        read = self._package.image_to_string
        return [" ".join(read(Image.fromarray(frame), lang=self._language).split()) for frame in frames]


READERS: Mapping[str, Callable[..., TextReader]] = {
    "easyocr": EasyOcr,
    "paddleocr": PaddleOcr,
    "pytesseract": Tesseract,
}


def reader_class(name: str) -> Callable[..., TextReader]:
    """Return the reader of that name, or a custom one as "module:attribute". Raises UserError for an unknown one."""
    if name in READERS:
        return READERS[name]
    if ":" not in name:
        raise UserError(
            f"no reader is called {name!r}; known: {', '.join(READERS)}; or a custom reader as module:attribute"
        )
    return plugins.attribute(name, kind="reader")


def _package(module: str, distributions: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UserError(f"reader = {module!r} needs a missing package: pip install {distributions}") from error
