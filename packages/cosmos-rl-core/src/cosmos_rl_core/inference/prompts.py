"""The rows for which `cosmos-rl generate` and `eval` sample rollouts.

--prompts prompts.jsonl     one prompt per line: an object with the columns of a row, or a quoted text
--prompts prompts.txt       one prompt per line: its text
--prompts "a red cube"      one prompt; with --image FILE and --video FILE, before the text
(nothing)                   [eval.data]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.inference.pool import PromptRow
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.storage.json_files import parse_json, read_lines

LISTS = (".jsonl", ".txt")
"""File name suffixes of a list of prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts to generate for."""

    origin: str
    rows: list[PromptRow] = field(default_factory=list)
    wrong: dict[int, str] = field(default_factory=dict)
    """Indices without a valid prompt, with the reason."""

    def __len__(self) -> int:
        return len(self.rows) + len(self.wrong)


def evaluation_prompts(config: RunConfig, domain: DomainBase) -> Prompts:
    """Return the rows of [eval.data]. Raises UserError if the recipe has none."""
    if config.eval.data is None:
        raise UserError("the recipe has no [eval.data], the rows to evaluate on; add it, with the keys of [data]")
    rows, origin = domain.load_rows(config.eval.data)
    if not rows:
        raise UserError(f"[eval.data]: {origin} has no rows")
    limited = enumerate(config.evaluated(rows))
    return Prompts(
        origin=origin,
        rows=[PromptRow(sample=place, columns=dict(row), origin=f"{origin}:{place + 1}") for place, row in limited],
    )


def read_prompts(
    config: RunConfig, domain: DomainBase, text: str, *, images: Sequence[Path] = (), videos: Sequence[Path] = ()
) -> Prompts:
    """Return the prompts of a list, or `text` itself as a prompt. An invalid line is kept with its reason.

    images, videos: files of a prompt that is given itself. Raises UserError for a list that cannot be read or is empty,
    and for files that cannot be attached.
    """
    path = Path(text)
    listed = path.suffix in LISTS
    attached = bool(images or videos)
    if attached and (listed or not text):
        raise UserError(
            "--image and --video belong to one prompt, --prompts TEXT; rows of a list name their files in the columns "
            "of data.image_column and data.video_column"
        )
    prompts = Prompts(origin=path.name if listed else "--prompts")
    for place, (where, value) in enumerate(_listed(path) if listed else [("--prompts", text)]):
        try:
            columns = _columns(config, domain, value, where=where, folder=path.parent if listed else Path())
            if attached:
                columns = domain.attach_files(config.data, columns, images=images, videos=videos)
        except UserError as error:
            prompts.wrong[place] = str(error)
        else:
            prompts.rows.append(PromptRow(sample=place, columns=dict(columns), origin=where))
    if not len(prompts):
        raise UserError(f"{path}: contains no prompt")
    if not listed and prompts.wrong:
        raise UserError(prompts.wrong[0])
    return prompts


def _listed(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield each prompt with its location: a text, or bytes of JSON."""
    try:
        with path.open("rb") as file:
            for where, line in read_lines(file, name=path.name):
                yield where, line.decode() if path.suffix == ".txt" else line
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file in UTF-8"
        raise UserError(f"--prompts {path}: {reason}") from error


def _columns(
    config: RunConfig, domain: DomainBase, value: str | bytes, *, where: str, folder: Path
) -> Mapping[str, Any]:
    prompt: Any = parse_json(value, where=where) if isinstance(value, bytes) else value
    if not isinstance(prompt, str | dict):
        raise UserError(f"{where}: a prompt is an object or a text, not a {type(prompt).__name__}")
    return domain.prompt_row(config.data, prompt, where=where, folder=folder)
