"""Decisions in microbatches: an episode that is cut weighs as it would in one piece."""

import numpy as np
import pytest

from cosmos_rl_core.algorithms.aggregation import Aggregation
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.settings.base import ConfigError
from cosmos_rl_core.types import Episode, Prompt, Rollout, RolloutGroup, Share
from cosmos_rl_vla.policy.collate import collate


def episode(decisions, *, executed):
    """Decisions of 3 actions in 2 dimensions, of which `executed` actions happened."""
    valid = np.arange(3 * decisions).reshape(decisions, 3) < executed
    mask = np.repeat(valid.reshape(-1), 2)
    return Rollout(
        arrays={
            "images": np.zeros((decisions, 1, 4, 4, 3), np.uint8),
            "state": np.zeros((decisions, 2), np.float32),
            "tokens": np.ones((decisions, 2), np.int32),
            "token_mask": np.ones((decisions, 2), bool),
            "valid": valid,
        },
        rollout_logprobs=np.zeros(len(mask), np.float32),
        versions=np.zeros(len(mask), np.int32),
        loss_mask=mask,
        advantage=1.0,
        episode=Episode(
            term_steps=np.repeat(np.arange(decisions, dtype=np.int32), 6),
            values=np.zeros(decisions + 1, np.float32),
            rewards=np.zeros(decisions, np.float32),
        ),
    )


@pytest.mark.parametrize("microbatch_terms", [6, 12, 1000])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_episode_weighs_the_same_however_it_is_cut(microbatch_terms, ranks):
    group = RolloutGroup(
        prompt=Prompt(sample_id=0, row={}), rollouts=(episode(1, executed=2), episode(5, executed=14)), prompt_text=""
    )
    aggregation = Aggregation(kind="sequence_mean_of_means", constant=1)
    weights = []
    for index in range(ranks):
        share = Share(index=index, count=ranks)
        batch = collate([group], microbatch_terms=microbatch_terms, share=share)
        assert batch.num_rollouts == 2
        for microbatch in batch.microbatches:
            weights += aggregation.term_weights(microbatch.terms).tolist()
    found = sorted(weight for weight in weights if weight)
    assert found == pytest.approx([1 / 28] * 28 + [1 / 4] * 4)


@pytest.mark.parametrize(
    ("key", "chosen"),
    [("loss", {"name": "gspo"}), ("loss", {"name": "vespo"}), ("sequence_mask_delta", {"name": "grpo"})],
)
def test_what_looks_at_whole_episodes_is_refused(key, chosen):
    algorithm = {**chosen, "sequence_mask_delta": 0.5} if key == "sequence_mask_delta" else chosen
    recipe = {
        "run": {"domain": "vla", "max_steps": 1},
        "model": {"action_dim": 2, "state_dim": 2},
        "data": {"simulator": "reach", "tasks": ["red"]},
        "algorithm": algorithm,
        "reward": {"functions": [{"name": "success"}]},
    }
    with pytest.raises(ConfigError, match=f"algorithm.{key}.*needs whole rollouts"):
        load_config(recipe)
