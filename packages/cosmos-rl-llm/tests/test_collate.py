from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.algorithms.rules import mask_prefixes
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Episode, FinishReason, PolicyOutputs, Prompt, Rollout, RolloutGroup, Share
from cosmos_rl_llm.data.collate import collate
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.media.item import MediaItem, View


def make_rollout(
    prompt: list[int], tokens: list[int], *, advantage: float = 1.0, mask=None, finish: FinishReason = "stop"
):
    return Rollout(
        arrays={"prompt_tokens": np.array(prompt, np.int32), "tokens": np.array(tokens, np.int32)},
        rollout_logprobs=-0.125 * np.arange(len(tokens), dtype=np.float32),
        versions=np.zeros(len(tokens), np.int32),
        loss_mask=np.ones(len(tokens), bool) if mask is None else np.array(mask, bool),
        advantage=advantage,
        finish_reason=finish,
    )


def make_group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=rollouts)


def test_two_rollouts_are_laid_end_to_end():
    group = make_group(make_rollout([1, 2], [3, 4, 5], advantage=2.0), make_rollout([6], [7, 8], advantage=-1.0))
    (microbatch,) = collate([group], microbatch_terms=100, share=Share()).microbatches
    inputs, terms = microbatch.inputs, microbatch.terms
    assert inputs["tokens"].tolist() == [1, 2, 3, 4, 6, 7]  # nothing is predicted from 5 and 8
    assert inputs["positions"].tolist() == [0, 1, 2, 3, 0, 1]
    assert inputs["sequence_index"].tolist() == [0, 0, 0, 0, 1, 1]
    assert inputs["logit_index"].tolist() == [1, 2, 3, 4, 5]
    assert inputs["labels"].tolist() == [3, 4, 5, 7, 8]
    assert {tensor.dtype for tensor in inputs.values()} == {torch.int64}
    assert terms.advantages.tolist() == [2, 2, 2, -1, -1]
    assert terms.rollout_logprobs.tolist() == [0, -0.125, -0.25, 0, -0.125]
    assert terms.loss_mask.tolist() == [1, 1, 1, 1, 1]
    assert terms.rollout_index.tolist() == [0, 0, 0, 1, 1]
    assert terms.num_rollouts == 2


def test_microbatches_count_prompts_and_never_cut_a_rollout():
    rollouts = [make_rollout([1, 1], [2, 2]), make_rollout([1, 1], [2, 2]), make_rollout([1], [2] * 20)]
    batch = collate([make_group(*rollouts)], microbatch_terms=6, share=Share())
    assert [len(microbatch.inputs["tokens"]) for microbatch in batch.microbatches] == [6, 20]
    assert (batch.num_terms, batch.num_rollouts) == (24, 3)


def test_masked_tokens_are_read_and_are_no_terms():
    group = make_group(make_rollout([1], [2, 3, 4], mask=[1, 0, 1]), make_rollout([5], [6, 7], mask=[0, 1]))
    batch = collate([group], microbatch_terms=8, share=Share())
    (microbatch,) = batch.microbatches
    assert microbatch.inputs["tokens"].tolist() == [1, 2, 3, 5, 6]
    assert microbatch.inputs["logit_index"].tolist() == [0, 2, 4]
    assert microbatch.inputs["labels"].tolist() == [2, 4, 7]
    assert microbatch.terms.loss_mask.tolist() == [1, 1, 1]
    assert microbatch.terms.rollout_logprobs.tolist() == [0, -0.25, -0.125]
    assert microbatch.terms.rollout_index.tolist() == [0, 0, 1]
    assert batch.num_terms == 3


