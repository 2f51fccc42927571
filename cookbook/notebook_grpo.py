"""GRPO in a notebook: a reward written in a cell, rows in a list, twenty steps in this process, and the curve.

Open it as a notebook (VS Code, PyCharm, Jupyter with jupytext), or run it: python cookbook/notebook_grpo.py [DIR]
"""

# %% A model of 0.4 million parameters with random weights, and sums as prompts
import random
import sys
from pathlib import Path

from cosmos_rl_core import RolloutGroup, run
from cosmos_rl_llm import write_tiny_model

directory = Path(sys.argv[1] if len(sys.argv) == 2 else "runs/notebook_grpo")
model = write_tiny_model(directory / "base", num_layers=2, initializer_range=0.06)
numbers = random.Random(0)
sums = [(numbers.randrange(100), numbers.randrange(100)) for _ in range(1000)]
rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]


# %% The reward: one finite number for each answer of a prompt
def closeness(group: RolloutGroup) -> list[float]:
    """1 for the right sum, less the further away, 0 for anything that is not a number."""
    wanted = int(group.prompt.row["answer"])
    answers = [rollout.text for rollout in group.rollouts]
    return [max(0.0, 1 - abs(int(text) - wanted) / 100) if text.isdecimal() else 0.0 for text in answers]


# %% Twenty steps. "inline" runs everything in this process, where the reward is defined; `numeric` is only recorded
result = run(
    {
        "run": {"domain": "llm", "placement": "inline", "max_steps": 20, "log_every": 5},
        "model": {"path": str(model)},
        "data": {"chat_template": "none", "answer_column": "answer"},
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 16, "optimizer": {"learning_rate": 3e-3}},
        "rollout": {"group_size": 8, "sampling": {"max_tokens": 4}},
    },
    [f"run.output_dir={directory / 'run'}"],
    rewards=[closeness, ("numeric", 0.0)],
    rows=rows,
    overwrite=True,
)

# %% The curve
import matplotlib.pyplot as plt  # noqa: E402

metric, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
axes.plot([line["step"] for line in result.metrics], [line["reward_mean"] for line in result.metrics])
axes.set(xlabel="step", ylabel="closeness", title="mean reward of 16 prompts x 8 answers", xticks=range(0, 21, 5))
metric.savefig(result.run_dir / "reward.png", dpi=150)
