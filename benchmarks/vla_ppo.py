"""PPO beside Stable-Baselines3 with the same hyperparameters, seed by seed in turn.

.venv/bin/python benchmarks/vla_ppo.py [--quick] [--seeds N]

Both train a Gaussian policy of two hidden layers of 64 on Pendulum, on-policy, from as many steps of the simulator.
Ours runs as a recipe does: controller, policy and rollout processes, simulators in separate processes. The
comparison is of the mean return of the last fifth of the episodes, whose actions are sampled with noise on both sides.

Only two things differ: ours trains on episodes when they end, where Stable-Baselines3 cuts its batch out of them; and
ours normalises advantages over the batch, Stable-Baselines3 over each minibatch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from _metrics import Figure, report
from _peer_env import SB3, peer_python

from cosmos_rl_core import run

SB3_ROOT = Path(__file__).resolve().parents[1] / ".cache" / "sb3"
TASK = "Pendulum-v1"
EPISODE_STEPS = 200
EPISODES_A_STEP = 20
MINIBATCHES, EPOCHS = 62, 10
LEARNING_RATE, GAMMA, GAE_LAMBDA, CLIP, MAX_GRAD_NORM = 1e-3, 0.9, 0.95, 0.2, 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps: it shows that both learn at all")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each side; --quick makes one")
    arguments = parser.parse_args()
    quick = arguments.quick
    seeds, steps = (1, 3) if quick else (arguments.seeds, 25)
    python = peer_python(SB3, SB3_ROOT)
    ours: list[float] = []
    theirs: list[float] = []
    for seed in range(seeds):
        ours.append(level(our_returns(seed, steps=steps)))
        if isinstance(python, Path):
            theirs.append(level(their_returns(python, seed, steps=steps * EPISODES_A_STEP * EPISODE_STEPS)))
    note = f"{TASK}, {seeds} seeds, {steps * EPISODES_A_STEP} episodes each; mean return of the last fifth"
    metrics = [Figure(metric="ours", value=fmean(ours), unit="return", note=note)]
    if theirs:
        error = math.hypot(standard_error(ours), standard_error(theirs))
        metrics += [
            Figure(metric="Stable-Baselines3", value=fmean(theirs), unit="return"),
            Figure(
                metric="ours - theirs, in standard errors",
                value=(fmean(ours) - fmean(theirs)) / error if error else math.nan,
                unit="",
                target="" if quick else ">= -2",
                note=f"ours {rounded(ours)}, theirs {rounded(theirs)}",
            ),
        ]
    else:
        metrics.append(Figure(metric="Stable-Baselines3", value=math.nan, unit="return", note=str(python)))
    report("vla_ppo", metrics)


def level(returns: Sequence[float]) -> float:
    """Mean of the last fifth."""
    return fmean(returns[-max(1, len(returns) // 5) :])


def standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def rounded(values: Sequence[float]) -> list[int]:
    return [round(value) for value in values]


RECIPE = f"""
[run]
domain = "vla"
log_every = 1000
[model]
family = "mlp"
state_dim = 3
action_dim = 1
[data]
simulator = "gymnasium"
options = {{ id = "{TASK}" }}
tasks = ["{TASK}"]
num_inits = 100000
[algorithm]
name = "ppo"
gamma = {GAMMA}
gae_lambda = {GAE_LAMBDA}
clip_low = {CLIP}
clip_high = {CLIP}
[policy]
prompts_per_step = {EPISODES_A_STEP}
epochs = {EPOCHS}
minibatches = {MINIBATCHES}
max_grad_norm = {MAX_GRAD_NORM}
threads = 1
[policy.optimizer]
name = "adam"
learning_rate = {LEARNING_RATE}
eps = 1e-5
[rollout]
group_size = 1
threads = 1
[rollout.sampling]
max_steps = {EPISODE_STEPS}
[rollout.options]
processes = 2
slots = 10
[sync]
max_staleness = 0
[logging]
sinks = ["jsonl"]
rollouts_every = 1
media_every = 0
[[reward.functions]]
name = "simulator"
"""
WITHOUT = "algorithm.value_clip=1e9", "algorithm.value_huber_delta=1e9"
"""Stable-Baselines3 does neither by default."""


def our_returns(seed: int, *, steps: int) -> list[float]:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        recipe, directory = Path(folder) / "run.toml", Path(folder) / "run"
        recipe.write_text(RECIPE)
        keys = [f"run.seed={seed}", f"model.seed={seed}", f"run.max_steps={steps}", f"run.output_dir={directory}"]
        run(recipe, [*keys, *WITHOUT])
        lines = [json.loads(line) for file in sorted((directory / "rollouts").iterdir()) for line in file.open()]
    returns = [line["reward"] for line in lines]
    print(f"ours, seed {seed}: {level(returns):.0f} in {time.perf_counter() - started:.0f} s", flush=True)
    return returns


def their_returns(python: Path, seed: int, *, steps: int) -> list[float]:
    started = time.perf_counter()
    keys = {
        "n_envs": EPISODES_A_STEP,
        "n_steps": EPISODE_STEPS,
        "batch_size": EPISODES_A_STEP * EPISODE_STEPS // MINIBATCHES,
        "n_epochs": EPOCHS,
        "learning_rate": LEARNING_RATE,
        "gamma": GAMMA,
        "gae_lambda": GAE_LAMBDA,
        "clip_range": CLIP,
        "max_grad_norm": MAX_GRAD_NORM,
        "ent_coef": 0.0,
        "vf_coef": 0.5,
    }
    given = json.dumps({"task": TASK, "steps": steps, "seed": seed, "keys": keys})
    side = Path(__file__).with_name("_vla_sb3.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, side], input=given, capture_output=True, text=True, check=True, env=environment)
    returns = json.loads(done.stdout)
    print(f"Stable-Baselines3, seed {seed}: {level(returns):.0f} in {time.perf_counter() - started:.0f} s", flush=True)
    return returns


if __name__ == "__main__":
    main()
