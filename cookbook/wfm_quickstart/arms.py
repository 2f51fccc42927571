"""The reward runs of the base model, and the metrics read from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

DATA_TERM = (
    "data_regularization.coef=0.05",
    "data_regularization.rows_per_step=48",
    "data_regularization.data.path=CLIPS",
    "data_regularization.data.size.frames=8",
    "data_regularization.data.size.height=16",
    "data_regularization.data.size.width=16",
    "data_regularization.data.noise.mean=0.5",
    "data_regularization.data.start=first",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One run."""

    name: str
    title: str
    reward: str
    weight: float = 1.0
    overrides: tuple[str, ...] = ()


ARMS = (
    Arm(name="flow_grpo", title="FlowGRPO, rewarded for brightness and held to nothing", reward="brightness"),
    Arm(
        name="ddrl",
        title="DDRL: the same, held to real clips",
        reward="brightness",
        overrides=("algorithm.name=ddrl", "algorithm.advantage=group_std", *DATA_TERM),
    ),
    Arm(
        name="sft_control",
        title="control: the same real clips, and no reward",
        reward="brightness",
        weight=0.0,
        overrides=("algorithm.name=ddrl", "algorithm.advantage=group_std", *DATA_TERM),
    ),
    Arm(
        name="nft",
        title="DiffusionNFT, rewarded for speed along the caption",
        reward="speed",
        overrides=(
            "algorithm.name=nft",
            "algorithm.advantage=group_std",
            "algorithm.kl_coef=0.5",
            "rollout.sampling.rule=ode",
            "rollout.sampling.window=all",
            "rollout.sampling.steps=[]",
            "rollout.sampling.elsewhere=ode",
            "rollout.sampling.old_decay=slow",
            "rollout.sampling.times_per_rollout=3",
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """An arm before and after, on held-out prompts."""

    arm: Arm
    reward: tuple[float, float]
    judge: tuple[float, float]
    held_out_loss: tuple[float, float]
    minutes: float


def result_of(arm: Arm, directory: Path) -> Result:
    """Read the first and the last evaluation of an arm's run."""
    run = directory / arm.name
    evaluations = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    steps = (run / "metrics.jsonl").read_text().splitlines()

    def both(name: str) -> tuple[float, float]:
        """A metric of the first and of the last evaluation that has it."""
        found = [evaluation[name] for evaluation in evaluations if name in evaluation]
        return found[0], found[-1]

    return Result(
        arm=arm,
        reward=both(f"eval/reward/{arm.reward}"),
        judge=both("eval/reward/PromptOk"),
        held_out_loss=both("eval/loss"),
        minutes=json.loads(steps[-1])["time_s"] / 60,
    )


def base_of(results: list[Result]) -> dict[str, float]:
    """Return the base model's metrics, by reward."""
    return {result.arm.reward: result.reward[0] for result in results}
