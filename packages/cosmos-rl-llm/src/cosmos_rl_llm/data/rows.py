"""Rows of a dataset, read from files, a directory, a Hugging Face dataset or a Python module, checked and normalised.

    files, a hub or a module --> (where, row) --> normalise --> {"prompt": ..., "answer": ..., "response": ..., own}

`prompt` is a list of chat messages, or a string if no chat template is used; `answer` and `response` are
strings, set if their columns are named in the config. With `messages_column` there is no `response`, but
`messages`, a whole chat; `prompt` is the part before the last answer. Rows with a fault are dropped; a damaged file is
a UserError.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, cast

from cosmos_rl_core.data.source import usable_rows
from cosmos_rl_core.errors import UserError, closest
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.reward.cpu_limit import within
from cosmos_rl_core.storage import hub
from cosmos_rl_core.storage.json_files import read_json_lines, read_json_list, shown
from cosmos_rl_core.storage.rows import Located, as_json, rows_of
from cosmos_rl_llm.config import PLAIN_TEXT, LLMDataConfig
from cosmos_rl_llm.data.columns import readable_columns, with_base64
from cosmos_rl_llm.data.message_parts import normalise_content, with_media
from cosmos_rl_llm.data.spans import LABEL, MARGIN, PAIR, STEPS, steps_of
from cosmos_rl_llm.media.source import LIMITS, shows_media

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
SPLIT_NAMES = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
OURS = (LIMITS, PAIR, LABEL, MARGIN, STEPS)
"""Names in a row that no column of the user's has."""
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
    near = closest(name, list(known))
    return f'. Did you mean "{near}"?' if near else ""


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
        yield from _read_file(file, config)


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
            hint = did_you_mean(split, first_words.values())
            raise UserError(f"data.split = {split!r}: no file of {directory} starts with it; there are: {names}{hint}")
        return chosen
    splits = sorted(SPLIT_NAMES.intersection(first_words.values()))
    if len(splits) > 1:
        raise UserError(f"data.path = {str(directory)!r} holds {', '.join(splits)}; choose one with data.split")
    return files


def _read_file(file: Path, config: LLMDataConfig) -> Iterator[Located]:
    rows: Iterable[Located]
    try:
        match file.suffix:
            case ".jsonl":
                rows = _read_jsonl(file)
            case ".json":
                rows = read_json_list(file)
            case ".csv":
                rows = _read_csv(file)
            case _:
                rows = _read_parquet(file, config)
        yield from rows
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error}") from None


def _read_jsonl(file: Path) -> Iterator[Located]:
    with file.open("rb") as lines:
        yield from read_json_lines(lines, name=str(file))


def _read_csv(file: Path) -> Iterator[Located]:
    """The rows of a file whose first row names the columns; all values are text."""
    with file.open(newline="", encoding="utf-8-sig") as lines:
        rows = csv.reader(lines, strict=True)
        try:
            columns = next(rows, [])
            if len(set(columns)) < len(columns) or not columns:
                raise UserError(f"{file}:1: the first row must name the columns, each once; it has {columns}")
            for row in rows:
                where = f"{file}:{rows.line_num}"
                if row and len(row) != len(columns):  # a blank line is no row
                    raise UserError(f"{where}: has {len(row)} values for {len(columns)} columns")
                if row:
                    yield where, dict(zip(columns, row))
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{file}:{rows.line_num}: is not readable CSV in UTF-8: {error}") from None


def _read_parquet(file: Path, config: LLMDataConfig) -> Iterator[Located]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"{file}: parquet needs pyarrow: {pip_install('cosmos-rl-llm[datasets]')}") from None
    try:
        with pq.ParquetFile(file) as table:
            columns = readable_columns(table.schema_arrow, config, origin=str(file))
            rows = (row for batch in table.iter_batches(columns=columns) for row in batch.to_pylist())
            for number, row in enumerate(rows):
                yield as_json(f"{file}[{number}]", with_base64(row, config))
    except pa.ArrowException as error:
        raise UserError(f"{file}: not a readable parquet file: {error}") from None


