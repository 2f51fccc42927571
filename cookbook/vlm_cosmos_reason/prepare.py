"""Rows from the folders of Cosmos-Reason1's SFT and RL datasets, as they are published.

    python prepare.py FOLDER OUT.jsonl [--held-out 100 HELD_OUT.jsonl]

    FOLDER/*.json, *.jsonl         {"video": ..., "conversations": [...]}                            SFT
                                   {"video": ..., "qa_pairs": {"question", "index2ans", "answer"}}   RL
    FOLDER/clips/**/*.mp4          unpacked from the archive beside it; rows name them with any folder in front

A row of OUT.jsonl has `prompt` and `video`, the path of a clip in FOLDER; and `response`, or `answer` with its options.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

REQUEST = (
    "Think about the video first, then answer with the letter of one option: "
    "<think>your reasoning</think> <answer>LETTER</answer>"
)
SUFFIXES = (".mp4", ".avi", ".mov")


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dataset's folder. Raises ValueError for a row of another form, or without its clip."""
    clips = {path.name: path for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES}
    for file in sorted([*folder.glob("*.json"), *folder.glob("*.jsonl")]):
        for number, row in enumerate(_read(file)):
            where = f"{file}[{number}]"
            name = Path(str(row.get("video"))).name
            if name not in clips:
                raise ValueError(f"{where}: no clip {name!r} in {folder}; unpack the archive of clips there")
            yield {"video": str(clips[name].relative_to(folder)), **_texts(row, where)}


def _read(file: Path) -> list[Mapping[str, Any]]:
    text = file.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if file.suffix == ".jsonl" else json.loads(text)


def _texts(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The columns of text: of a chat, whose last message is learnt, or of a question with options."""
    match row:
        case {"conversations": [*before, {"role": "assistant", "content": str(answer)}]} if before:
            return {"prompt": before, "response": answer}
        case {"qa_pairs": {"question": str(question), "index2ans": Mapping() as options, "answer": str(letter)}}:
            listed = "\n".join(f"({option}) {text}" for option, text in options.items())
            return {"prompt": f"{question}\n{listed}\n{REQUEST}", "answer": letter}
    raise ValueError(f"{where}: neither a chat that ends with the assistant, nor a question with options")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--held-out", nargs=2, metavar=("NUMBER", "FILE"), help="random rows for [eval.data]")
    arguments = parser.parse_args()
    try:
        rows = list(rows_of(arguments.folder))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.held_out is not None:
        number, file = int(arguments.held_out[0]), Path(arguments.held_out[1])
        random.Random(0).shuffle(rows)
        _write(file, rows[:number])
        rows = rows[number:]
    _write(arguments.out, rows)
    print(f"{len(rows)} rows in {arguments.out}")
    return 0


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
