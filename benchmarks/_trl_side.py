"""TRL's side of llm_vs_trl.py: GRPOTrainer on the CPU, one line per finished step. Runs in TRL's own environment."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from _digits import GROUP_SIZE, MAX_TOKENS, read_prompts, trl_digits
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepLines(TrainerCallback):
    """Writes the keys of our metrics.jsonl: step, time_s, reward_mean, terms."""

    def __init__(self, path: Path, *, rollouts: int) -> None:
        self._file = path.open("w")
        self._rollouts = rollouts
        self._time_s = 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._time_s = time.perf_counter()

    def on_log(self, _args: Any, state: Any, _control: Any, *, logs: dict[str, float], **__: Any) -> None:
        if "reward" not in logs:  # the summary at the end
            return
        line = {
            "step": state.global_step - 1,
            "time_s": self._time_s,
            "reward_mean": logs["reward"],
            "terms": logs["completions/mean_length"] * self._rollouts,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def main() -> None:
    from datasets import Dataset

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts-per-step", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True, help="of the first step; falls to 0 on a line")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="an empty folder")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rollouts = given.prompts_per_step * GROUP_SIZE
    config = GRPOConfig(
        output_dir=str(given.out),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=rollouts,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
        learning_rate=given.learning_rate,
        beta=0.0,
        gradient_checkpointing=False,
        max_steps=given.steps,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=given.model,
        reward_funcs=trl_digits,
        args=config,
        train_dataset=Dataset.from_list(read_prompts(given.prompts)),
        callbacks=[StepLines(given.out / "metrics.jsonl", rollouts=rollouts)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