def _read_hub(config: LLMDataConfig) -> Iterator[Located]:
    path = Path(config.path).expanduser()
    if path.suffix in SUFFIXES or not HUB_ID.fullmatch(config.path):
        beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"data.path = {config.path!r}: no such file or directory{did_you_mean(path.name, beside)}")
    split = config.split or "train"
    try:
        from datasets import Dataset, load_dataset
    except ImportError:
        raise UserError(
            f"data.path = {config.path!r} is not a file or directory here; to load it from a hub: "
            f"{pip_install('cosmos-rl-llm[datasets]')}"
        ) from None
    hub.must_be_quiet()
    try:
        dataset = load_dataset(config.path, name=config.subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"data.path = {config.path!r} is not a file or directory here, and "
            + (f"not in the cache, and {silent}" if (silent := hub.silence()) else f"the hub failed: {error}")
        ) from error
    assert isinstance(dataset, Dataset)
    columns = readable_columns(dataset.features.arrow_schema, config, origin=config.path)
    arrow = dataset.select_columns(columns).with_format("arrow")
    tables = cast("Iterable[Any]", arrow.iter(batch_size=1000))  # pictures stay encoded
    for number, row in enumerate(row for table in tables for row in table.to_pylist()):
        yield as_json(f"{config.path}/{split}[{number}]", with_base64(row, config))


ROLES = ("system", "user", "assistant", "tool")


