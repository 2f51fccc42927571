"""Groups of a step: their metrics by hand, and the bound on their age."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from cosmos_rl_core.algorithms.advantages import with_batch_advantages
from cosmos_rl_core.data.mixing import DataTerm
from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.train.batcher import Batcher, group_metrics
from cosmos_rl_core.types import Exchange, FinishReason, Prompt, Rollout, RolloutGroup, TrainBatch


def rollout(reward, versions, *, finish_reason: FinishReason = "stop"):
    return Rollout(
        arrays={},
        rollout_logprobs=np.zeros(len(versions), np.float32),
        versions=np.array(versions, np.int32),
        loss_mask=np.ones(len(versions), np.bool_),
        finish_reason=finish_reason,
        reward=reward,
        reward_breakdown={"exact": reward, "format": 1.0},
    )


def group(*rollouts):
    return RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=rollouts)


GROUPS = (
    group(rollout(1.0, [4, 4, 5]), rollout(0.0, [5], finish_reason="length")),
    group(rollout(0.5, [3, 4]), rollout(0.5, [5, 5])),
)


def of_rewards(function):
    """Advantages that are known once all groups are there."""
    return partial(with_batch_advantages, lambda groups: [function(rewards) for rewards in groups])


def collate(groups):
    return TrainBatch(microbatches=(), num_terms=len(groups), num_rollouts=0, metrics={"padding": 0.25})


def test_the_figures_of_two_groups():
    assert group_metrics(GROUPS, step=5) == {
        "reward_mean": 0.5,
        "reward_std": 0.25,  # 0.5 in the first group, 0 in the second
        "reward/exact": 0.5,
        "reward/format": 1.0,
        "staleness_mean": 0.625,  # 1 1 0 | 0 | 2 1 | 0 0 over 8 terms
        "staleness_max": 2.0,
        "truncated_fraction": 0.25,
        "zero_variance_fraction": 0.5,
        "rollouts": 4.0,
        "terms": 8.0,
    }


def test_the_metrics_of_episodes_in_turns():
    turn = Exchange(text="", model_s=1.0, environment_s=0.5)
    long = (
        replace(turn, metrics={"calls": 1.0, "won": 0.0}),
        replace(turn, problem="no JSON", metrics={"calls": 2.0}, environment_s=2.5),
        replace(turn, branch=1, metrics={"won": 1.0}),
    )
    short = (replace(turn, metrics={"won": 0.0}),)
    masked = replace(rollout(1.0, [4] * 8), exchanges=long, loss_mask=np.arange(8) < 3)
    metrics = group_metrics([group(masked, replace(rollout(0.0, [4, 4]), exchanges=short))], step=5)
    assert {name: metrics[name] for name in metrics if name not in group_metrics(GROUPS, step=5)} == {
        "episode_turns": 2.0,
        "episode_branches": 1.5,
        "episode_model_s": 2.0,
        "episode_environment_s": 2.0,  # 3.5 and 0.5
        "trained_term_fraction": 0.5,  # 3 of 8 and 2 of 2
        "parse_failure_fraction": 0.25,
        "environment/calls": 3.0,  # of the episode that has it
        "environment/won": 0.5,
    }


def test_a_step_has_them_beside_the_counts_of_the_domain():
    step = Batcher(collate, max_staleness=2)(GROUPS, step=5)
    assert step.updates == (0,) and step.metrics == group_metrics(GROUPS, step=5)
    assert [(batch.num_terms, batch.metrics) for batch in step.batches] == [(2, {"padding": 0.25})]


def test_every_epoch_trains_on_all_minibatches():
    step = Batcher(collate, max_staleness=2, minibatches=2, epochs=3)(GROUPS, step=5)
    assert len(step.batches) == 2
    assert [sorted(step.updates[first : first + 2]) for first in (0, 2, 4)] == [[0, 1]] * 3


def test_a_group_older_than_the_bound_is_refused():
    batcher = Batcher(collate, max_staleness=2)
    with pytest.raises(AssertionError, match="step 6 was given terms of version 3"):
        batcher(GROUPS, step=6)


def test_a_data_term_gives_its_rows_of_the_step():
    source = PromptSource([{"n": i} for i in range(5)], origin="rows", shuffle=False)
    drawn = []

    def collate_rows(prompts):
        drawn.append([prompt.row["n"] for prompt in prompts])
        return TrainBatch(
            microbatches=(), num_terms=0, num_rollouts=0, metrics={"rows_dropped": 1.0}, rows_dropped=("torn",)
        )

    data_term = DataTerm(source, rows_per_step=2, collate=collate_rows)
    batcher = Batcher(collate, max_staleness=9, data_term=data_term)
    step = batcher(GROUPS, step=5)
    assert step.data_term is not None and step.rows_dropped == ("torn",)
    assert step.metrics["data_term/rows_dropped"] == 1.0
    batcher(GROUPS, step=7)
    assert drawn == [[0, 1], [4, 0]]


def test_advantages_that_are_seen_together_reach_the_collate():
    collated = []

    def collate_groups(groups):
        collated.extend(rollout.advantage for group in groups for rollout in group.rollouts)
        return collate(groups)

    batcher = Batcher(collate_groups, max_staleness=9, advantages=of_rewards(lambda rewards: rewards + 3))
    batcher(GROUPS, step=5)
    assert collated == [rollout.reward + 3 for group in GROUPS for rollout in group.rollouts]


def test_the_groups_are_shown_with_the_advantages_that_are_trained_on():
    shown, collated = [], []

    def collate_and_keep(groups):
        collated.extend(groups)
        return collate(groups)

    batcher = Batcher(
        collate_and_keep,
        max_staleness=2,
        advantages=of_rewards(lambda rewards: rewards - 0.25),
        on_groups=lambda groups, step: shown.append((step, groups)),
    )
    batcher(GROUPS, step=5)
    ((step, groups),) = shown
    assert step == 5 and list(groups) == collated
    assert [r.advantage for group in groups for r in group.rollouts] == [0.75, -0.25, 0.25, 0.25]
