"""Reward of a multiple-choice question: 1 if <answer> names the right option, else 0."""

from __future__ import annotations

import re

from cosmos_rl_core import RolloutGroup

ANSWER = re.compile(r"<answer>\s*\(?([A-Za-z0-9]+)\)?[^<]*</answer>")


def choice(group: RolloutGroup) -> list[float]:
    """Compare the option of the last <answer>, "B" or "(B) the red one", with the row's `answer`."""
    wanted = str(group.prompt.row["answer"]).strip().casefold()
    chosen = [ANSWER.findall(rollout.text) for rollout in group.rollouts]
    return [float(bool(found) and found[-1].casefold() == wanted) for found in chosen]