def load_rows(config: LLMDataConfig) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Read, check and normalise the dataset.

    Returns the rows and their origin for messages: the name of the file or directory, the datasets id, or [data] rows.
    A row with a missing column or a wrong value is dropped, as in `usable_rows`.

    Raises:
        UserError: a file is missing or damaged, or most rows are wrong; names its location and the remedy.
    """
    located = islice(read_located(config), config.limit)
    rows = usable_rows(located, lambda where, row: normalise(row, where=where, config=config))
    if not rows:
        key = f"path = {config.path!r}" if config.rows is None else f"rows = {config.rows!r}"
        raise UserError(f"data.{key}: the dataset is empty; it needs at least one row")
    if config.rows is not None:
        return rows, config.rows
    path = Path(config.path)
    return rows, path.name if path.expanduser().exists() else config.path


def normalise(row: Mapping[str, Any], *, where: str, config: LLMDataConfig) -> dict[str, Any]:
    """Return the row with its own columns, `prompt` and, if configured, `answer` and `response`.

    A pair has `PAIR`, its chosen and its rejected answer, a judged response `LABEL` and one judged by steps `STEPS`.
    A row with pictures or videos also has `LIMITS`, the keys of [data.media] that are set. These names win over columns
    of the same name: with answer_column = "answer" and an answer_pattern, row["answer"] is the match of the pattern.

    Raises:
        UserError: a column or value is missing or wrong; names its location and the remedy.
    """
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: a row must be an object with named columns, not {shown(row)}")
    result = {
        column: value for column, value in row.items() if column not in OURS and not _holds_bytes(column, value, config)
    }
    if config.chosen_column is not None:
        result |= _pair(row, where=where, config=config)
    elif config.messages_column is None:
        result["prompt"] = _prompt(row, where=where, config=config)
    else:
        result.pop("response", None)
        result["messages"] = chat = _chat(row, where=where, config=config, column=config.messages_column)
        answers = [place for place, message in enumerate(chat) if message["role"] == "assistant"]
        result["prompt"] = chat[: answers[-1]]
    result.pop("tools", None)
    if tools := _tools(row, where=where, config=config):
        result["tools"] = tools
    if shows_media(result["prompt" if config.messages_column is None else "messages"]):
        result[LIMITS] = config.media.model_dump(mode="json", exclude_defaults=True)
    if config.answer_column is not None:
        result["answer"] = _answer(row, where=where, config=config)
    if config.response_column is not None:
        result["response"] = _response(row, where=where, key="response_column", config=config)
    if config.steps_column is not None:
        result |= _steps(row, where=where, config=config)
    elif config.label_column is not None:
        result[LABEL] = _label(row, where=where, column=config.label_column)
    return result


def _holds_bytes(column: str, value: Any, config: LLMDataConfig) -> bool:
    """Whether a column holds encoded pictures or videos, which the prompt has too: they are sent once."""
    each = value if isinstance(value, list) else [value]
    media = column in (config.image_column, config.video_column)
    return media and any(isinstance(one, Mapping) and one.get("bytes") is not None for one in each)


_TEXT_ALONE = {"prompt_column": "prompt", "prompt_template": None, "image_column": None, "video_column": None}


def prompt_row(given: str | Mapping[str, Any], *, where: str, config: LLMDataConfig) -> dict[str, Any]:
    """Return the row of a prompt to answer, given as text or columns; needs no reference answer."""
    unasked = {"answer_column": None, "answer_pattern": None, "response_column": None, "messages_column": None}
    unasked |= {
        "steps_column": None,
        "chosen_column": None,
        "rejected_column": None,
        "label_column": None,
        "margin_column": None,
    }
    if isinstance(given, str):
        return normalise(
            {"prompt": given},
            where=where,
            config=config.model_copy(update={**unasked, **_TEXT_ALONE}),
        )
    return normalise(given, where=where, config=config.model_copy(update=unasked))


def _prompt(row: Mapping[str, Any], *, where: str, config: LLMDataConfig) -> str | list[dict[str, Any]]:
    """A string for plain text, otherwise messages with the system prompt in front."""
    if config.prompt_template is not None:
        key, value = "data.prompt_template", _fill(config.prompt_template, row, where=where)
    elif not config.prompt_column:
        return "" if config.chat_template == PLAIN_TEXT else _with_system_prompt([], config)
    else:
        key = "data.prompt_column"
        value = _column(row, config.prompt_column, where=where, key=key)
    if isinstance(value, str):
        if not value.strip():
            raise UserError(f"{where}: the prompt is empty ({key})")
        if config.chat_template == PLAIN_TEXT:
            return value
        messages: list[dict[str, Any]] = [{"role": "user", "content": value}]
    elif config.chat_template == PLAIN_TEXT:
        raise UserError(
            f'{where}: the prompt is a {type(value).__name__}, but data.chat_template = "none" takes text; '
            "remove that key or name a column of strings in data.prompt_column"
        )
    else:
        messages = _messages(value, "the prompt must be a string or a list of chat messages", where=where, key=key)
    return _with_system_prompt(with_media(messages, row, where=where, config=config), config)


def _chat(row: Mapping[str, Any], *, where: str, config: LLMDataConfig, column: str) -> list[dict[str, Any]]:
    """A whole chat with at least one answer, with the system prompt in front."""
    key = "data.messages_column"
    value = _column(row, column, where=where, key=key)
    messages = _messages(value, "a chat must be a list of messages", where=where, key=key)
    if all(message["role"] != "assistant" for message in messages):
        raise UserError(f"{where}: the chat has no assistant message to learn ({key})")
    return _with_system_prompt(with_media(messages, row, where=where, config=config), config)


def _with_system_prompt(messages: list[dict[str, Any]], config: LLMDataConfig) -> list[dict[str, Any]]:
    if config.system_prompt is None or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]


def _fill(template: str, row: Mapping[str, Any], *, where: str) -> str:
    try:
        return template.format_map(row)
    except KeyError as error:
        raise _missing_column(row, str(error.args[0]), where=where, key="data.prompt_template") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: data.prompt_template does not fit this row: {error}") from None


def _messages(value: Any, expected: str, *, where: str, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: {expected}, not {shown(value)} ({key})")
    value = [_without_nulls(message) if isinstance(message, Mapping) else message for message in value]
    for place, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str | list):
            raise UserError(
                f'{where}: message {place} must be of the form {{"role": "user", "content": "..."}}, '
                f"not {shown(message)} ({key})"
            )
        if message.get("role") not in ROLES:
            raise UserError(f"{where}: message {place}: role must be one of {', '.join(ROLES)} ({key})")
    return [{**message, "content": normalise_content(message["content"], where=where, key=key)} for message in value]


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without keys that are null, for which templates look; a call of tools alone has no content."""
    present = {key: value for key, value in message.items() if value is not None}
    return {"content": "", **present} if present.get("tool_calls") else present


