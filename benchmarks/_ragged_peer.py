"""The peers in TRL's environment: transformers' Trainer for SFT, GRPOTrainer's own loss for GRPO."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, cast, get_args

import _ragged
import _ragged_pictures
import numpy as np
import torch
from _ragged import Sample, StepFile
from _ragged_pictures import SIGNS, Picture
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)

ROWS = 8
"""Sequences in one forward pass, padded to the longest of them."""


def sft(model: Path, work: list[Sample], steps: int, out: StepFile, scratch: Path) -> None:
    """Train with transformers' Trainer; a step is all samples, in accumulated passes of 8 padded rows."""
    rows = [
        {"input_ids": s.prompt + s.answer, "labels": [-100] * len(s.prompt) + s.answer, "picture": s.picture}
        for s in work
    ] * steps
    network = _load(model, work)
    seen = _ragged_pictures.count_pictures(network) if work[0].picture else lambda: 0
    arguments = TrainingArguments(
        output_dir=str(scratch),
        use_cpu=True,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=len(work) // ROWS,
        max_steps=steps,
        learning_rate=_ragged.LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=_ragged.MAX_GRAD_NORM,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    from transformers import TrainerCallback

    class Lines(TrainerCallback):
        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.step_s = time.perf_counter() - self.started

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                out.write(step_s=self.step_s, loss=logs["loss"], pictures=seen())

    padded = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(model))

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        texts = [{name: value for name, value in row.items() if name != "picture"} for row in rows]
        batch = padded(texts)
        return {**batch, **_shown([row["picture"] for row in rows], batch["input_ids"])}

    trainer = Trainer(
        model=network, args=arguments, train_dataset=cast(Any, rows), data_collator=collate, callbacks=[Lines()]
    )
    trainer.train()


def _load(model: Path, work: list[Sample]) -> Any:
    kind = AutoModelForImageTextToText if work[0].picture else AutoModelForCausalLM
    return kind.from_pretrained(model, dtype=torch.float32)


def _shown(pictures: list[Picture | None], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The keywords of a model's forward pass that the processors of Qwen make of pictures; none without pictures."""
    shown = [picture for picture in pictures if picture is not None]
    if not shown:
        return {}
    image = _ragged.VOCABULARY - len(SIGNS) + SIGNS.index("<|image_pad|>")
    return {
        "pixel_values": torch.from_numpy(np.concatenate([picture.patches for picture in shown])),
        "image_grid_thw": torch.tensor([picture.grid for picture in shown]),
        "mm_token_type_ids": (tokens == image).int(),
    }


def grpo(model: Path, work: list[Sample], steps: int, out: StepFile, scratch: Path) -> None:
    """Train with GRPOTrainer.compute_loss on batches as it pads them: prompts left, answers right, a step alike."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(scratch),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=len(work) // ROWS,
        num_generations=_ragged.GROUP_SIZE,
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        max_steps=steps,
        report_to=[],
    )
    rows = Dataset.from_list([{"prompt": "1"}])  # never read
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=lambda **_: [0.0],
        args=config,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.current_gradient_accumulation_steps = len(work) // ROWS
    network = trainer.model
    network.train()
    seen = _ragged_pictures.count_pictures(network) if work[0].picture else lambda: 0
    optimizer = torch.optim.AdamW(network.parameters(), lr=_ragged.LEARNING_RATE, weight_decay=0.0, fused=True)
    batch = _padded(work)
    for _ in range(steps):
        started = time.perf_counter()
        total = 0.0
        for first in range(0, len(work), ROWS):
            rows_of = {name: value[first : first + ROWS] for name, value in batch.items()}
            tokens = torch.cat([rows_of["prompt_ids"], rows_of["completion_ids"]], dim=1)
            shown = _shown([s.picture for s in work[first : first + ROWS]], tokens)
            shown |= {"num_images": [1] * ROWS} if shown else {}
            loss = trainer.compute_loss(network, {**rows_of, **shown})
            loss.backward()
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), _ragged.MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        out.write(step_s=time.perf_counter() - started, loss=total, pictures=seen())


def _padded(work: list[Sample]) -> dict[str, torch.Tensor]:
    prompt, answer = (max(len(getattr(s, part)) for s in work) for part in ("prompt", "answer"))
    rows = {"prompt_ids": [], "prompt_mask": [], "completion_ids": [], "completion_mask": []}
    for s in work:
        left, right = prompt - len(s.prompt), answer - len(s.answer)
        rows["prompt_ids"].append([0] * left + s.prompt)
        rows["prompt_mask"].append([0] * left + [1] * len(s.prompt))
        rows["completion_ids"].append(s.answer + [0] * right)
        rows["completion_mask"].append([1] * len(s.answer) + [0] * right)
    batch = {name: torch.tensor(values) for name, values in rows.items()}
    return batch | {"advantages": torch.tensor([s.advantage for s in work])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["sft", "grpo"], required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--longest", type=int, required=True)
    parser.add_argument("--pictures", choices=get_args(_ragged.Pictures), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    work = _ragged.samples(longest=given.longest, pictures=given.pictures)
    run = {"sft": sft, "grpo": grpo}[given.kind]
    run(given.model, work, given.steps, StepFile(given.out), given.out.parent / "scratch")


if __name__ == "__main__":
    main()
