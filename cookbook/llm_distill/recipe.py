"""Train a tiny teacher; then a smaller student learns from it in four ways, and by GRPO, from the same start.

python cookbook/llm_distill/recipe.py [--dir runs/llm_distill] [--seed 0] [--short] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from cosmos_rl_core import Request, evaluate, generate, run
from cosmos_rl_llm import write_tiny_model

HERE = Path(__file__).parent
ALONE = ["teacher.task_coef=0", "rollout.group_size=1", "policy.prompts_per_step=128"]
"""A teacher without rewards compares no rollouts of one prompt: each of the 128 has a prompt of its own."""
SLOWER = "policy.optimizer.learning_rate=5e-4"  # gradients of sampled tokens are noisier
WAYS = {
    "reverse KL over the vocabulary": ALONE,
    "reverse KL over the teacher's top 4": [*ALONE, "teacher.top_k=4"],
    "advantage of sampled tokens": [*ALONE, "teacher.loss=advantage", SLOWER],
    "GRPO, exact reward": [SLOWER],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/llm_distill"))
    parser.add_argument("--seed", type=int, default=0, help="of models, data and runs")
    parser.add_argument("--short", action="store_true", help="a fifth of the steps")
    parser.add_argument("overrides", nargs="*", help="section.key=value for the runs on rollouts")
    arguments = parser.parse_args()
    directory, seed, times = arguments.dir, arguments.seed, 10 if arguments.short else 50
    train, test = sums(seed)
    found: dict[str, tuple[float, float]] = {}

    def supervised(name: str, base: Path, steps: int, rows: list[dict[str, str]]) -> Path:
        overrides = [f"run.output_dir={directory / name}", f"model.path={base}", f"run.max_steps={steps * times}"]
        begin = time.monotonic()
        result = run(HERE / "sft.toml", [*overrides, f"run.seed={seed}"], rows=rows, overwrite=True)
        if result.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
            raise SystemExit(130)
        assert result.checkpoint is not None
        model, request = result.checkpoint / "policy", Request(out=directory / name / "eval", overwrite=True)
        scored = evaluate(HERE / "run.toml", [f"model.path={model}"], rows=test, request=request)
        found[name] = scored.metrics["reward"].mean, time.monotonic() - begin
        return model

    big = write_tiny_model(directory / "big", num_layers=3, hidden_size=64, seed=seed)
    small = write_tiny_model(directory / "small", num_layers=2, hidden_size=32, seed=seed)
    teacher = supervised("teacher", big, 8, train)
    start = supervised("start", small, 4, train)
    for name, keys in WAYS.items():
        overrides = [f"run.output_dir={directory / name.split(',')[0].replace(' ', '_')}", f"model.path={start}", *keys]
        overrides += [f"teacher.path={teacher}"] if "GRPO" not in name else []
        overrides += [f"run.max_steps={2 * times}", f"run.seed={seed}", *arguments.overrides]
        begin = time.monotonic()
        result = run(HERE / "run.toml", overrides, rows=train, eval_rows=test, overwrite=True)
        if result.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
            raise SystemExit(130)
        found[name] = result.evaluations[2 * times]["eval/reward_mean"], time.monotonic() - begin
    request = Request(out=directory / "samples", overwrite=True)
    overrides = [f"model.path={teacher}", "eval.temperature=1", f"run.seed={seed}"]
    sampled = generate(HERE / "run.toml", overrides, rows=train, request=request)
    rows = [{"prompt": str(line["prompt"]), "response": str(line["response"])} for line in sampled.lines]
    supervised("SFT on the teacher's samples", start, 2, rows)
    for name, (accuracy, seconds) in found.items():
        print(f"{name:40} {accuracy:6.3f} {seconds:6.0f} s")


def sums(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All sums of two numbers below 100 with their digits reversed, such as 74+83=580; 200 of them are held out."""
    pairs = [
        (f"{a:02}"[::-1] + "+" + f"{b:02}"[::-1] + "=", f"{a + b:03}"[::-1]) for a in range(100) for b in range(100)
    ]
    random.Random(seed).shuffle(pairs)
    rows = [{"prompt": prompt, "answer": answer, "response": answer} for prompt, answer in pairs]
    return rows[200:], rows[:200]


if __name__ == "__main__":
    main()