def _tools(row: Mapping[str, Any], *, where: str, config: LLMDataConfig) -> list[dict[str, Any]]:
    """The functions that a chat template lists; none beside plain text."""
    tools = None if config.chat_template == PLAIN_TEXT else row.get(config.tools_column)
    if isinstance(tools, str) and tools.strip():
        with suppress(json.JSONDecodeError):  # text of another kind is refused below
            tools = json.loads(tools)
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(
            f"{where}: tools must be a list of JSON schemas, not {shown(tools)} (data.tools_column); name another "
            'column, or none: tools_column = ""'
        )
    return tools


_SEARCH_S = 1.0
"""Maximum time of the processor for a search by `data.answer_pattern`."""
_LATE = object()


def _answer(row: Mapping[str, Any], *, where: str, config: LLMDataConfig) -> str:
    assert config.answer_column is not None
    value = _column(row, config.answer_column, where=where, key="data.answer_column")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(
            f"{where}: the answer must be a string or a number, not {shown(value)} "
            f"(data.answer_column = {config.answer_column!r})"
        )
    text = str(value)
    if config.answer_pattern is None:
        return text.strip()
    pattern = re.compile(config.answer_pattern)
    match = within(_SEARCH_S, lambda: pattern.search(text), otherwise=cast("re.Match[str]", _LATE))
    if match is _LATE:
        raise UserError(
            f"{where}: data.answer_pattern = {config.answer_pattern!r} has searched {shown(text)} for more than "
            f"{_SEARCH_S:g} s (column {config.answer_column!r}); write one without repetitions inside repetitions"
        )
    if match is None or match[1] is None:
        raise UserError(
            f"{where}: data.answer_pattern = {config.answer_pattern!r} finds nothing in {shown(text)} "
            f"(column {config.answer_column!r})"
        )
    return match[1].strip()


def _pair(row: Mapping[str, Any], *, where: str, config: LLMDataConfig) -> dict[str, Any]:
    """The prompt and both answers. Without a column of prompts it is what the two chats, or texts, have in common."""
    if not config.prompt_column and config.prompt_template is None:
        row, config = _without_common_start(row, where=where, config=config)
    answers = [_response(row, where=where, key=key, config=config) for key in ("chosen_column", "rejected_column")]
    if answers[0] == answers[1]:
        raise UserError(
            f"{where}: the chosen and the rejected answer are equal, {shown(answers[0])} "
            f"(data.chosen_column = {config.chosen_column!r}, rejected_column = {config.rejected_column!r})"
        )
    pair = {"prompt": _prompt(row, where=where, config=config), PAIR: answers}
    return pair if config.margin_column is None else pair | {MARGIN: _margin(row, where=where, config=config)}


def _margin(row: Mapping[str, Any], *, where: str, config: LLMDataConfig) -> float:
    assert config.margin_column is not None
    value = _column(row, config.margin_column, where=where, key="data.margin_column")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(
            f"{where}: a margin must be a number, not {shown(value)} (data.margin_column = {config.margin_column!r})"
        )
    return float(value)


