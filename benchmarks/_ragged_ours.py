"""Our side of both benchmarks: the objects that a recipe builds, and for "overhead" also a loop without the trainer."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast, get_args

import _ragged
import _ragged_pictures
import numpy as np
import torch
from _ragged import Sample, StepFile

from cosmos_rl_core import assemble
from cosmos_rl_core.recipe.load import load_config, load_domain
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup, Share, TrainBatch
from cosmos_rl_llm.media.item import EMPTY_VIEW, MediaItem, View, VisionFamily, view_of

Step = Callable[[], float]


def groups(work: list[Sample], family: VisionFamily | None) -> list[RolloutGroup]:
    """The samples as rollouts of version 0."""
    rollouts = [
        Rollout(
            arrays={
                "prompt_tokens": np.array(s.prompt, np.int32),
                "tokens": np.array(s.answer, np.int32),
                **_view(s, family).arrays,
            },
            rollout_logprobs=np.zeros(len(s.answer), np.float32),
            versions=np.zeros(len(s.answer), np.int32),
            loss_mask=np.ones(len(s.answer), bool),
            advantage=s.advantage,
        )
        for s in work
    ]
    size = _ragged.GROUP_SIZE
    return [
        RolloutGroup(prompt=Prompt(sample_id=i, row={}), rollouts=tuple(rollouts[first : first + size]))
        for i, first in enumerate(range(0, len(rollouts), size))
    ]


def _view(sample: Sample, family: VisionFamily | None) -> View:
    if sample.picture is None:
        return EMPTY_VIEW
    assert family is not None
    item = MediaItem(kind="image", pixels=sample.picture.patches, grid=sample.picture.grid)
    return view_of(np.array(sample.prompt), [item], family)


def build(
    kind: str, model: Path, *, work: list[Sample], microbatch_terms: int
) -> tuple[Trainer, Callable[[], TrainBatch]]:
    """A trainer as a recipe makes it, and the function that collates the step's batch."""
    algorithm = {
        "sft": {"name": "sft", "aggregation": "term_mean"},
        "grpo": {"name": "grpo", "old_logprobs": "policy", "correction": "none"},
    }[kind]
    config = load_config(
        {
            "run": {"domain": "llm", "max_steps": 1},
            "model": {"path": str(model)},
            "data": {"path": "unused.jsonl", "chat_template": "none"},
            "algorithm": algorithm,
            "policy": {
                "microbatch_terms": microbatch_terms,
                "max_grad_norm": _ragged.MAX_GRAD_NORM,
                "optimizer": {"learning_rate": _ragged.LEARNING_RATE},
            },
            **({} if kind == "sft" else {"reward": {"functions": [{"name": "numeric"}]}}),
        }
    )
    domain = load_domain("llm")
    collate = assemble.build_collate(config, domain, Share())
    trainer = assemble.build_trainer(config, domain)
    held = groups(work, cast(VisionFamily | None, trainer.policy.module.vision))
    return trainer, lambda: collate(held)


def framework(trainer: Trainer, collate: Callable[[], TrainBatch]) -> float:
    """A step as the loop takes it, collating included."""
    batch = collate()
    trainer.begin(batch)
    trainer.forward_backward(batch.microbatches)
    return trainer.optim_step().metrics["loss"]


def bare(trainer: Trainer, batch: TrainBatch) -> float:
    """The same forward and backward passes and the same update, by hand, for a supervised loss."""
    policy, total = trainer.policy, 0.0
    for microbatch in batch.microbatches:
        loss = -(policy.forward(microbatch).logprobs * microbatch.terms.loss_mask).sum() / batch.num_terms
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(policy.module.parameters(), _ragged.MAX_GRAD_NORM)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)
    return float(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["sft", "grpo", "overhead"], required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--longest", type=int, required=True)
    parser.add_argument("--pictures", choices=get_args(_ragged.Pictures), required=True)
    parser.add_argument("--microbatch-terms", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    kind = "sft" if given.kind == "overhead" else given.kind
    work = _ragged.samples(longest=given.longest, pictures=given.pictures)
    trainer, collate = build(kind, given.model, work=work, microbatch_terms=given.microbatch_terms)
    seen = _ragged_pictures.count_pictures(trainer.policy.module.causal_lm) if given.pictures != "none" else lambda: 0
    steps: list[Step] = [lambda: framework(trainer, collate)]
    if given.kind == "overhead":
        batch = collate()
        steps.append(lambda: bare(trainer, batch))
    out = StepFile(given.out)
    for number in range(given.steps * len(steps)):
        step = steps[number % len(steps)]
        started = time.perf_counter()
        loss = step()
        out.write(step_s=time.perf_counter() - started, loss=loss, pictures=seen())


if __name__ == "__main__":
    main()
