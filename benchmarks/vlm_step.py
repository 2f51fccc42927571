"""One training step of a vision-language model on ragged pictures and texts, beside transformers' Trainer and TRL.

    .venv/bin/python benchmarks/vlm_step.py [--quick]

The workload of train_step.py with a picture of 4 to 100 tokens in each prompt, and a Qwen3-VL: in SFT each sample has
its own picture, in GRPO the eight samples of a group have theirs in common. Pictures are patches already on both sides,
so neither needs torchvision. SFT is transformers' Trainer, padded to the longest of 8 rows and with the pictures of the
rows end to end, as TRL's collator lays them out (the collator itself calls a processor that needs torchvision). GRPO is
TRL's own loss with its keywords of pictures. TRL passes a group's picture once for each sample.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import _ragged
import _ragged_pictures
from _metrics import Figure, report
from _peer_env import TRL, peer_python
from _ragged_sides import TRL_ROOT, Comparison

WORK = Path(__file__).resolve().parents[1] / ".cache" / "vlm_step"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    quick = parser.parse_args().quick
    WORK.mkdir(parents=True, exist_ok=True)
    model = WORK / "model"
    if not (model / "preprocessor_config.json").is_file():
        _ragged_pictures.write_model(model, vocabulary=_ragged.VOCABULARY)
    longest, steps, rounds = (256, 3, 1) if quick else (512, 6, 3)
    sides = (
        Comparison(
            kind="sft",
            peer="transformers Trainer",
            pictures="sample",
            model=model,
            longest=longest,
            steps=steps,
            rounds=rounds,
            target=1.5,
        ),
        Comparison(
            kind="grpo",
            peer="TRL",
            pictures="group",
            rows=_ragged.GROUP_SIZE * _ragged.NUM_GROUPS,  # a group that two microbatches share has its picture in both
            model=model,
            longest=longest,
            steps=steps,
            rounds=rounds,
            target=1.5,
        ),
    )
    metrics: list[Figure] = []
    trl = peer_python(TRL, TRL_ROOT)
    for each in sides:
        if isinstance(trl, str):
            what = f"{each.kind.upper()}: tokens/s, ours / {each.peer}"
            metrics.append(Figure(metric=what, value=math.nan, unit="x", target=f">= {each.target}", note=trl))
        else:
            metrics += each.figures(str(trl))
    report("vlm_step", metrics)
    return 0


if __name__ == "__main__":
    sys.exit(main())
