"""A folder of clips with one caption each, in .txt or .json files, on a disk or in an object store.

videos/NAME.mp4  metas/NAME.txt  [text_embedding/NAME.safetensors | .pickle]      images/NAME.jpg likewise
NAME.mp4  NAME.json | NAME.txt                                                    side by side
metas/NAME.txt                                                                    prompts without clips
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.json_files import parse_json
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.data.storage import is_remote, open_store, reaching

VIDEOS = (".mp4", ".webm", ".mkv", ".mov", ".avi")
IMAGES = (".jpg", ".jpeg", ".png", ".webp")
EMBEDDINGS = (".safetensors", ".pickle", ".pkl")
CAPTIONS = (".json", ".txt")
EMBEDDING_FOLDERS = ("text_embedding", "t5_xxl")

Row = dict[str, Any]
Listing = Mapping[str, str]
"""Stem of a file's name -> its path in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipFiles:
    """The files of a folder by clip."""

    captions: Listing
    clips: Listing | None
    """None where the captions are prompts without clips."""
    embeddings: Listing

    @property
    def stems(self) -> list[str]:
        """Clips with a caption, or captions where there are no clips; sorted."""
        return sorted(self.captions if self.clips is None else self.captions.keys() & self.clips.keys())

    @property
    def unpaired(self) -> list[str]:
        """Clips without a caption and captions without a clip, with the missing part."""
        if self.clips is None:
            return []
        bare = [f"{stem} (no caption)" for stem in self.clips.keys() - self.captions.keys()]
        return sorted([*bare, *(f"{stem} (no clip)" for stem in self.captions.keys() - self.clips.keys())])


def read_folder(config: WFMDataConfig) -> tuple[list[Row], list[str]]:
    """Return the rows, sorted by name, and the skipped files with reasons.

    Raises:
        UserError: there is no such folder, or it has none of the layouts.
    """
    files, root = open_store(config.path, timeout_s=config.timeout_s)
    with reaching(config.path):
        layout = read_layout(files, root, config)
        stems = layout.stems[: config.limit]
        texts = files.cat([layout.captions[stem] for stem in stems]) if stems else {}
    scheme = config.path.partition("://")[0] + "://" if is_remote(config.path) else ""
    clips, embeddings = layout.clips or {}, layout.embeddings if config.text_embeddings == "auto" else {}
    rows: list[Row] = []
    left_out = layout.unpaired
    for stem in stems:
        path = layout.captions[stem]
        try:
            columns = read_caption(texts[path], is_json=path.endswith(".json"), column=config.caption_column)
        except ValueError as error:
            left_out.append(f"{stem} ({error})")
            continue
        rows.append(
            {
                **columns,
                "key": stem,
                "fps": config.fps or 0.0,
                "video": scheme + clips[stem] if stem in clips else "",
                "text_embedding": scheme + embeddings[stem] if stem in embeddings else "",
            }
        )
    return rows, left_out


def read_layout(files: Any, root: str, config: WFMDataConfig) -> ClipFiles:
    """List a folder. `files` is an fsspec file system.

    Raises:
        UserError: as `read_folder`.
    """
    if not files.isdir(root):
        raise UserError(f"data.path = {config.path!r}: there is no such folder")
    listing = {PurePosixPath(path).name: path for path in files.ls(root, detail=False)}
    suffixes = (*VIDEOS, *IMAGES) if config.size.frames == 1 else VIDEOS
    if "metas" not in listing:
        layout = ClipFiles(
            captions=_stems(listing.values(), CAPTIONS),
            clips=_stems(listing.values(), suffixes),
            embeddings=_stems(listing.values(), EMBEDDINGS),
        )
    else:
        paths = [
            path for name in ("videos", "images") if name in listing for path in files.ls(listing[name], detail=False)
        ]
        folders = [listing[name] for name in EMBEDDING_FOLDERS if name in listing]
        layout = ClipFiles(
            captions=_stems(files.ls(listing["metas"], detail=False), (".txt",)),
            clips=_stems(paths, suffixes) if {"videos", "images"} & listing.keys() else None,
            embeddings=_stems([path for folder in folders for path in files.ls(folder, detail=False)], EMBEDDINGS),
        )
        listing |= {PurePosixPath(path).name: path for path in paths}
    if layout.clips == {}:
        raise UserError(_no_clips(config, listing))
    return layout


def _stems(paths: Iterable[str], suffixes: Sequence[str]) -> Listing:
    """Files with one of the suffixes by stem; of several with one stem, that with the first suffix."""
    listed = [path for path in paths if not is_hidden(path) and PurePosixPath(path).suffix.lower() in suffixes]
    listed.sort(key=lambda path: suffixes.index(PurePosixPath(path).suffix.lower()), reverse=True)
    return {PurePosixPath(path).stem: path for path in listed}


def is_hidden(path: str) -> bool:
    """Whether a file's name begins with a dot: macOS adds "._NAME" with attributes to files of archives and disks."""
    return PurePosixPath(path).name.startswith(".")


def _no_clips(config: WFMDataConfig, names: Mapping[str, str]) -> str:
    if any(PurePosixPath(name).suffix.lower() in IMAGES for name in names):
        return f"data.path = {config.path!r} holds only images; set data.size.frames = 1, or add videos/NAME.mp4"
    return (
        f"data.path = {config.path!r}: no clips. A folder holds videos/NAME.mp4 (or images/NAME.jpg) and "
        f"metas/NAME.txt, or NAME.mp4 and NAME.json side by side; it has {', '.join(sorted(names)[:8]) or 'no files'}"
    )


def read_caption(data: bytes, *, is_json: bool, column: str) -> dict[str, Any]:
    """Return the columns of a caption file, `caption` among them: a JSON object's own, or only the text.

    Raises:
        ValueError: it has no caption, or is no JSON object; the message is a phrase.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("its caption is not UTF-8") from None
    if not is_json:
        return {"caption": checked(text, what="its caption")}
    columns = parse_json(text, where="its JSON")
    if not isinstance(columns, dict):
        raise ValueError(f"its JSON is a {type(columns).__name__}, not an object")
    return {**columns, "caption": caption_of(columns, column=column)}


def caption_of(columns: dict[str, Any], *, column: str) -> str:
    """Return the caption of a row.

    Raises:
        ValueError: no text in that column.
    """
    if column not in columns:
        raise ValueError(
            f"no column {column!r} (data.caption_column); there are {', '.join(map(repr, columns)) or 'none'}"
        )
    return checked(columns[column], what=f"column {column!r}")


def checked(text: object, *, what: str) -> str:
    """Return a caption without surrounding white space. Raises ValueError if it is empty or no text."""
    if not isinstance(text, str):
        raise ValueError(f"{what} holds a {type(text).__name__}, not text")
    if not text.strip():
        raise ValueError(f"{what} is empty")
    return text.strip()
