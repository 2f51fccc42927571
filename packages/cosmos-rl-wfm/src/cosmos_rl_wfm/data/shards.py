"""Tar shards in the layout of WebDataset, on a disk or in an object store, read by byte ranges.

    clips-000.tar: 0001.mp4 0001.txt | 0001.json [0001.safetensors]  0002.mp4 ...     files of one name are one sample

A shard is read once for its index (headers and captions; clips are skipped), which is kept in the cache folder. Rows
then hold byte ranges, so that the prompt stream shuffles them freely and resumes at any (shard, position). The library
webdataset reads shards from front to back, shuffles in a buffer and does not expose its position, so a run could not
resume exactly; it would also bring torch into the controller. Shards that it writes are supported.
"""

from __future__ import annotations

import json
import logging
import re
import tarfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.data.folder import CAPTIONS, EMBEDDINGS, IMAGES, VIDEOS, is_hidden, read_caption
from cosmos_rl_wfm.data.storage import cache_folder, is_remote, open_store, reaching, write_atomic

log = logging.getLogger(__name__)

Row = dict[str, Any]

BRACES = re.compile(r"\{([^{}]*)\}")
NUMBERS = re.compile(r"(\d+)\.\.(\d+)")

HEADER_BLOCK_BYTES = 64 * 1024
"""Bytes per request to a store while a shard's headers are read: clips between them are skipped."""

INDEXERS = 16
"""Shards whose headers are read at the same time."""

INDEX_FORMAT = 2
MAX_CAPTION_BYTES = 2**20
"""Largest .txt or .json of a sample: all of them are in memory while a shard is indexed."""


@dataclass(slots=True, kw_only=True)
class ShardSample:
    """The files of a shard that share a name."""

    key: str
    members: dict[str, tuple[int, int]] = field(default_factory=dict)
    """First byte and number of bytes by suffix (".mp4")."""
    texts: dict[str, str] = field(default_factory=dict)
    """Contents of the caption files, by suffix."""


@dataclass(slots=True, kw_only=True)
class ShardIndex:
    """The samples of a shard with their byte ranges."""

    samples: list[ShardSample]
    fault: str = ""
    """Reason why it ends early; empty for a complete shard."""
    repeated: list[str] = field(default_factory=list)
    """Names of files that occur again later, as `tar --append` adds them; the last of a name counts."""


def is_shard(location: str) -> bool:
    """Whether a path or URL names tar shards."""
    return PurePosixPath(location).suffix == ".tar" or BRACES.search(location) is not None


def holds_shards(config: WFMDataConfig) -> bool:
    """Whether a folder has shards in it."""
    files, root = open_store(config.path, timeout_s=config.timeout_s)
    with reaching(config.path):
        return any(not is_hidden(path) for path in files.glob(f"{root.rstrip('/')}/*.tar"))


def expand(pattern: str) -> list[str]:
    """Return the names that braces expand to, in order: {000..010} numbers of fixed width, {a,b} alternatives.

    Raises:
        UserError: descending numbers.
    """
    match = BRACES.search(pattern)
    if match is None:
        return [pattern]
    words = match[1].split(",")
    if numbers := NUMBERS.fullmatch(match[1]):
        first, last = int(numbers[1]), int(numbers[2])
        if last < first:
            raise UserError(f"data.path = {pattern!r}: {match[0]} counts down; the smaller number comes first")
        words = [f"{number:0{len(numbers[1])}d}" for number in range(first, last + 1)]
    return [name for word in words for name in expand(pattern[: match.start()] + word + pattern[match.end() :])]


def list_shards(config: WFMDataConfig) -> list[str]:
    """Return the shards of `config.path`: a name with braces or stars, or a folder."""
    listed: list[str] = []
    for pattern in expand(config.path):
        if "*" not in pattern and PurePosixPath(pattern).suffix == ".tar":
            listed.append(pattern)
            continue
        files, path = open_store(pattern, timeout_s=config.timeout_s)
        scheme = pattern.partition("://")[0] + "://" if is_remote(pattern) else ""
        with reaching(pattern):
            names = files.glob(path if "*" in path else f"{path.rstrip('/')}/*.tar")
        listed += [scheme + name for name in sorted(names) if not is_hidden(name)]
    return listed


def read_shards(config: WFMDataConfig) -> tuple[list[Row], list[str]]:
    """Return the rows, shard after shard, and the skipped shards and samples with reasons.

    Raises:
        UserError: a store refuses or does not answer.
    """
    rows: list[Row] = []
    left_out: list[str] = []
    shards = iter(list_shards(config))
    while some := list(islice(shards, INDEXERS)):
        with ThreadPoolExecutor(INDEXERS) as pool:
            indexes = list(pool.map(lambda shard: read_index(shard, config=config), some))
        for shard, index in zip(some, indexes):
            if index.fault:
                left_out.append(f"{shard} ({index.fault})")
            left_out += [f"{PurePosixPath(shard).name}/{name} (the name occurs again)" for name in index.repeated]
            for position, sample in enumerate(index.samples):
                try:
                    rows.append(_row(sample, shard=shard, position=position, config=config))
                except ValueError as error:
                    left_out.append(f"{PurePosixPath(shard).name}/{sample.key} ({error})")
        if config.limit is not None and len(rows) >= config.limit:
            break
    return rows, left_out


