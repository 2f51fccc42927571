"""A request to a reward service: one line of JSON, "\\n", then arrays as safetensors.

    {"id": "7f..", "media": "video", "fps": 16,                               the header, padded with blanks
     "groups": [{"size": 8, "row": {"caption": "a red ball"}}],               8 samples of one prompt
     "rewards": [{"name": "brightness"}, {"name": "speed"}]}
    video: uint8 [8, F, H, W, 3]                                              every array begins with [B]
    num_frames: int32 [8]                                                     of each video, if they differ

B is the sum of the groups' sizes. A body of NVIDIA's cosmos-rl clients has other keys, among them `reward_fn`, and one
.npy file; consecutive samples with equal prompts form a group:

    {"prompts": ["a cat", "a cat"], "reward_fn": {"ocr": 1.0}, "media_type": "image",
     "video_infos": [{"video_fps": 16.0}, ...]}
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from cosmos_rl_core.reward.specimen import text_specimen
from cosmos_rl_core.reward.wire_format import (
    NPY_NAME,
    ArrayLocation,
    Buffer,
    MalformedBody,
    find_arrays,
    safetensors_parts,
)
from cosmos_rl_core.types import RolloutGroup

T = TypeVar("T")
MediaKind = Literal["video", "image", "latent", "none"]
NUM_FRAMES = "num_frames"
"""Name of the array with each video's number of frames; later frames are padding."""
MAX_HEADER_BYTES = 4 * 2**20
MAX_SAMPLES = 2**16
"""Maximum B."""
_ALIGN = 64
"""The arrays start at a multiple of this, so that they can be read in place."""

_SHAPES = {
    "video": (5, "[B, frames, height, width, 3]"),
    "image": (4, "[B, height, width, 3]"),
    "latent": (5, "[B, channels, frames, height, width]"),
}
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Label = Annotated[str, msgspec.Meta(max_length=200)]


class RewardSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A requested reward."""

    name: _Name
    """Name at the service."""
    weight: float = 1.0
    """Factor in `total`; not applied to scores."""
    options: dict[str, Any] = {}
    """Options of this request, if the service allows them."""


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Samples of one prompt, scored together."""

    size: Annotated[int, msgspec.Meta(ge=1)]
    row: dict[str, Any] = {}
    """The prompt: "caption" and other columns for the rewards."""
    prompt_text: str = ""
    texts: list[str] = []
    """One per sample if samples have texts; otherwise empty."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Header of a request."""

    groups: Annotated[list[GroupSpec], msgspec.Meta(min_length=1)]
    rewards: Annotated[list[RewardSpec], msgspec.Meta(min_length=1)]
    media: MediaKind = "none"
    """The required array: `video`, `image` or `latent`. There may be others."""
    fps: float | None = None
    """Frames per second; added to rows without "fps"."""
    client: _Label = ""
    """Name of the client, for logs."""
    id: _Label = ""
    """The client's id of this request. Requests with the same id are one job; empty: each one is a separate job."""

    @property
    def size(self) -> int:
        """B."""
        return sum(group.size for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A request whose arrays are still in the body."""

    header: Header
    places: Mapping[str, ArrayLocation]

    def read_groups(self, buffer: Buffer) -> list[RolloutGroup]:
        """Return the groups for the rewards: each array of a sample is in its rollout's `media`.

        Raises ValueError for invalid pixel values and invalid frame counts.
        """
        arrays = {name: place.read(buffer) for name, place in self.places.items()}
        kind = self.header.media
        lengths = arrays.pop(NUM_FRAMES, None) if kind == "video" else None
        if kind in ("video", "image"):
            arrays[kind] = _as_pixels(arrays[kind], name=kind)
        groups: list[RolloutGroup] = []
        first = 0
        for number, group in enumerate(self.header.groups):
            media = [{name: array[first + i] for name, array in arrays.items()} for i in range(group.size)]
            if lengths is not None:
                for i, of_sample in enumerate(media):
                    of_sample["video"] = of_sample["video"][: _length(lengths[first + i], of=len(of_sample["video"]))]
            groups.append(_as_group(group, media, number=number, header=self.header))
            first += group.size
        return groups


def _decoded(line: bytes, kind: type[T]) -> T:
    """Return a header line as a value. Raises MalformedBody, which names the field."""
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBody(f"header: {error}") from error


def _decode_header(line: bytes) -> Header:
    header = _decoded(line, Header)
    if header.size > MAX_SAMPLES:
        raise MalformedBody(f"header: {header.size} samples in all; at most {MAX_SAMPLES} - at `$.groups`")
    names = [reward.name for reward in header.rewards]
    if len(set(names)) < len(names):
        raise MalformedBody("header: rewards names one more than once - at `$.rewards`")
    for i, group in enumerate(header.groups):
        if group.texts and len(group.texts) != group.size:
            raise MalformedBody(f"header: {len(group.texts)} texts for {group.size} samples - at `$.groups[{i}].texts`")
    return header


def _checked(header: Header, places: Mapping[str, ArrayLocation]) -> ScoreRequest:
    """Return the request. Raises MalformedBody for arrays that do not match the header."""
    size = header.size
    for name, place in places.items():
        if place.shape[:1] != (size,):
            raise MalformedBody(f"array {name!r} is {list(place.shape)}; the groups have {size} samples in all")
    if header.media != "none":
        place = places.get(header.media)
        if place is None:
            raise MalformedBody(f"header: media is {header.media!r}, but no array has that name; found: {list(places)}")
        _check_media(header.media, place)
    return ScoreRequest(header=header, places=places)


def _encode_line(header: Header) -> bytes:
    """Return the header line, padded to align the arrays. Raises ValueError for values that are not JSON."""
    try:
        text = msgspec.json.encode(header)
    except TypeError as error:
        raise ValueError(f"the prompt's row cannot be sent as JSON: {error}; name the columns to send") from error
    return text + b" " * (-(len(text) + 1) % _ALIGN) + b"\n"


class EncodedBody:
    """A request's bytes, which may be sent several times: httpx iterates over them for each attempt."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = parts
        self.num_bytes = sum(map(len, parts))

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes in pieces that fit a socket's buffer."""
        for part in self._parts:
            for start in range(0, len(part), _PIECE_BYTES):
                yield bytes(part[start : start + _PIECE_BYTES])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces():
            yield piece


def encode_body(header: Header, arrays: Mapping[str, Sequence[np.ndarray]]) -> EncodedBody:
    """Return the body of a request; `arrays` has one array per sample under each name.

    Raises ValueError for a header and arrays that cannot be sent.
    """
    return EncodedBody([memoryview(_encode_line(header)), *(safetensors_parts(arrays) if arrays else ())])


_PIECE_BYTES = 2**20


def _check_media(kind: str, place: ArrayLocation) -> None:
    dims, shape = _SHAPES[kind]
    pixels = kind != "latent"
    if len(place.shape) != dims or 0 in place.shape or (pixels and place.shape[-1] != 3):
        raise MalformedBody(f"array {kind!r} is {list(place.shape)}; it must be {shape}")
    if place.dtype.kind != "f" and not (pixels and place.dtype == np.uint8):
        dtypes = "uint8, or floats in [0, 1]" if pixels else "float16 or float32"
        raise MalformedBody(f"array {kind!r} is {place.dtype}; it must be {dtypes}")


def _as_pixels(array: np.ndarray, *, name: str) -> np.ndarray:
    """Return uint8 unchanged, and floats in [0, 1] as uint8."""
    if array.dtype == np.uint8:
        return array
    if not (array.min() >= 0 and array.max() <= 1):  # a NaN fails both
        raise ValueError(f"{name!r} holds floats from {array.min()} to {array.max()}; they must be in [0, 1]")
    return np.rint(array.astype(np.float32) * 255).astype(np.uint8)


def _length(num_frames: np.ndarray, *, of: int) -> int:
    if num_frames.dtype.kind not in "iu" or num_frames.shape or not 1 <= num_frames <= of:
        raise ValueError(f"{NUM_FRAMES!r} must be whole numbers [B] from 1 to {of}, the frames of a video")
    return int(num_frames)


def _as_group(
    group: GroupSpec, media: Sequence[Mapping[str, np.ndarray]], *, number: int, header: Header
) -> RolloutGroup:
    row = {"fps": header.fps, **group.row} if header.fps is not None else group.row
    origin = f"{header.client or 'client'}:{header.id or 'request'}[{number}]"
    made = text_specimen(row, texts=group.texts or [""] * group.size, origin=origin, arrays={})
    rollouts = tuple(replace(rollout, media=arrays) for rollout, arrays in zip(made.rollouts, media, strict=True))
    prompt = replace(made.prompt, sample_id=number)
    return replace(made, prompt=prompt, rollouts=rollouts, prompt_text=group.prompt_text)


class Enqueued(msgspec.Struct, frozen=True, omit_defaults=True):
    """Reply to an accepted request."""

    uuid: str
    """The service's id of the request, for fetching its result."""
    id: str = ""
    """The client's id of the request."""


class Fetched(msgspec.Struct, frozen=True, omit_defaults=True):
    """Status and result of a request."""

    status: Literal["pending", "done", "failed"]
    uuid: str
    id: str = ""
    scores: dict[str, list[float]] = {}
    """One list [B] per reward, or per part as "reward.part"."""
    total: list[float] = []
    """Their weighted sum, [B]."""
    error: str = ""
    """Reason of the failure."""


class _VideoInfo(msgspec.Struct, frozen=True):
    video_fps: float | None = None


class _Metadata(msgspec.Struct, frozen=True):
    prompts: Annotated[list[str], msgspec.Meta(min_length=1)]
    reward_fn: dict[str, float]
    media_type: str | None = None
    video_infos: list[_VideoInfo] = []


def read_request(buffer: Buffer) -> ScoreRequest:
    """Return the request in a body of either kind. Raises MalformedBody, which names the field."""
    end = buffer.find(b"\n", 0, MAX_HEADER_BYTES)
    if end < 0:
        raise MalformedBody('the body must start with one line of JSON, ended by "\\n"')
    line = buffer[:end]
    if b'"reward_fn"' in line and "reward_fn" in (keys := _decoded(line, dict[str, Any])):
        return _read_theirs(line, keys, find_arrays(buffer, end + 1))
    return _checked(_decode_header(line), find_arrays(buffer, end + 1))


def _read_theirs(line: bytes, keys: dict[str, Any], places: dict[str, ArrayLocation]) -> ScoreRequest:
    metadata = _decoded(line, _Metadata)
    if set(places) != {NPY_NAME}:
        raise MalformedBody("the metadata line of cosmos-rl must be followed by one .npy file")
    rewards = [RewardSpec(name, weight) for name, weight in metadata.reward_fn.items() if weight > 0]
    if not rewards:
        raise MalformedBody("header: no reward has a weight above 0 - at `$.reward_fn`")
    kind = _kind(metadata.media_type, places[NPY_NAME])
    header = Header(
        groups=_groups(_rows(metadata.prompts, keys)),
        rewards=rewards,
        media=kind,
        fps=metadata.video_infos[0].video_fps if metadata.video_infos else None,
        client="cosmos-rl",
    )
    return _checked(header, {kind: places[NPY_NAME]})


def _kind(media_type: str | None, place: ArrayLocation) -> MediaKind:
    """The kind of the array. cosmos-rl's trainers also send latents as "video"."""
    match (media_type or "latent").lower():
        case "image":
            return "image"
        case "video" if place.shape[-1:] == (3,):
            return "video"
        case "video" | "latent":
            return "latent"
        case other:
            raise MalformedBody(f"header: {other!r} is not one of image, video, latent - at `$.media_type`")


def _rows(prompts: Sequence[str], keys: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per sample: its prompt, and its entry of each other list of the same length."""
    own_keys = set(_Metadata.__struct_fields__)
    extras = {
        name: v for name, v in keys.items() if name not in own_keys and isinstance(v, list) and len(v) == len(prompts)
    }
    return [{"caption": prompt, **{name: v[i] for name, v in extras.items()}} for i, prompt in enumerate(prompts)]


def _groups(rows: Sequence[dict[str, Any]]) -> list[GroupSpec]:
    together = [(row, len(list(same))) for row, same in groupby(rows)]
    return [GroupSpec(size=size, row=row, prompt_text=row["caption"]) for row, size in together]
