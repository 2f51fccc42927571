"""The bytes of a picture or video that a row names, and their decoding with limits.

    "cat.png" | "file:///..." | "https://..." | "data:image/png;base64,..." | {"bytes": ..., "path": ...}
        -> read_bytes -> decode_picture -> RGB picture
                      -> decode_video    -> Video: frames [T, H, W, 3], and the time of each

A file is opened only below `root`, and a URL only with a scheme that the recipe allows. Sizes are checked before pixels
are decoded. Whatever a library raises for a damaged or odd one is an error of its row: `media_errors`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np

from cosmos_rl_core.errors import MediaError, SampleError, UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_llm.config import MediaSection
from cosmos_rl_llm.media.fetch import fetch

if TYPE_CHECKING:
    from av.video.frame import VideoFrame
    from PIL.Image import Image

    from cosmos_rl_core.data.video import Upright
    from cosmos_rl_core.observe.gallery import AnswerGallery
    from cosmos_rl_core.types import RolloutGroup

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA", "ICO")
"""Formats of pictures, as Pillow names them. Others are slow, rare, or run a program (EPS)."""
_URL = re.compile(r"(?i:(data|file|https?):|([a-z][a-z0-9+.-]+)://)")
"""Beginning of a URL; "10:30.jpg" is a file."""
_LONGEST_NAME = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """Frames of a video."""

    frames: np.ndarray
    """[T, H, W, 3] uint8, upright, as stored or resized while they were decoded."""
    times: np.ndarray
    """[T] float64: seconds from the video's start."""
    fps: float
    """Frames a second among `frames`."""
    duration: float
    """Seconds of the whole video."""
    stored: tuple[int, int] | None = None
    """Height and width of the upright frames before resizing; None: those of `frames`."""


Fit = Callable[[int, int, int], Callable[[np.ndarray], np.ndarray]]
"""(frames, height, width) of a video -> a function that resizes one frame [H, W, 3]."""


def unresized(count: int, height: int, width: int) -> Callable[[np.ndarray], np.ndarray]:
    """Keep frames as stored: a `Fit`."""
    return np.asarray


LIMITS = "data.media"
"""Column of a row with pictures or videos: the keys of its section that are set."""


def limits_of(row: Mapping[str, Any], otherwise: MediaSection) -> MediaSection:
    """Return the limits of the section that a row was loaded from."""
    return MediaSection.model_validate(row[LIMITS]) if LIMITS in row else otherwise


def read_bytes(given: Any, limits: MediaSection) -> bytes:
    """Return the bytes of a picture or video. Raises MediaError with the reason."""
    match given:
        case bytes():
            content = given
        case {"bytes": bytes() as content}:
            pass
        case {"bytes": str(text)}:
            content = _from_base64(text)
        case {"path": str(path)} | {"url": str(path)}:
            return read_bytes(path, limits)
        case str():
            content = _from_location(given, limits)
        case _:
            raise MediaError(f"a picture or video must be a path, a URL or bytes, not {type(given).__name__}")
    if len(content) > limits.max_bytes:
        raise MediaError(f"{len(content):,} bytes, more than the {limits.max_bytes:,} allowed (data.media.max_bytes)")
    return content


def is_remote(given: Any) -> bool:
    """Return whether a picture or video would be fetched from the network."""
    if isinstance(given, Mapping):
        return given.get("bytes") is None and is_remote(given.get("path") or given.get("url"))
    return isinstance(given, str) and given[:5].lower() in ("http:", "https")


def read_header(part: Mapping[str, Any], limits: MediaSection) -> None:
    """Raise MediaError unless the header of a picture or video can be read and is within the limits."""
    data = read_bytes(part[part["type"]], limits)
    if part["type"] == "image":
        with _opened(data) as opened:
            _check_picture(opened, limits)
        return
    from cosmos_rl_core.data.video import VideoFile

    with VideoFile(data) as video:
        if video.size is not None:
            _check_frame(*video.size, limits)


def location(given: Any) -> str:
    """Return the name of a picture or video for messages and files: its path or URL, or else a digest of its bytes."""
    match given:
        case {"path": str(path)} | {"url": str(path)}:
            return path
        case {"bytes": bytes() | str() as content}:
            return _digest(content)
        case bytes():
            return _digest(given)
        case str():
            inline = given[:5].lower() == "data:" or len(given) > _LONGEST_NAME
            return _digest(given) if inline else printable(given)
    return type(given).__name__


@contextmanager
def media_errors(part: Mapping[str, Any], *, where: str) -> Iterator[None]:
    """Raise an error of reading, decoding or processing a part as MediaError with row, file and reason.

    The libraries raise almost any class for a damaged file. A UserError is of the recipe, not of the row.
    """
    kind = part["type"]
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        ours = isinstance(error, SampleError)
        name, reason = location(part[kind]), error.reason if ours else f"{type(error).__name__}: {error}"
        shown = reason if reason.startswith(name) else f"{name}: {reason}"
        raise MediaError(printable(f"{where or 'a row'}: {kind}: {shown}"), final=not ours or error.final) from error


