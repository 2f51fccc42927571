"""Pictures of coloured squares and questions about them, a supervised warm-up, GRPO; and whether the model looks.

python cookbook/vlm_quickstart/recipe.py [--dir runs/vlm_quickstart]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from boards import ASKED, BLIND, OTHER, chance, write_boards, write_model

from cosmos_rl_core import Evaluated, Request, evaluate, run

HERE = Path(__file__).parent
ENOUGH = 0.6
"""Held-out loss of a warm-up that is right about every second time. It would go on to solve the task alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/vlm_quickstart"))
    parser.add_argument("--sft-steps", type=int, default=120, help="at most")
    parser.add_argument("--rl-steps", type=int, default=80)
    parser.add_argument("--boards", type=int, default=6000, help="pictures to train on")
    parser.add_argument("--held-out", type=int, default=200, help="pictures to evaluate with, for each way of asking")
    parser.add_argument("--seed", type=int, default=0, help="of pictures, weights and runs")
    arguments = parser.parse_args()
    directory: Path = arguments.dir.resolve()
    shutil.rmtree(directory, ignore_errors=True)

    print("1/4  pictures, questions, and a tiny Qwen3-VL with random weights")
    data = directory / "data"
    train, validation, test = write_boards(
        data, number=arguments.boards, held_out=arguments.held_out, seed=arguments.seed
    )
    base = write_model(directory / "base", seed=arguments.seed)
    common = [f"data.path={train}", f"data.media.root={data / 'pictures'}"]
    common += [f"eval.data.media.root={data / 'pictures'}"]

    print("2/4  a short supervised warm-up, so that some answers are right")
    overrides = [*common, f"run.output_dir={directory / 'sft'}", f"model.path={base}", f"eval.data.path={validation}"]
    overrides += [f"run.seed={arguments.seed}"]
    result = run(HERE / "sft.toml", [*overrides, f"run.max_steps={arguments.sft_steps}"])
    if result.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
        raise SystemExit(130)
    warm = first_below(directory / "sft", loss=ENOUGH)
    print(f"on from {warm.parent.name}")

    print("3/4  GRPO, with a correct answer as its only reward")
    overrides = [*common, f"run.output_dir={directory / 'grpo'}", f"model.path={warm}", f"eval.data.path={test}"]
    overrides += [f"run.seed={arguments.seed}"]
    before = evaluate(HERE / "rl.toml", overrides, request=Request(out=directory / "before"))
    result = run(HERE / "rl.toml", [*overrides, f"run.max_steps={arguments.rl_steps}"])
    if result.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
        raise SystemExit(130)
    after = evaluate(
        HERE / "rl.toml", overrides, request=Request(checkpoint=str(directory / "grpo"), out=directory / "after")
    )

    print("4/4  what came of it, with pictures that training never saw (95 % intervals)\n")
    print(table(before, after))
    print(f"\nchance, always the most frequent answer: {chance(test):.2f}")


def first_below(run_dir: Path, *, loss: float) -> Path:
    """Return the model of the first checkpoint with a held-out loss below `loss`, or else of the last."""
    lines = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text(encoding="utf-8").splitlines()]
    saved = [line for line in lines if line["policy_version"] > 0]
    chosen = next((line for line in saved if line["eval/loss"] < loss), saved[-1])
    return run_dir / "checkpoints" / f"step_{chosen['policy_version']}" / "policy"


def table(before: Evaluated, after: Evaluated) -> str:
    """Correct answers with and without the inputs that the model ought to need."""
    lines = [f"{'asked':24} {'after the warm-up':>22} {'after GRPO':>22}"]
    for asked in (ASKED, BLIND, OTHER):
        shares = [result.metrics[f"reward/exact asked={asked}"] for result in (before, after)]
        cells = [f"{share.mean:.2f} ({share.low:.2f} .. {share.high:.2f})" for share in shares]
        lines.append(f"{asked:24} {cells[0]:>22} {cells[1]:>22}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
