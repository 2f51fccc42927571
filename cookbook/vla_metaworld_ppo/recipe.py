"""Demonstrations of a robot arm, imitation by a small pi0.5, then asynchronous PPO; and a check of its inputs.

python cookbook/vla_metaworld_ppo/recipe.py [--dir runs/vla_metaworld_ppo] [--seeds 1]
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from cosmos_rl_core import Evaluated, Request, evaluate, run
from cosmos_rl_vla import Manner, record

HERE = Path(__file__).parent
TASKS = ["faucet-open", "faucet-close", "button-press-topdown", "door-unlock"]
SLOWLY = (0.5, 0.5, 0.5, 1.0)
"""Times the expert's action: an imitator of half the speed seldom makes it in 100 steps."""
CONDITIONS = {
    "none": "success",
    "swap_instruction": "given another task's instruction",
    "grey_images": "images greyed",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/vla_metaworld_ppo"))
    parser.add_argument("--sft-steps", type=int, default=800)
    parser.add_argument("--rl-steps", type=int, default=16)
    parser.add_argument("--demos", type=int, default=15, help="demonstrations of each task")
    parser.add_argument("--looks", type=int, default=1000, help="initial images of each task, without an action")
    parser.add_argument("--inits", type=int, default=24, help="held-out initial states of each task to evaluate from")
    parser.add_argument("--tasks", nargs="+", default=TASKS, help="of MetaWorld; two or more")
    parser.add_argument("--seed", type=int, default=0, help="of the imitation, and of the first run of PPO")
    parser.add_argument("--seeds", type=int, default=1, help="runs of PPO from the same imitation")
    arguments = parser.parse_args()
    directory: Path = arguments.dir.resolve()
    shutil.rmtree(directory, ignore_errors=True)

    print("1/4  a scripted expert demonstrates at half its speed; many initial images")
    record(
        directory / "demos",
        simulator="metaworld",
        tasks=arguments.tasks,
        episodes_per_task=arguments.demos,
        looks_per_task=arguments.looks,
        options={"image_size": 64, "max_steps": 500},
        manner=Manner(speed=SLOWLY),
        progress=print,
    )

    print("2/4  a small pi0.5 imitates it, and learns to say where things are")
    keys = [f"run.max_steps={arguments.sft_steps}", f"run.output_dir={directory / 'sft'}", f"run.seed={arguments.seed}"]
    imitation = run(HERE / "sft.toml", [*keys, f"data.demos={directory / 'demos'}"])
    if imitation.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
        raise SystemExit(130)
    assert imitation.checkpoint is not None
    keys = [f"model.path={imitation.checkpoint / 'policy'}", f"eval.data.num_inits={arguments.inits}"]
    keys += [f"{section}.tasks={json.dumps(arguments.tasks)}" for section in ("data", "eval.data")]
    before = evaluate(
        HERE / "rl.toml", [*keys, f"run.output_dir={directory}"], request=Request(out=directory / "before")
    )

    after = []
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        print(f"3/4  PPO with success as its only reward, seed {seed}")
        out = directory / f"ppo_{seed}"
        own = [*keys, f"run.output_dir={out}", f"run.seed={seed}"]
        trained = ["eval.data.num_inits=8", 'eval.data.perturb=["none"]', f"run.max_steps={arguments.rl_steps}"]
        result = run(HERE / "rl.toml", [*own, *trained])
        if result.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
            raise SystemExit(130)
        after.append(evaluate(HERE / "rl.toml", own, request=Request(checkpoint=str(out), out=out / "after")))

    print("4/4  what came of it, from initial states that training never saw (95 % intervals)\n")
    print(table(before, after, first_seed=arguments.seed))
    print(f"\nvideos: {directory / 'before' / 'media'} and {directory / f'ppo_{arguments.seed}' / 'after' / 'media'}")


def table(before: Evaluated, after: Sequence[Evaluated], *, first_seed: int) -> str:
    """Success with and without what the policy ought to need, and of each task."""
    rows = {title: f"perturb={name}" for name, title in CONDITIONS.items()}
    columns = {"after imitation": before} | {
        f"after PPO, seed {seed}": result for seed, result in enumerate(after, start=first_seed)
    }
    lines = [f"{'':34}" + "".join(f"{title:>26}" for title in columns)]
    for title, name in rows.items():
        shares = [result.metrics[f"reward/success {name}"] for result in columns.values()]
        cells = (f"{share.mean:.2f} ({share.low:.2f} .. {share.high:.2f})" for share in shares)
        lines.append(f"{title:34}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