def printable(text: str) -> str:
    """Return text that can be encoded as UTF-8, as that of rows may not."""
    return text.encode(errors="backslashreplace").decode()


def _digest(content: bytes | str) -> str:
    data = content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
    return f"blake2b:{hashlib.blake2b(data, digest_size=8).hexdigest()}"


def _from_location(text: str, limits: MediaSection) -> bytes:
    url = _URL.match(text)
    if url is None:
        if len(text) > _LONGEST_NAME:
            raise MediaError(f'{len(text):,} characters are no path; content in base64 is {{"bytes": "..."}}')
        return _from_file(Path(text), limits)
    scheme, rest = (url[1] or url[2]).lower(), text.partition(":")[2]
    if scheme not in limits.schemes:
        allowed = ", ".join(sorted(limits.schemes)) or "none"
        raise MediaError(f"URLs with {scheme}: are not allowed (data.media.schemes: {allowed})")
    match scheme:
        case "data":
            header, comma, body = rest.partition(",")
            if not comma or not header.lower().endswith("base64"):
                raise MediaError("a data: URL must be data:TYPE;base64,...")
            return _from_base64(body)
        case "file":
            return _from_file(Path(unquote(urlsplit(text).path)), limits)
        case _:
            return fetch(text, max_bytes=limits.max_bytes, schemes=limits.schemes)


def _from_file(path: Path, limits: MediaSection) -> bytes:
    root = None if limits.root is None else Path(limits.root).expanduser()
    file = path if root is None else (root / path).resolve()
    if root is not None and not file.is_relative_to(root.resolve()):
        raise MediaError(f"{path} is outside of data.media.root")
    try:
        if file.stat().st_size > limits.max_bytes:
            raise MediaError(f"{path}: {file.stat().st_size:,} bytes, more than data.media.max_bytes")
        return file.read_bytes()
    except OSError as error:
        raise MediaError(f"{path}: {error.strerror or error}") from error


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: other characters than ASCII
        raise MediaError(f"not base64: {error}") from error


def decode_picture(data: bytes, limits: MediaSection) -> Image:
    """Return an RGB picture, upright and over white. Raises MediaError if it is none, damaged or too large."""
    from cosmos_rl_core.data.pictures import upright_rgb

    with _opened(data) as opened:
        _check_picture(opened, limits)
        return upright_rgb(opened)


def _check_picture(opened: Image, limits: MediaSection) -> None:
    if opened.width * opened.height > limits.max_decoded_pixels:
        raise MediaError(
            f"{opened.width} x {opened.height} pixels, more than data.media.max_decoded_pixels = "
            f"{limits.max_decoded_pixels:,}"
        )


def _opened(data: bytes) -> Image:
    """Return a picture of which only the header was read. Raises MediaError if it is none, or a decompression bomb."""
    from cosmos_rl_core.data.pictures import open_picture

    opened = open_picture(io.BytesIO(data), formats=FORMATS)
    if opened is None:
        raise MediaError(f"not a picture that can be read: {', '.join(FORMATS)}")
    return opened


def decode_video(data: bytes, limits: MediaSection, fit: Fit = unresized) -> Video:
    """Return upright frames at `limits.fps`. Raises MediaError if there are none, or if they are damaged or too large.

    fit: resizes each frame as it is decoded, so that a long video takes the memory of what is kept alone.
    """
    try:
        from cosmos_rl_core.data.video import VideoFile, upright
    except ImportError as error:
        raise UserError(f"videos need a package ({pip_install('cosmos-rl-core[media]')}): {error}") from error

    with VideoFile(data) as video:
        if video.size is not None:
            _check_frame(*video.size, limits)
        places, spacing, duration = _choose(video.table.seconds - video.table.seconds[0], limits)
        kept = _Frames(places, limits, fit)
        video.read(places, lambda frame, place: kept.take(frame, place, way=upright(frame)))
        times = video.table.seconds[places] - video.table.seconds[0]
    assert kept.frames is not None
    return Video(frames=kept.frames, times=times, fps=1 / spacing, duration=duration, stored=kept.stored)


class _Frames:
    """Frames of a video, at the size of the first, as they are decoded."""

    def __init__(self, places: np.ndarray, limits: MediaSection, fit: Fit) -> None:
        self._row = {int(place): row for row, place in enumerate(places)}
        self._limits, self._fit = limits, fit
        self._resize: Callable[[np.ndarray], np.ndarray] = np.asarray
        self.stored = (0, 0)
        self.frames: np.ndarray | None = None

    def take(self, frame: VideoFrame, place: int, *, way: Upright) -> None:
        """way: shows the frame upright."""
        _check_frame(frame.height, frame.width, self._limits)
        if self.frames is None:
            self.stored = way.size(frame.height, frame.width)
            self._resize = self._fit(len(self._row), *self.stored)
        height, width = way.size(*self.stored)
        pixels = frame.to_ndarray(format="rgb24", height=height, width=width)
        shown = self._resize(np.ascontiguousarray(way.show(pixels)))
        if self.frames is None:
            self.frames = self._room(shown)
        self.frames[self._row[place]] = shown

    def _room(self, shown: np.ndarray) -> np.ndarray:
        count, (height, width) = len(self._row), shown.shape[:2]
        if count * height * width > self._limits.max_video_pixels:
            raise MediaError(
                f"{count} frames of {width} x {height} pixels, more than data.media.max_video_pixels = "
                f"{self._limits.max_video_pixels:,}; lower data.media.max_frames, fps, max_pixels or total_pixels"
            )
        return np.empty((count, *shown.shape), shown.dtype)


