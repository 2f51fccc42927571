"""The peer's side of vla_ppo.py, in a separate environment: PPO of Stable-Baselines3 on a task of gymnasium.

Reads {"task", "steps", "seed", "keys"} as JSON on standard input, writes the returns of the episodes, in order.
"""

from __future__ import annotations

import json
import sys

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env


class Returns(BaseCallback):
    """Records the return of each episode when it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.returns: list[float] = []

    def _on_step(self) -> bool:
        self.returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return True


def main() -> None:
    given = json.load(sys.stdin)
    torch.set_num_threads(1)
    environments = make_vec_env(given["task"], n_envs=given["keys"].pop("n_envs"), seed=given["seed"])
    returns = Returns()
    PPO("MlpPolicy", environments, seed=given["seed"], **given["keys"]).learn(given["steps"], callback=returns)
    json.dump([float(value) for value in returns.returns], sys.stdout)


if __name__ == "__main__":
    main()
