"""Raw rows with their locations, from files, a directory, a Hugging Face dataset or a Python module."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.json_files import read_json_lines, read_json_list, shown
from cosmos_rl_core.storage.rows import Located, as_json, rows_of
from cosmos_rl_llm.config import LLMDataConfig

SUFFIXES = (".jsonl", ".json", ".parquet")
SPLIT_NAMES = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def read_located(config: LLMDataConfig) -> Iterator[Located]:
    """Return the rows of `data.path` or `data.rows`, read lazily.

    Raises:
        UserError: data is missing or cannot be read; names its location and the remedy.
    """
    if config.rows is not None:
        return rows_of(config.rows)
    path = Path(config.path).expanduser()
    return _read_local(path, config) if path.exists() else _read_hub(config)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suffix for error messages: the known name closest to `name`, if one is similar."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f'. Did you mean "{close[0]}"?' if close else ""


def _read_local(path: Path, config: LLMDataConfig) -> Iterator[Located]:
    if config.subset is not None:
        raise UserError(f"data.subset is for a Hugging Face datasets id; {path} is on this machine")
    if path.is_dir():
        files = _files_of_split(path, config.split)
    elif config.split is not None:
        raise UserError(f"data.split = {config.split!r} does not apply to one file, {path}; remove it")
    elif path.suffix not in SUFFIXES:
        raise UserError(f"data.path = {config.path!r}: must end in {', '.join(SUFFIXES)}")
    else:
        files = [path]
    for file in files:
        yield from _read_file(file)


def _files_of_split(directory: Path, split: str | None) -> list[Path]:
    """The directory's data files of one split; raises an error instead of mixing two."""
    files = sorted(file for file in directory.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise UserError(f"data.path = {str(directory)!r}: no {', '.join(SUFFIXES)} file in this directory")
    first_words = {file: re.split(r"[^A-Za-z0-9]", file.stem)[0] for file in files}
    if split is not None:
        chosen = [file for file in files if split in (first_words[file], file.stem)]
        if not chosen:
            names = ", ".join(file.name for file in files)
            raise UserError(f"data.split = {split!r}: no file of {directory} starts with it; there are: {names}")
        return chosen
    splits = sorted(SPLIT_NAMES.intersection(first_words.values()))
    if len(splits) > 1:
        raise UserError(f"data.path = {str(directory)!r} holds {', '.join(splits)}; choose one with data.split")
    return files


def _read_file(file: Path) -> Iterator[Located]:
    rows: Iterable[Located]
    try:
        match file.suffix:
            case ".jsonl":
                rows = _read_jsonl(file)
            case ".json":
                rows = read_json_list(file)
            case _:
                rows = _read_parquet(file)
        for where, row in rows:
            if not isinstance(row, Mapping):
                raise UserError(f"{where}: a row must be an object with named columns, not {shown(row)}")
            yield where, row
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error}") from None


def _read_jsonl(file: Path) -> Iterator[Located]:
    with file.open("rb") as lines:
        yield from read_json_lines(lines, name=str(file))


def _read_parquet(file: Path) -> Iterator[Located]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"{file}: parquet needs pyarrow: pip install 'cosmos-rl-llm[datasets]'") from None
    try:
        with pq.ParquetFile(file) as table:
            rows = (row for batch in table.iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows):
                yield as_json(f"{file}[{number}]", row)
    except pa.ArrowException as error:
        raise UserError(f"{file}: not a readable parquet file: {error}") from None


def _read_hub(config: LLMDataConfig) -> Iterator[Located]:
    path = Path(config.path).expanduser()
    if path.suffix in SUFFIXES or not HUB_ID.fullmatch(config.path):
        beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"data.path = {config.path!r}: no such file or directory{did_you_mean(path.name, beside)}")
    split = config.split or "train"
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"data.path = {config.path!r} is not a file or directory here; to load it from a hub: "
            "pip install 'cosmos-rl-llm[datasets]'"
        ) from None
    try:
        dataset = load_dataset(config.path, name=config.subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"data.path = {config.path!r} is not a file or directory here, and loading it from the hub failed: {error}"
        ) from error
    for number, row in enumerate(dataset):
        assert isinstance(row, Mapping)
        yield as_json(f"{config.path}/{split}[{number}]", row)
