"""The bytes of a picture or video that a row names, and their decoding with limits.

    "cat.png" | "file:///..." | "https://..." | "data:image/png;base64,..." | {"bytes": ..., "path": ...}
        -> read_bytes -> decode_picture -> RGB picture
                      -> decode_video    -> Video: frames [T, H, W, 3], and the time of each

A file is opened only below `root`, and a URL only with a scheme that the recipe allows. Sizes are checked before pixels
are decoded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

import numpy as np

from cosmos_rl_core.errors import MediaError
from cosmos_rl_llm.config import MediaSection

if TYPE_CHECKING:
    from av.video.frame import VideoFrame
    from PIL.Image import Image

    from cosmos_rl_core.observe.gallery import AnswerGallery
    from cosmos_rl_core.types import RolloutGroup

FETCH_S = 30.0
"""Time for a URL to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """Frames of a video."""

    frames: np.ndarray
    """[T, H, W, 3] uint8."""
    times: np.ndarray
    """[T] float64: seconds from the video's start."""
    fps: float
    """Frames a second among `frames`."""
    duration: float
    """Seconds of the whole video."""


LIMITS = "data.media"
"""Column of a row with pictures or videos: the keys of its section that are set."""


def limits_of(row: Mapping[str, Any], otherwise: MediaSection) -> MediaSection:
    """Return the limits of the section that a row was loaded from."""
    return MediaSection.model_validate(row[LIMITS]) if LIMITS in row else otherwise


def read_bytes(given: Any, limits: MediaSection) -> bytes:
    """Return the bytes of a picture or video. Raises MediaError with the reason."""
    match given:
        case bytes():
            found = given
        case {"bytes": bytes() as found}:
            pass
        case {"bytes": str(text)}:
            found = _from_base64(text)
        case {"path": str(path)} | {"url": str(path)}:
            return read_bytes(path, limits)
        case str():
            found = _from_location(given, limits)
        case _:
            raise MediaError(f"a picture or video must be a path, a URL or bytes, not {type(given).__name__}")
    if len(found) > limits.max_bytes:
        raise MediaError(f"{len(found):,} bytes, more than the {limits.max_bytes:,} allowed (data.media.max_bytes)")
    return found


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
            return _digest(given) if given.startswith("data:") else given
    return type(given).__name__


def _digest(content: bytes | str) -> str:
    found = hashlib.blake2b(content if isinstance(content, bytes) else content.encode(), digest_size=8)
    return f"blake2b:{found.hexdigest()}"


def _from_location(text: str, limits: MediaSection) -> bytes:
    scheme, sep, rest = text.partition(":")
    if not sep or len(scheme) < 2 or "/" in scheme:
        return _from_file(Path(text), limits)
    if scheme not in limits.schemes:
        allowed = ", ".join(sorted(limits.schemes)) or "none"
        raise MediaError(f"URLs with {scheme}: are not allowed (data.media.schemes: {allowed})")
    match scheme:
        case "data":
            header, comma, body = rest.partition(",")
            if not comma or not header.endswith("base64"):
                raise MediaError("a data: URL must be data:TYPE;base64,...")
            return _from_base64(body)
        case "file":
            return _from_file(Path(unquote(urlsplit(text).path)), limits)
        case _:
            return _from_network(text, limits)


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


def _from_network(url: str, limits: MediaSection) -> bytes:
    try:
        with urlopen(url, timeout=FETCH_S) as answer:
            return answer.read(limits.max_bytes + 1)
    except OSError as error:
        raise MediaError(f"{url}: {error}") from error


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise MediaError(f"not base64: {error}") from error


def decode_picture(data: bytes, limits: MediaSection) -> Image:
    """Return an RGB picture, turned as its EXIF data says. Raises MediaError if it is none, damaged or too large."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is ours
            opened = Image.open(io.BytesIO(data))
        with opened:
            if opened.width * opened.height > limits.max_decoded_pixels:
                raise MediaError(
                    f"{opened.width} x {opened.height} pixels, more than data.media.max_decoded_pixels = "
                    f"{limits.max_decoded_pixels:,}"
                )
            return ImageOps.exif_transpose(opened).convert("RGB")
    except UnidentifiedImageError as error:
        raise MediaError("not a picture that can be read") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise MediaError(f"a damaged picture: {error}") from error


def decode_video(data: bytes, limits: MediaSection) -> Video:
    """Return frames at `limits.fps`. Raises MediaError if there are none, or if they are damaged or too large."""
    from cosmos_rl_core.data.video import VideoFile

    frames: list[np.ndarray] = []

    def take(frame: VideoFrame, place: int) -> None:
        if frame.width * frame.height > limits.max_decoded_pixels:
            raise MediaError(
                f"frames of {frame.width} x {frame.height} pixels, more than data.media.max_decoded_pixels = "
                f"{limits.max_decoded_pixels:,}"
            )
        frames.append(frame.to_ndarray(format="rgb24"))

    with VideoFile(data) as video:
        seconds = video.table.seconds - video.table.seconds[0]
        span = float(seconds[-1])
        interval = 1 / limits.fps
        if span and limits.min_frames > 1:
            interval = min(interval, span / (limits.min_frames - 1))
        interval = max(interval, span / limits.max_frames)
        wanted = np.arange(0.0, seconds[-1] + 1e-6, interval)[: limits.max_frames]
        places = np.unique(np.searchsorted(seconds, wanted - 1e-6))
        video.read(places, take)
    times = seconds[places]
    spacing = float(np.diff(times).mean()) if len(times) > 1 else 1 / limits.fps
    duration = float(seconds[-1]) * len(seconds) / max(1, len(seconds) - 1)  # to the end of the last frame
    return Video(frames=np.stack(frames), times=times, fps=1 / spacing, duration=duration)


def parts_of(content: Any) -> list[Mapping[str, Any]]:
    """Return the parts of a message's content: a string is one part of text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


class PromptRecorder:
    """Gallery of prompts with pictures and videos beside the answers. It imports Pillow with the first of them."""

    of_rollouts = False

    def __init__(self, directory: Path, *, name: str, groups: int, every: int) -> None:
        """As `Domain.recorder`."""
        self._directory = directory
        self._keys = {"name": name, "groups_per_step": groups, "every_steps": every}
        self._gallery: AnswerGallery | None = None

    def save(self, step: int, group: RolloutGroup) -> Path | None:
        """Write a group as `AnswerGallery.save`; None for a prompt of text."""
        if not group.media:
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
    """The text of the last message of the user."""
    messages = [message for message in group.prompt.row["prompt"] if message["role"] == "user"]
    return " ".join(part["text"] for part in parts_of(messages[-1]["content"]) if part["type"] == "text")


class PromptMedia(Mapping[str, np.ndarray]):
    """Pictures and videos of a row's prompt, for rewards and files, decoded when they are read.

    image [H, W, 3], image_1 [H, W, 3], ..., video [T, H, W, 3], uint8, in the order of the prompt. Reading one raises
    MediaError if it cannot be decoded.
    """

    def __init__(self, row: Mapping[str, Any], limits: MediaSection) -> None:
        self._limits = limits_of(row, limits)
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
