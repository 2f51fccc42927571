"""Demonstrations of a small task with pixels and words, imitation, then asynchronous PPO; and whether it looks.

python cookbook/vla_quickstart/recipe.py [--dir runs/vla_quickstart]
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from cosmos_rl_core import Evaluated, Request, evaluate, run
from cosmos_rl_vla import Manner, record

HERE = Path(__file__).parent
SHOWN = {
    "none": "success",
    "swap_instruction": "given another task's instruction",
    "grey_images": "images greyed",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/vla_quickstart"))
    parser.add_argument("--sft-steps", type=int, default=500)
    parser.add_argument("--rl-steps", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=400, help="demonstrations of each task")
    parser.add_argument("--inits", type=int, default=40, help="held-out initial states of each task to evaluate from")
    parser.add_argument("--seed", type=int, default=0, help="of the demonstrator's noise, and of both runs")
    arguments = parser.parse_args()
    directory: Path = arguments.dir.resolve()
    shutil.rmtree(directory, ignore_errors=True)

    print("1/4  a scripted expert demonstrates, slowly")
    record(
        directory / "demos",
        simulator="reach",
        tasks=["red", "green"],
        episodes_per_task=arguments.episodes,
        options={"colours": 2, "image_size": 64, "max_steps": 80},
        manner=Manner(speed=0.4, noise=0.2, seed=arguments.seed),
        progress=print,
    )

    print("2/4  a small pi0.5 imitates it")
    overrides = [f"run.max_steps={arguments.sft_steps}", f"run.output_dir={directory / 'sft'}"]
    overrides += [f"data.demos={directory / 'demos'}", f"run.seed={arguments.seed}"]
    imitation = run(HERE / "sft.toml", overrides)
    if imitation.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
        raise SystemExit(130)
    assert imitation.checkpoint is not None

    print("3/4  PPO, with success as its only reward")
    overrides = [f"run.output_dir={directory / 'ppo'}", f"model.path={imitation.checkpoint / 'policy'}"]
    overrides += [f"eval.data.num_inits={arguments.inits}", f"run.seed={arguments.seed}"]
    before = evaluate(HERE / "rl.toml", overrides, request=Request(out=directory / "before", media=False))
    result = run(HERE / "rl.toml", [*overrides, f"run.max_steps={arguments.rl_steps}", 'eval.data.perturb=["none"]'])
    if result.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
        raise SystemExit(130)
    after = evaluate(
        HERE / "rl.toml", overrides, request=Request(checkpoint=str(directory / "ppo"), out=directory / "after")
    )

    print("4/4  what came of it, from initial states that training never saw (95 % intervals)\n")
    print(table(before, after))
    print(f"\nvideos: {directory / 'after' / 'media'}")


def table(before: Evaluated, after: Evaluated) -> str:
    """Success with and without what the policy ought to need."""
    lines = [f"{'':34} {'after imitation':>22} {'after PPO':>22}"]
    for name, title in SHOWN.items():
        shares = [result.metrics[f"reward/success perturb={name}"] for result in (before, after)]
        cells = [f"{share.mean:.2f} ({share.low:.2f} .. {share.high:.2f})" for share in shares]
        lines.append(f"{title:34} {cells[0]:>22} {cells[1]:>22}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
