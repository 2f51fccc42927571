"""Seconds from the command to the first error that names the mistake: five mistakes, here and in TRL's GRPOTrainer.

    .venv/bin/python benchmarks/first_error.py [--quick] [--model DIR]

Both sides train the same model on the same rows, in alternating processes; each process must end with an error whose
text has the expected words. TRL has no checks before a run: its error comes when the training script gets there.
prime-rl has `rl --dry-run`, but it is not on PyPI and needs Python 3.12 and vLLM for GPUs: it is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import _digits
import tomli_w
from _metrics import Figure, report
from _peer_env import TRL, peer_python

HERE = Path(__file__).resolve().parent
WORK = HERE.parent / ".cache" / "first_error"
TRL_ROOT = HERE.parent / ".cache" / "trl"
COMMAND = str(Path(sys.executable).with_name("cosmos-rl"))
REWARDS = """
def brevity(group):
    return [-float(len(rollout.text)) for rollout in group.rollouts]

def of_pairs(prompt, response):
    return float(len(prompt) < len(response))
"""
LIMIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A mistake in a recipe, and words of the error on each side."""

    name: str
    table: str
    """Section of our recipe that has it."""
    key: str
    value: Any
    ours: str
    trl: str


MISTAKES = (
    Mistake(name="misspelt key", table="rollout", key="group_sise", value=4, ours="group_size", trl="num_generation"),
    Mistake(name="no such model", table="model", key="path", value="./nowhere", ours="nowhere", trl="nowhere"),
    Mistake(name="rows without the prompt", table="data", key="path", value="other.jsonl", ours="column", trl="prompt"),
    Mistake(
        name="chats without a chat template",
        table="data",
        key="path",
        value="chats.jsonl",
        ours="has no chat template",
        trl="chat_template",
    ),
    Mistake(
        name="reward with other arguments",
        table="reward",
        key="functions",
        value=[{"name": "own_rewards:of_pairs"}],
        ours="takes (prompt, response)",
        trl="unexpected keyword argument",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round in place of five")
    parser.add_argument("--model", type=Path, help="a model without a chat template; default: 0.8 million parameters")
    given = parser.parse_args()
    model = prepare(given.model)
    trl = peer_python(TRL, TRL_ROOT)
    if isinstance(trl, str):
        print(trl, flush=True)
    taken: dict[tuple[str, str], list[float]] = {}
    for round_ in range(1 if given.quick else 5):
        for mistake in MISTAKES:
            commands = {"ours": ours(mistake, model)}
            if isinstance(trl, Path):
                commands["TRL"] = [str(trl), str(HERE / "_trl_mistakes.py"), *theirs(mistake, model)]
            for side, command in commands.items():
                expected = mistake.ours if side == "ours" else mistake.trl
                seconds = until_error(command, expected=expected, log=WORK / f"{side}_{mistake.name}.log")
                taken.setdefault((mistake.name, side), []).append(seconds)
                print(f"round {round_ + 1}: {mistake.name}: {side} {seconds:.2f} s", flush=True)
    report("first_error", list(metrics(taken)))


def prepare(model: Path | None) -> Path:
    """Write model, rows and rewards; return the model's folder."""
    WORK.mkdir(parents=True, exist_ok=True)
    rows = WORK / "rows.jsonl"
    _digits.write_prompts(rows)
    prompts = [row["prompt"] for row in _digits.read_prompts(rows)]
    kinds = {
        "other.jsonl": [{"question": prompt} for prompt in prompts],
        "chats.jsonl": [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts],
    }
    for name, written in kinds.items():
        (WORK / name).write_text("".join(json.dumps(row) + "\n" for row in written))
    (WORK / "own_rewards.py").write_text(REWARDS)
    if model is None:
        model = WORK / "model"
        if not (model / "config.json").exists():
            _digits.write_model(model)
    return model.resolve()


def ours(mistake: Mistake, model: Path) -> list[str]:
    tables: dict[str, dict[str, Any]] = {
        "run": {"domain": "llm", "max_steps": 2, "output_dir": str(WORK / "run")},
        "model": {"path": str(model)},
        "data": {"path": "rows.jsonl", "chat_template": "none"},
        "policy": {"prompts_per_step": 2, "threads": 1},
        "rollout": {"group_size": 4, "threads": 1, "sampling": {"max_tokens": 16}},
        "reward": {"functions": [{"name": "own_rewards:brevity"}]},
        "logging": {"sinks": ["console", "jsonl"]},
    }
    if mistake.name == "chats without a chat template":
        del tables["data"]["chat_template"]
    tables[mistake.table][mistake.key] = mistake.value
    recipe = WORK / "recipe.toml"
    recipe.write_text(tomli_w.dumps(tables))
    return [COMMAND, "run", str(recipe), "--overwrite"]


def theirs(mistake: Mistake, model: Path) -> list[str]:
    rows = mistake.value if mistake.name.startswith("chats") else "rows.jsonl"
    return [mistake.name, "--model", str(model), "--rows", str(WORK / rows), "--out", str(WORK / "trl")]


def until_error(command: list[str], *, expected: str, log: Path) -> float:
    """Return the seconds until the process has ended. Raises RuntimeError unless it fails with the expected words."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=WORK, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    seconds = time.perf_counter() - began
    printed = done.stdout + done.stderr
    log.write_text(printed)
    if done.returncode == 0 or expected not in printed:
        raise RuntimeError(f"{command[0]} ended with {done.returncode} and without {expected!r}: see {log}")
    return seconds


def metrics(taken: dict[tuple[str, str], list[float]]) -> list[Figure]:
    found = []
    for mistake in MISTAKES:
        own = median(taken[mistake.name, "ours"])
        found.append(Figure(metric=f"{mistake.name}: ours", value=own, unit="s"))
        if (mistake.name, "TRL") in taken:
            peer = median(taken[mistake.name, "TRL"])
            found.append(Figure(metric=f"{mistake.name}: TRL", value=peer, unit="s"))
            found.append(Figure(metric="  ours / TRL", value=own / peer, unit="x", target="<= 1"))
    return found


if __name__ == "__main__":
    main()
