"""Write pictures, chats about them and a tiny Qwen3-VL; then run supervised fine-tuning with a held-out loss.

python cookbook/vlm_sft_chat/recipe.py [--dir runs/vlm_sft_chat] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from cosmos_rl_core import run

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "vlm_quickstart"))  # its pictures and its model

from boards import COLOURS, PLACES, board, write_model  # noqa: E402


def chat(draw: random.Random, pictures: Path, name: str) -> list[dict[str, Any]]:
    """Return a chat about one or two pictures, which it writes: two questions after each, about the newest one."""
    messages: list[dict[str, Any]] = []
    for number in range(draw.randint(1, 2)):
        colours = draw.sample(list(COLOURS), len(PLACES))
        file = pictures / f"{name}_{number}.png"
        board(colours, draw).save(file)
        for turn, place in enumerate(draw.sample(range(len(PLACES)), 2)):
            question = {"type": "text", "text": f"colour of {PLACES[place]}"}
            seen = [{"type": "image", "image": file.name}] if turn == 0 else []
            messages.append({"role": "user", "content": [*seen, question]})
            messages.append({"role": "assistant", "content": colours[place]})
    return messages


def write_chats(directory: Path, part: str, *, number: int, seed: int) -> Path:
    """Write pictures and a file with `number` chats; return the file."""
    draw, pictures = random.Random(seed), directory / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    rows = [{"messages": chat(draw, pictures, f"{part}_{i}")} for i in range(number)]
    path = directory / f"{part}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/vlm_sft_chat"))
    parser.add_argument("--chats", type=int, default=3000, help="chats to train on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_args()
    directory: Path = arguments.dir.resolve()
    data = directory / "data"
    train = write_chats(data, "train", number=arguments.chats, seed=arguments.seed)
    test = write_chats(data, "test", number=200, seed=arguments.seed + 1)
    base = write_model(directory / "base", seed=arguments.seed)
    overrides = [f"run.output_dir={directory / 'sft'}", f"model.path={base}", f"run.seed={arguments.seed}"]
    overrides += [f"data.path={train}", f"data.media.root={data / 'pictures'}"]
    overrides += [f"eval.data.path={test}", f"eval.data.media.root={data / 'pictures'}"]
    run(HERE / "run.toml", [*overrides, *arguments.overrides], overwrite=True)


if __name__ == "__main__":
    main()
