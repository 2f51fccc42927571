"""Create a tiny model and chats that keep a running sum; then run supervised fine-tuning with a held-out loss.

python cookbook/llm_sft_chat/recipe.py [--dir runs/llm_sft_chat] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from cosmos_rl_core import run
from cosmos_rl_llm import write_tiny_model

HERE = Path(__file__).parent


def chat(draw: random.Random) -> list[dict[str, str]]:
    """Return one to eight turns: "7", "+5" -> "12", "+30" -> "42"."""
    total = draw.randrange(10)
    messages = [{"role": "user", "content": f"{total}"}, {"role": "assistant", "content": f"{total}"}]
    for _ in range(draw.randrange(8)):
        number = draw.randrange(10)
        total += number
        messages.append({"role": "user", "content": f"+{number}"})
        messages.append({"role": "assistant", "content": f"{total}"})
    return messages


def write_chats(path: Path, *, number: int, seed: int) -> Path:
    draw = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"messages": chat(draw)}) + "\n" for _ in range(number)), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/llm_sft_chat"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_args()
    directory: Path = arguments.dir
    train = write_chats(directory / "data/train.jsonl", number=4000, seed=0)
    test = write_chats(directory / "data/test.jsonl", number=200, seed=1)
    base = write_tiny_model(directory / "base")
    overrides = [f"run.output_dir={directory / 'sft'}", f"model.path={base}", f"data.path={train}"]
    overrides += [f"run.seed={arguments.seed}"]
    run(HERE / "run.toml", [*overrides, f"eval.data.path={test}", *arguments.overrides], overwrite=True)


if __name__ == "__main__":
    main()