def test_steps_of_an_episode_have_their_own_advantages():
    episode = Episode(
        term_steps=np.array([0, 0, 1, 1], np.int32),
        values=np.zeros(3, np.float32),
        rewards=np.zeros(2, np.float32),
        advantages=np.array([0.5, -2.0], np.float32),
    )
    rollout = replace(make_rollout([1], [2, 3, 4, 5], mask=[1, 1, 0, 1]), episode=episode)
    (microbatch,) = collate([make_group(rollout)], microbatch_terms=8, share=Share()).microbatches
    assert microbatch.terms.advantages.tolist() == [0.5, 0.5, -2.0]
    assert microbatch.terms.values is None  # a language model has no critic


def test_a_shared_prefix_is_left_out_of_the_loss():
    tokens, rewards = [[7, 8, 3, 4], [7, 8, 5]], np.array([1.0, 0.0])
    found = [make_rollout([1], each) for each in tokens]
    masks = mask_prefixes([LLM.term_tokens(r) for r in found], [r.loss_mask for r in found], rewards, at_least=1)
    found = [replace(r, loss_mask=mask, advantage=a) for r, mask, a in zip(found, masks, (1, -1), strict=True)]
    batch = collate([make_group(*found)], microbatch_terms=100, share=Share())
    (microbatch,) = batch.microbatches
    assert microbatch.inputs["labels"].tolist() == [3, 4, 5]
    logprobs = torch.tensor([-0.1, -0.2, -0.3], requires_grad=True)
    terms = replace(microbatch.terms, rollout_logprobs=logprobs.detach())
    objective = build_objective(AlgorithmConfig(name="dapo"), max_terms=8)
    ([loss], _) = objective(PolicyOutputs(logprobs=logprobs), terms)
    (loss.values * objective.term_weights(terms)).sum().backward()
    # dapo at ratio 1: the gradient of a term is -advantage
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1, -1, 1]
    assert objective.normalizer(batch) == 3


def test_rollouts_with_nothing_to_learn_are_left_out_but_measured():
    rollouts = [make_rollout([1], [2, 3], mask=[0, 0]), make_rollout([1], [2] * 4)]
    batch = collate([make_group(*rollouts)], microbatch_terms=8, share=Share())
    assert batch.num_rollouts == 1
    assert batch.metrics == {
        "response_length_mean": 3,
        "response_length_max": 4,
        "packing_fraction": 0.5,
    }


def test_a_batch_may_hold_nothing():
    batch = collate([make_group(make_rollout([1], [2], mask=[0]))], microbatch_terms=8, share=Share())
    assert batch.microbatches == ()
    assert (batch.num_terms, batch.num_rollouts) == (0, 0)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    capacity=st.integers(1, 40),
)
def test_every_label_is_the_token_after_its_logit(lengths, capacity):
    fresh = iter(range(1000))
    rollouts = [make_rollout([next(fresh) for _ in range(p)], [next(fresh) for _ in range(t)]) for p, t in lengths]
    batch = collate([make_group(*rollouts)], microbatch_terms=capacity, share=Share())
    labels: list[int] = []
    for microbatch in batch.microbatches:
        inputs = microbatch.inputs
        at = inputs["logit_index"]
        assert torch.equal(inputs["sequence_index"][at], microbatch.terms.rollout_index)
        within = torch.diff(microbatch.terms.rollout_index, append=torch.tensor([-1])) == 0
        assert torch.equal(inputs["tokens"][at[within] + 1], inputs["labels"][within])
        assert len(inputs["tokens"]) <= capacity or microbatch.terms.num_rollouts == 1
        assert inputs["labels"].tolist() == sorted(inputs["labels"].tolist())  # rollouts of a microbatch are in order
        labels += inputs["labels"].tolist()
    assert sorted(labels) == [int(token) for rollout in rollouts for token in rollout.arrays["tokens"]]


