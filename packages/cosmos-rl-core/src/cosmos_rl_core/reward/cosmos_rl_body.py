"""Request body of NVIDIA's cosmos-rl clients: a line of JSON with other keys, then one .npy file.

    {"prompts": ["a cat", "a cat"], "reward_fn": {"ocr": 1.0}, "media_type": "image",
     "video_infos": [{"video_fps": 16.0}, ...]}

`read_request` recognises it by the key `reward_fn`. Consecutive samples with equal prompts form a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any

import msgspec

from cosmos_rl_core.reward.request import (
    GroupSpec,
    Header,
    MediaKind,
    Request,
    RewardSpec,
    checked,
    decode_header,
    read_line,
)
from cosmos_rl_core.reward.wire_format import Buffer, MalformedBody, Place, find_arrays


class _VideoInfo(msgspec.Struct, frozen=True):
    video_fps: float | None = None


class _Metadata(msgspec.Struct, frozen=True):
    prompts: Annotated[list[str], msgspec.Meta(min_length=1)]
    reward_fn: dict[str, float]
    media_type: str | None = None
    video_infos: list[_VideoInfo] = []


_decode = msgspec.json.Decoder(_Metadata).decode
_decode_keys = msgspec.json.Decoder(dict[str, Any]).decode


def read_request(buffer: Buffer) -> Request:
    """Return the request in a body of either kind. Raises MalformedBody, which names the field."""
    line, start = read_line(buffer)
    if b'"reward_fn"' in line and (keys := _keys(line)).keys() & {"reward_fn"}:
        return _read_theirs(line, keys, find_arrays(buffer, start))
    return checked(decode_header(line), find_arrays(buffer, start))


def _keys(line: bytes) -> dict[str, Any]:
    try:
        return _decode_keys(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBody(f"header: {error}") from error


def _read_theirs(line: bytes, keys: dict[str, Any], places: dict[str, Place]) -> Request:
    try:
        metadata = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBody(f"header: {error}") from error
    if set(places) != {"array"}:
        raise MalformedBody("the metadata line of cosmos-rl must be followed by one .npy file")
    rewards = [RewardSpec(name, weight) for name, weight in metadata.reward_fn.items() if weight > 0]
    if not rewards:
        raise MalformedBody("header: no reward has a weight above 0 - at `$.reward_fn`")
    kind = _kind(metadata.media_type, places["array"])
    header = Header(
        groups=_groups(_rows(metadata.prompts, keys)),
        rewards=rewards,
        media=kind,
        fps=metadata.video_infos[0].video_fps if metadata.video_infos else None,
        client="cosmos-rl",
    )
    return checked(header, {kind: places["array"]})


def _kind(media_type: str | None, place: Place) -> MediaKind:
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
    known = set(_Metadata.__struct_fields__)
    extras = {
        name: v for name, v in keys.items() if name not in known and isinstance(v, list) and len(v) == len(prompts)
    }
    return [{"caption": prompt, **{name: v[i] for name, v in extras.items()}} for i, prompt in enumerate(prompts)]


def _groups(rows: Sequence[dict[str, Any]]) -> list[GroupSpec]:
    together = [(row, len(list(same))) for row, same in groupby(rows)]
    return [GroupSpec(size=size, row=row, prompt_text=row["caption"]) for row, size in together]
