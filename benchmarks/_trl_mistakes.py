"""TRL's side of first_error.py: a training script with one mistake. Runs in TRL's own environment.

python _trl_mistakes.py MISTAKE --model DIR --rows FILE --out DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer


def brevity(completions: list[Any], **_: Any) -> list[float]:
    return [-float(len(str(each))) for each in completions]


def of_pairs(prompt: str, response: str) -> float:
    """A reward with other arguments than TRL's."""
    return float(len(prompt) < len(response))


def main() -> None:
    from datasets import load_dataset

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mistake")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keys: dict[str, Any] = {
        "output_dir": str(given.out),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 16,
        "max_steps": 2,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if given.mistake == "misspelt key":
        keys["num_generation"] = keys.pop("num_generations")
    config = GRPOConfig(**keys)
    rows = load_dataset("json", data_files=str(given.rows), split="train")
    if given.mistake == "rows without the prompt":
        rows = rows.rename_column("prompt", "question")
    trainer = GRPOTrainer(
        model="./nowhere" if given.mistake == "no such model" else given.model,
        reward_funcs=of_pairs if given.mistake == "reward with other arguments" else brevity,
        args=config,
        train_dataset=rows,
    )
    trainer.train()


if __name__ == "__main__":
    main()
