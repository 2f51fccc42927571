"""TRL's side of preference.py: DPOTrainer on the CPU, one line per finished step. Runs in TRL's own environment."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer


class StepLines(TrainerCallback):
    """Writes the keys of our metrics.jsonl: step, time_s, loss."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._time_s = 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._time_s = time.perf_counter()

    def on_log(self, _args: Any, state: Any, _control: Any, *, logs: dict[str, float], **__: Any) -> None:
        if "loss" not in logs:  # the summary at the end
            return
        line = {"step": state.global_step - 1, "time_s": self._time_s, "loss": logs["loss"]}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def main() -> None:
    from datasets import Dataset

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pairs-per-step", type=int, required=True)
    parser.add_argument("--pairs-per-pass", type=int, required=True)
    parser.add_argument("--precompute", action="store_true", help="the reference before the first step")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="an empty folder")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    config = DPOConfig(
        output_dir=str(given.out),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=given.pairs_per_pass,
        gradient_accumulation_steps=given.pairs_per_step // given.pairs_per_pass,
        precompute_ref_log_probs=given.precompute,
        beta=0.1,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        max_steps=given.steps,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [json.loads(line) for line in given.pairs.read_text().splitlines()]
    lines = StepLines(given.out / "metrics.jsonl")
    DPOTrainer(model=given.model, args=config, train_dataset=Dataset.from_list(rows), callbacks=[lines]).train()


if __name__ == "__main__":
    main()