def test_shares_hold_the_whole_batch_with_the_same_counts():
    groups = [make_group(*(make_rollout([g, g], [g] * (g + 1)) for _ in range(2))) for g in range(1, 8)]
    batches = [collate(groups, microbatch_terms=12, share=Share(index=i, count=3)) for i in range(3)]
    assert len({len(batch.microbatches) for batch in batches}) == 1
    for batch in batches:
        assert (batch.num_terms, batch.num_rollouts) == (2 * sum(range(2, 9)), 14)
        assert batch.metrics == batches[0].metrics
    trained = [m for batch in batches for m in batch.microbatches if m.terms.loss_mask.any()]
    labels = sorted(int(label) for microbatch in trained for label in microbatch.inputs["labels"])
    assert labels == sorted(g for g in range(1, 8) for _ in range(2 * (g + 1)))


def test_a_rank_without_sequences_makes_a_pass_that_trains_nothing():
    group = make_group(make_rollout([1, 2], [3, 4]))
    full, empty = (collate([group], microbatch_terms=8, share=Share(index=i, count=2)) for i in range(2))
    assert full.microbatches[0].terms.num_rollouts == 1
    (microbatch,) = empty.microbatches
    assert microbatch.inputs["tokens"].tolist() == [0]
    assert microbatch.inputs["logit_index"].tolist() == [0]
    assert microbatch.terms.loss_mask.tolist() == [0]
    assert (empty.num_terms, empty.num_rollouts) == (full.num_terms, full.num_rollouts) == (2, 1)
    assert full.metrics["packing_fraction"] == empty.metrics["packing_fraction"] == 3 / 16


def test_routes_lie_beside_the_tokens():
    rollouts = [make_rollout([1, 2], [3, 4]), make_rollout([5], [6, 7])]
    lengths = [3, 2]  # tokens that are fed in
    routes = [np.full((length, 2, 1), place, np.int16) for place, length in enumerate(lengths)]
    group = make_group(*(replace(r, arrays={**r.arrays, "routes": route}) for r, route in zip(rollouts, routes)))
    (microbatch,) = collate([group], microbatch_terms=100, share=Share()).microbatches
    assert microbatch.inputs["routes"].shape == (5, 2, 1)
    assert microbatch.inputs["routes"][:, 0, 0].tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("routes", "wrong"),
    [
        (None, r"different shapes: \[2, 1\], no experts"),
        (np.zeros((2, 2, 2), np.uint8), r"different shapes: \[2, 1\], \[2, 2\]"),
        (np.zeros((3, 2, 1), np.uint8), r"experts \[3, 2, 1\] for 2 tokens, not \[2, layers, k\]"),
    ],
)
def test_a_rollout_without_its_routes_ends_the_run(routes, wrong):
    rollouts = [make_rollout([1, 2], [3, 4]), make_rollout([5], [6, 7])]
    shapes = [np.zeros((3, 2, 1), np.uint8), routes]
    given = [
        each if part is None else replace(each, arrays={**each.arrays, "routes": part})
        for each, part in zip(rollouts, shapes, strict=True)
    ]
    with pytest.raises(UserError, match=f"rollout.options.record_routes: .*{wrong}"):
        collate([make_group(*given)], microbatch_terms=100, share=Share())


@pytest.mark.parametrize("shown", [(0, 1), (0, 2), (0, 3)])
def test_ranks_get_pictures_evenly(shown):
    view = View(items=(MediaItem(kind="image", pixels=np.ones((8, 2), np.float32)),), index=np.zeros(8, np.int64))
    groups = []
    for number in range(4):
        rollouts = [make_rollout(range(8), range(2)), make_rollout(range(8), range(3))]
        if number in shown:
            rollouts = [replace(each, arrays={**each.arrays, **view.arrays}) for each in rollouts]
        groups.append(make_group(*rollouts))
    for index in range(2):
        batch = collate(groups, microbatch_terms=100, share=Share(index=index, count=2))
        assert sum("item_shown" in microbatch.inputs for microbatch in batch.microbatches) == 1
        (microbatch,) = batch.microbatches
        assert len(microbatch.inputs["item_shown"]) == 2