def read_index(shard: str, *, config: WFMDataConfig) -> ShardIndex:
    """Return a shard's index, from the cache folder if it is there and the shard has not changed."""
    files, path = open_store(shard, timeout_s=config.timeout_s)
    try:
        with reaching(shard):
            info = files.info(path)
            version = [info.get(name) for name in ("size", "ETag", "etag", "mtime", "LastModified")]
            kept = _index_file(config, [INDEX_FORMAT, shard if is_remote(shard) else path, *map(str, version)])
            if kept.exists() and (known := _from_json(kept)) is not None:
                return known
            with files.open(path, "rb", block_size=HEADER_BLOCK_BYTES) as file:
                index = index_tar(file)
    except FileNotFoundError:
        return ShardIndex(samples=[], fault="there is no such shard")
    if not index.fault:
        write_atomic(kept, json.dumps(asdict(index)).encode())
    return index


def index_tar(file: Any) -> ShardIndex:
    """Read the headers and captions of a tar archive; a damaged one gives the samples before the damage."""
    index = ShardIndex(samples=[])
    samples: dict[str, ShardSample] = {}
    last = ShardSample(key="")
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                if member.isreg() and not is_hidden(member.name):
                    last = _add(samples, member, archive, index.repeated)
            file.seek(archive.offset)
            if any(
                file.read(tarfile.BLOCKSIZE) or b"cut"
            ):  # zeros end an archive; tarfile takes any bad header for its end
                index.fault = f"is damaged at byte {archive.offset}, read up to sample {len(samples)}"
    except tarfile.TarError as error:
        index.fault = f"is damaged or no plain tar, read up to sample {len(samples)}: {error}"
        samples.pop(last.key, None)  # its last file may be truncated
    index.samples = list(samples.values())
    return index


def _add(
    samples: dict[str, ShardSample], member: tarfile.TarInfo, archive: tarfile.TarFile, repeated: list[str]
) -> ShardSample:
    """Add a file to the sample of its name, and return that."""
    folder, _, name = member.name.rpartition("/")
    stem, _, suffix = name.partition(".")
    key, suffix = f"{folder}/{stem}".lstrip("/"), "." + suffix.lower()
    sample = samples.setdefault(key, ShardSample(key=key))
    if suffix in sample.members:
        repeated.append(f"{key}{suffix}")
    sample.members[suffix] = (member.offset_data, member.size)
    if suffix in CAPTIONS:
        content = archive.extractfile(member)
        assert content is not None
        sample.texts[suffix] = content.read(MAX_CAPTION_BYTES + 1).decode("utf-8", errors="replace")
    return sample


def _row(sample: ShardSample, *, shard: str, position: int, config: WFMDataConfig) -> Row:
    """Raises ValueError for a sample without a clip or caption."""
    suffixes = (*VIDEOS, *IMAGES) if config.size.frames == 1 else VIDEOS
    clip = next((suffix for suffix in suffixes if suffix in sample.members), None)
    if clip is None:
        raise ValueError(f"no clip; there are {', '.join(sample.members)}")
    captions = next((suffix for suffix in CAPTIONS if suffix in sample.texts), None)
    if captions is None:
        raise ValueError("no caption")
    text = sample.texts[captions].encode()
    if len(text) > MAX_CAPTION_BYTES:
        raise ValueError(f"a caption of more than {MAX_CAPTION_BYTES:,} bytes")
    row: Row = {
        **read_caption(text, is_json=captions == ".json", column=config.caption_column),
        "key": f"{PurePosixPath(shard).stem}/{sample.key}",
        "fps": config.fps or 0.0,
        "video": shard,
        "video_at": list(sample.members[clip]),
        "text_embedding": "",
        "position": position,
    }
    embedding = next(_embeddings(sample.members), None) if config.text_embeddings == "auto" else None
    if embedding is not None:
        row |= {"text_embedding": shard, "text_embedding_at": list(sample.members[embedding])}
    return row


def _embeddings(members: Mapping[str, Any]) -> Iterator[str]:
    """Suffixes of text embeddings: such as .safetensors or .t5.pickle."""
    return (suffix for end in EMBEDDINGS for suffix in members if suffix.endswith(end))


def _index_file(config: WFMDataConfig, version: list[Any]) -> Path:
    name = sha256(json.dumps(version).encode()).hexdigest()
    return cache_folder(config.cache_path) / "shards" / f"{name}.json"


def _from_json(file: Path) -> ShardIndex | None:
    """Read a cached index; None for a damaged file, which is written again."""
    try:
        content = json.loads(file.read_bytes())
        return ShardIndex(**{**content, "samples": [ShardSample(**sample) for sample in content["samples"]]})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