def _without_common_start(
    row: Mapping[str, Any], *, where: str, config: LLMDataConfig
) -> tuple[dict[str, Any], LLMDataConfig]:
    """The row with a prompt of its own, and a config that reads it."""
    assert config.chosen_column is not None and config.rejected_column is not None
    chosen = _column(row, config.chosen_column, where=where, key="data.chosen_column")
    rejected = _column(row, config.rejected_column, where=where, key="data.rejected_column")
    if type(chosen) is not type(rejected) or not isinstance(chosen, list | str):
        raise UserError(
            f"{where}: without a prompt, both answers must be chats that begin with it, or both texts, not "
            f"{shown(chosen)} and {shown(rejected)}; name its column in data.prompt_column"
        )
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    if not common:
        raise UserError(
            f'{where}: the chosen and the rejected answer have no common beginning, which prompt_column = "" takes '
            "for the prompt; name the column of prompts in data.prompt_column"
        )
    answers = {config.chosen_column: chosen[common:], config.rejected_column: rejected[common:]}
    return {**row, **answers, "prompt": chosen[:common]}, config.model_copy(update={"prompt_column": "prompt"})


def _label(row: Mapping[str, Any], *, where: str, column: str) -> bool:
    value = _column(row, column, where=where, key="data.label_column")
    if value not in (True, False):
        raise UserError(
            f"{where}: a label must be true for a good response or false for a bad one, not {shown(value)} "
            f"(data.label_column = {column!r})"
        )
    return bool(value)


def _steps(row: Mapping[str, Any], *, where: str, config: LLMDataConfig) -> dict[str, Any]:
    """The response, and its steps with their labels."""
    assert config.steps_column is not None and config.label_column is not None
    steps = _column(row, config.steps_column, where=where, key="data.steps_column")
    labels = _column(row, config.label_column, where=where, key="data.label_column")
    named = f"data.steps_column = {config.steps_column!r}, label_column = {config.label_column!r}"
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step.strip() for step in steps):
        raise UserError(f"{where}: the steps must be a list of texts that are not empty, not {shown(steps)} ({named})")
    if not isinstance(labels, list) or any(label not in (True, False) for label in labels):
        raise UserError(f"{where}: the labels of steps must be a list of true or false, not {shown(labels)} ({named})")
    if len(labels) != len(steps):
        raise UserError(f"{where}: there are {len(steps)} steps and {len(labels)} labels ({named})")
    texts = [f"{step}{config.step_separator}" for step in steps[:-1]] + steps[-1:]
    if steps_of("".join(texts), config.step_separator) != texts:
        raise UserError(
            f"{where}: a step has the text between steps, {config.step_separator!r}, inside; choose another in "
            f"data.step_separator ({named})"
        )
    return {"response": "".join(texts), STEPS: [[text, bool(label)] for text, label in zip(texts, labels, strict=True)]}


def _response(row: Mapping[str, Any], *, where: str, key: str, config: LLMDataConfig) -> str:
    """The string of the column that `key` names, or the content of its single assistant message."""
    column = getattr(config, key)
    value = _column(row, column, where=where, key=f"data.{key}")
    match value:
        case str():
            text = value
        case [{"role": "assistant", "content": str(content)}]:
            text = content
        case _:
            raise UserError(
                f"{where}: the response must be a string or one assistant message, not {shown(value)} "
                f"(data.{key} = {column!r})"
            )
    if not text.strip():
        raise UserError(f"{where}: the response is empty (data.{key} = {column!r})")
    return text


def _column(row: Mapping[str, Any], column: str, *, where: str, key: str) -> Any:
    if column not in row:
        raise _missing_column(row, column, where=where, key=key)
    return row[column]


def _missing_column(row: Mapping[str, Any], column: str, *, where: str, key: str) -> UserError:
    columns = ", ".join(repr(name) for name in row) or "none"
    return UserError(f"{where}: no column {column!r} ({key}); there are: {columns}{did_you_mean(column, row)}")
