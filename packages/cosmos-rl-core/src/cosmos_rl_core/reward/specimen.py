"""A group of texts that no engine has generated: of a reward service's clients, or made up before a run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup


def text_specimen(
    row: Mapping[str, Any], *, texts: Sequence[str], origin: str, arrays: Mapping[str, np.ndarray], num_terms: int = 1
) -> RolloutGroup:
    """Return a group of finished responses, of `num_terms` terms each, to one row.

    origin: location of the row. arrays: those of every rollout.
    """
    rollouts = [
        Rollout(
            arrays=arrays,
            rollout_logprobs=np.zeros(num_terms, np.float32),
            versions=np.zeros(num_terms, np.int32),
            loss_mask=np.ones(num_terms, np.bool_),
            text=text,
        )
        for text in texts
    ]
    return RolloutGroup(prompt=Prompt(sample_id=0, row=row, origin=origin), rollouts=tuple(rollouts))
