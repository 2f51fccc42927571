"""Episodes as microbatches: terms without loss are not computed, and the branches of a rollout count as one."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cosmos_rl_core.algorithms.aggregation import aggregated
from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup, Share
from cosmos_rl_llm.data.collate import collate
from cosmos_rl_llm.model.causal_lm import make_model
from cosmos_rl_llm.policy.policy import CausalLMPolicy

VOCAB = 61
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
MAX_TERMS = 32


def model():
    return make_model(CONFIG, dtype=torch.float32, seed=0)


def branch(prompt: int, drawn: str, *, seed: int, system: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompt, tokens and mask; "x" is a token that the model sampled, "." one of the environment."""
    rng = np.random.default_rng(seed)
    prompt_tokens = np.concatenate([np.arange(system), rng.integers(0, VOCAB, prompt)])
    return prompt_tokens.astype(np.int32), rng.integers(0, VOCAB, len(drawn)).astype(np.int32), _mask(drawn)


def _mask(drawn: str) -> np.ndarray:
    return np.array([each == "x" for each in drawn])


def rollout_of(*branches, advantage: float = 1.0, seed: int = 9) -> Rollout:
    prompts, tokens, masks = zip(*branches, strict=True)
    mask = np.concatenate(masks)
    arrays = {"prompt_tokens": prompts[0], "tokens": np.concatenate(tokens)}
    if len(branches) > 1:
        arrays["branch_lengths"] = np.array([[len(p), len(t)] for p, t in zip(prompts, tokens)], np.int32)
        arrays["branch_prompts"] = np.concatenate(prompts[1:])
    logprobs = np.random.default_rng(seed).normal(-4, 0.3, len(mask)).astype(np.float32)
    return Rollout(
        arrays=arrays,
        rollout_logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        versions=np.zeros(len(mask), np.int32),
        loss_mask=mask,
        advantage=advantage,
    )


def group_of(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=rollouts)


def agents() -> list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Branches of three rollouts: two of one, one, and two of which the second trains nothing."""
    return [
        [branch(4, "xx..x.xx", seed=1, system=3), branch(5, "xxx..x", seed=2, system=3)],
        [branch(4, "x....xx", seed=3)],
        [branch(6, "xx.x", seed=4), branch(3, "...", seed=5)],
    ]


ADVANTAGES = (1.0, -0.5, 0.25)


def rollouts() -> list[Rollout]:
    return [rollout_of(*each, advantage=a, seed=i) for i, (each, a) in enumerate(zip(agents(), ADVANTAGES))]


def plain_logprobs(plain, branches) -> torch.Tensor:
    """Log-probabilities of the sampled tokens of all branches, one unpacked sequence at a time."""
    kept = []
    for prompt, tokens, mask in branches:
        row = torch.from_numpy(np.concatenate([prompt, tokens])).long()
        table = plain(row[None], use_cache=False).logits[0].log_softmax(-1)
        of_tokens = table[len(prompt) - 1 : -1].gather(1, row[len(prompt) :, None]).squeeze(1)
        kept.append(of_tokens[torch.from_numpy(mask)])
    return torch.cat(kept)


def _clip(ratio, advantage, low, high):
    return torch.maximum(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage)


def by_hand(plain, name: str) -> torch.Tensor:
    """The published formula over three rollouts."""
    losses, lengths = [], []
    for branches, rollout, advantage in zip(agents(), rollouts(), ADVANTAGES, strict=True):
        logprobs = plain_logprobs(plain, branches)
        difference = logprobs - torch.from_numpy(rollout.rollout_logprobs[rollout.loss_mask])
        if name == "gspo":
            losses.append(_clip(difference.mean().exp(), advantage, 3e-4, 4e-4))
        else:
            terms = _clip(difference.exp(), advantage, 0.2, 0.28 if name == "dapo" else 0.2)
            losses.append(terms.mean() if name == "grpo" else terms.sum())
        lengths.append(len(logprobs))
    assert lengths == [9, 3, 3]
    divisor = {"grpo": 3, "gspo": 3, "dr_grpo": 3 * MAX_TERMS, "dapo": sum(lengths)}[name]
    return torch.stack(losses).sum() / divisor


def gradients(module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["grpo", "gspo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("microbatch_terms", [1000, 20], ids=["one microbatch", "several"])
def test_losses_and_gradients_of_branches_equal_the_formula_over_rollouts(name, microbatch_terms):
    plain = model().eval()
    policy = CausalLMPolicy(copy.deepcopy(plain))
    batch = collate([group_of(*rollouts())], microbatch_terms=microbatch_terms, share=Share())
    assert (batch.num_rollouts, batch.num_terms) == (3, 15)
    assert len(batch.microbatches) == (1 if microbatch_terms == 1000 else 2)
    objective = build_objective(AlgorithmConfig(name=name), max_terms=MAX_TERMS)
    total = torch.zeros(())
    for microbatch in batch.microbatches:
        outputs = policy.forward(microbatch, with_entropy=False)
        (loss,), _ = objective(outputs, microbatch.terms)
        total = total + aggregated(loss, objective, terms=microbatch.terms, batch=batch)
    expected = by_hand(plain, name)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)
    total.backward()
    expected.backward()
    packed, separate = gradients(policy.module), gradients(plain)
    assert packed.keys() == separate.keys()
    for weight, gradient in separate.items():
        torch.testing.assert_close(packed[weight], gradient, rtol=1e-3, atol=1e-4, msg=weight)


def test_branches_stay_in_one_microbatch_with_prompts_and_positions_of_their_own():
    first, second = agents()[0]
    (microbatch,) = collate([group_of(rollouts()[0])], microbatch_terms=4, share=Share()).microbatches
    inputs, terms = microbatch.inputs, microbatch.terms
    rows = [np.concatenate([prompt, tokens[:-1]]) for prompt, tokens, _ in (first, second)]
    assert inputs["tokens"].tolist() == np.concatenate(rows).tolist()
    assert inputs["positions"].tolist() == [*range(len(rows[0])), *range(len(rows[1]))]
    assert inputs["sequence_index"].tolist() == [0] * len(rows[0]) + [1] * len(rows[1])
    assert terms.num_rollouts == 1
    assert terms.rollout_index.tolist() == [0] * 9
    assert inputs["labels"].tolist() == [*first[1][first[2]], *second[1][second[2]]]


def test_branches_share_the_rows_of_their_common_beginning():
    policy = CausalLMPolicy(model())
    (microbatch,) = collate([group_of(rollouts()[0])], microbatch_terms=1000, share=Share()).microbatches
    row = policy.module.row(microbatch.inputs)
    assert row.tokens.shape[-1] == len(microbatch.inputs["tokens"]) - 3  # the system prompt once


class HeadRows(TorchDispatchMode):
    """Counts the rows of matrix products whose outputs are as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and result.shape[-1] == VOCAB:
            self.count += len(result)
        return result


def test_the_head_is_computed_for_trained_terms_alone():
    tools = rollout_of(branch(5, ("xx" + "." * 8) * 5, seed=7))
    answer = replace(tools, loss_mask=np.ones(50, bool))
    counts = []
    for rollout in (tools, answer):
        (microbatch,) = collate([group_of(rollout)], microbatch_terms=1000, share=Share()).microbatches
        with torch.no_grad(), HeadRows() as rows:
            CausalLMPolicy(model()).forward(microbatch, with_entropy=True)
        counts.append(rows.count)
    assert counts == [10, 50]
