import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from cosmos_rl_core.interfaces import UserError
from cosmos_rl_core.types import FinishReason, Prompt, Rollout, RolloutGroup
from cosmos_rl_llm.chat import Chat
from cosmos_rl_llm.collate import collate, collate_sft


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
    (microbatch,) = collate([group], microbatch_terms=100).microbatches
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
    batch = collate([make_group(*rollouts)], microbatch_terms=6)
    assert [len(microbatch.inputs["tokens"]) for microbatch in batch.microbatches] == [6, 20]
    assert (batch.num_terms, batch.num_rollouts) == (24, 3)


def test_masked_terms_are_packed_but_not_counted():
    batch = collate([make_group(make_rollout([1], [2, 3, 4], mask=[1, 0, 1]))], microbatch_terms=8)
    assert batch.num_terms == 2
    assert batch.microbatches[0].terms.loss_mask.tolist() == [1, 0, 1]


def test_rollouts_with_nothing_to_learn_are_left_out_but_measured():
    rollouts = [make_rollout([1], [2, 3], mask=[0, 0], finish="length"), make_rollout([1], [2] * 4)]
    batch = collate([make_group(*rollouts)], microbatch_terms=8)
    assert batch.num_rollouts == 1
    assert batch.metrics == {"response_length_mean": 3, "response_length_max": 4, "truncated_fraction": 0.5}


def test_a_batch_may_hold_nothing():
    batch = collate([make_group(make_rollout([1], [2], mask=[0]))], microbatch_terms=8)
    assert batch.microbatches == ()
    assert (batch.num_terms, batch.num_rollouts) == (0, 0)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    capacity=st.integers(1, 40),
)
def test_every_label_is_the_token_after_its_logit(lengths, capacity):
    fresh = iter(range(1000))
    rollouts = [make_rollout([next(fresh) for _ in range(p)], [next(fresh) for _ in range(t)]) for p, t in lengths]
    batch = collate([make_group(*rollouts)], microbatch_terms=capacity)
    labels: list[int] = []
    for microbatch in batch.microbatches:
        inputs = microbatch.inputs
        at = inputs["logit_index"]
        assert torch.equal(inputs["sequence_index"][at], microbatch.terms.rollout_index)
        within = torch.diff(microbatch.terms.rollout_index, append=torch.tensor([-1])) == 0
        assert torch.equal(inputs["tokens"][at[within] + 1], inputs["labels"][within])
        assert len(inputs["tokens"]) <= capacity or microbatch.terms.num_rollouts == 1
        labels += inputs["labels"].tolist()
    assert labels == [int(token) for rollout in rollouts for token in rollout.arrays["tokens"]]


def make_chat(max_length: int | None = None) -> Chat:
    """Plain text, one token a digit, and 10 to end."""
    vocabulary = {**{str(digit): digit for digit in range(10)}, "</s>": 10, "<unk>": 11}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
    return Chat(tokenizer=tokenizer, end_ids=frozenset({10}), max_length=max_length)


def test_supervised_rows_learn_the_response_and_its_end():
    rows = [{"prompt": "12", "response": "34"}, {"prompt": "5", "response": "6"}]
    batch = collate_sft(rows, chat=make_chat(), microbatch_terms=100)
    (microbatch,) = batch.microbatches
    assert microbatch.inputs["tokens"].tolist() == [1, 2, 3, 4, 5, 6]
    assert microbatch.inputs["labels"].tolist() == [3, 4, 10, 6, 10]
    assert microbatch.terms.rollout_logprobs.tolist() == [0] * 5
    assert microbatch.terms.advantages.tolist() == [1] * 5
    assert (batch.num_terms, batch.num_rollouts) == (5, 2)


def test_a_row_without_a_response_or_too_long_is_an_error():
    with pytest.raises(UserError, match=r"data.response_column"):
        collate_sft([{"prompt": "1"}], chat=make_chat(), microbatch_terms=8)
    with pytest.raises(UserError, match=r"row of 4 tokens is longer than the context of 3.*begins '12'"):
        collate_sft([{"prompt": "12", "response": "3"}], chat=make_chat(3), microbatch_terms=8)