def _check_frame(height: int, width: int, limits: MediaSection) -> None:
    if height * width > limits.max_decoded_pixels:
        raise MediaError(
            f"frames of {width} x {height} pixels, more than data.media.max_decoded_pixels = "
            f"{limits.max_decoded_pixels:,}"
        )


def _choose(seconds: np.ndarray, limits: MediaSection) -> tuple[np.ndarray, float, float]:
    """Return the places of the frames to take, the seconds between two of them, and those of the whole video.

    seconds: of all frames, from the first.
    """
    span = float(seconds[-1])
    interval = 1 / limits.fps
    if span and limits.min_frames > 1:
        interval = min(interval, span / (limits.min_frames - 1))
    interval = max(interval, span / limits.max_frames)
    targets = np.arange(0.0, span + 1e-6, interval)[: limits.max_frames]
    places = np.unique(np.searchsorted(seconds, targets - 1e-6))
    spacing = float(np.diff(seconds[places]).mean()) if len(places) > 1 else 1 / limits.fps
    return places, spacing, span * len(seconds) / max(1, len(seconds) - 1)  # to the end of the last frame


def parts_of(content: Any) -> list[Mapping[str, Any]]:
    """Return the parts of a message's content: a string is one part of text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def shows_media(chat: Any) -> bool:
    """Return whether a prompt or whole chat has pictures or videos."""
    messages = chat if isinstance(chat, list | tuple) else ()
    return any(part["type"] != "text" for message in messages for part in parts_of(message["content"]))


class PromptRecorder:
    """Gallery of prompts with pictures and videos beside the answers. It imports Pillow with the first of them."""

    of_rollouts = False

    def __init__(self, directory: Path, *, name: str, groups: int, every: int) -> None:
        """As `Domain.recorder`."""
        self._directory = directory
        self._keys = {"name": name, "groups_per_step": groups, "every_steps": every}
        self._gallery: AnswerGallery | None = None

    def wants(self, step: int, group: RolloutGroup) -> bool:
        return bool(group.media) and (self._gallery is None or self._gallery.wants(step, group))

    def save(self, step: int, group: RolloutGroup) -> Path | None:
        """Write a group as `AnswerGallery.save`; None for a prompt of text."""
        if not self.wants(step, group):
            return None
        if self._gallery is None:
            from cosmos_rl_core.observe.gallery import AnswerGallery

            self._gallery = AnswerGallery(self._directory, question=_question, **self._keys)
        return self._gallery.save(step, group)

    def write(self, stem: Path, group: RolloutGroup, place: int) -> Path:
        raise AssertionError("answers are text")

    def close(self) -> None:
        pass


def _question(group: RolloutGroup) -> str:
    """The text of the last message of the user, or else of the last message."""
    messages = group.prompt.row["prompt"]
    of_user = [message for message in messages if message["role"] == "user"] or messages
    return " ".join(part["text"] for part in parts_of(of_user[-1]["content"]) if part["type"] == "text")


class PromptMedia(Mapping[str, np.ndarray]):
    """Pictures and videos of a row's prompt, for rewards and files, decoded when they are read.

    image [H, W, 3], image_1 [H, W, 3], ..., video [T, H, W, 3], uint8, in the order of the prompt. Reading one raises
    MediaError if it cannot be decoded.
    """

    def __init__(self, row: Mapping[str, Any], limits: MediaSection, *, where: str = "") -> None:
        self._limits, self._where = limits_of(row, limits), where
        self._parts: dict[str, Mapping[str, Any]] = {}
        self._decoded: dict[str, np.ndarray] = {}
        prompt = row.get("prompt")
        seen: Counter[str] = Counter()
        for message in prompt if isinstance(prompt, list) else ():
            for part in parts_of(message["content"]):
                kind = part["type"]
                if kind != "text":
                    self._parts[f"{kind}_{seen[kind]}" if seen[kind] else kind] = part
                    seen[kind] += 1

    @property
    def locations(self) -> dict[str, str]:
        """The path or URL of each, or a digest of its bytes."""
        return {name: location(part[part["type"]]) for name, part in self._parts.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._decoded:
            part = self._parts[name]
            with media_errors(part, where=self._where):
                data = read_bytes(part[part["type"]], self._limits)
                if part["type"] == "image":
                    self._decoded[name] = np.asarray(decode_picture(data, self._limits))
                else:
                    self._decoded[name] = decode_video(data, self._limits).frames
        return self._decoded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
