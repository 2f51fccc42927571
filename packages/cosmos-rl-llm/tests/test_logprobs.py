"""Log-probabilities with the head cut along the vocabulary: the same numbers, and never a whole row of logits."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cosmos_rl_core.parallel.axes.tensor import TensorAxis
from cosmos_rl_llm.model.output_head import OutputHead, Vocabulary
from cosmos_rl_llm.policy.logprobs import term_logprobs
from doubles.ranks import run_ranks

TERMS, HIDDEN = 23, 16
CASES = [
    (softcap, {"terms_at_a_time": terms, "with_entropy": with_entropy})
    for softcap, with_entropy in [(None, True), (None, False), (3.0, True)]
    for terms in (100, 20)  # 20 of the widest rank are 22 of the narrowest of 4: all take 20
]
"""Soft-capping of logits, and the options of `evaluate`."""


class Widths(TorchDispatchMode):
    """Notes the sizes of every tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen |= {size for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) for size in leaf.shape}
        return result


def problem(vocabulary):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TERMS, HIDDEN, generator=generator)
    weight = torch.randn(vocabulary, HIDDEN, generator=generator)
    labels = torch.randint(vocabulary, (TERMS,), generator=generator)
    labels[0], labels[1] = 0, vocabulary - 1
    return hidden, weight, torch.randn(vocabulary, generator=generator), labels


def evaluate(hidden, head, labels, *, terms_at_a_time, size, with_entropy, vocabulary=None):
    """Results and gradients by name, for a loss that gives every term another slope."""
    leaves = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    for leaf in leaves.values():
        leaf.requires_grad_()
    logprobs, entropy = term_logprobs(
        hidden,
        head,
        labels,
        temperature=0.7,
        with_entropy=with_entropy,
        logits_bytes=4 * size * terms_at_a_time,
        vocabulary=vocabulary,
    )
    slopes = torch.linspace(-1, 2, TERMS)
    ((slopes * logprobs).sum() + (0 if entropy is None else (slopes.flip(0) * entropy).sum())).backward()
    results = {"logprobs": logprobs, "entropy": torch.zeros(1) if entropy is None else entropy}
    return {name: x.detach().numpy() for name, x in results.items()} | {k: x.grad.numpy() for k, x in leaves.items()}


def cut_over_ranks(rank, world_size, *, size):
    """Results of each case, and how wide the widest tensor was over this rank's part of the vocabulary."""
    axis = TensorAxis(init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)))
    part = Vocabulary.part(size, axis)
    own = slice(part.start, part.stop)
    found = {}
    for number, (softcap, options) in enumerate(CASES):
        hidden, weight, bias, labels = problem(size)
        head = OutputHead(weight[own].clone(), bias[own].clone(), softcap)
        with Widths() as widths:
            metrics = evaluate(hidden, head, labels, size=-(-size // world_size), vocabulary=part, **options)
        found |= {f"{number}/{name}": array for name, array in metrics.items()}
        found[f"{number}/beyond"] = max(widths.seen) - max(TERMS, part.stop - part.start)
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_cut_vocabulary_changes_nothing_and_is_never_gathered(world_size):
    size = 101  # parts of 51 and 50, or 26, 26, 26 and 23
    ranks = run_ranks(cut_over_ranks, world_size, size=size)
    for number, (softcap, options) in enumerate(CASES):
        hidden, weight, bias, labels = problem(size)
        expected = evaluate(hidden, OutputHead(weight, bias, softcap), labels, size=size, **options)
        metrics = {name: [rank[f"{number}/{name}"] for rank in ranks] for name in (*expected, "beyond")}
        for name in ("logprobs", "entropy"):
            for found in metrics[name]:
                np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(sum(metrics["hidden"]), expected["hidden"], rtol=1e-4, atol=1e-5)
        for name in ("weight", "bias"):
            np.testing.assert_allclose(np.concatenate(metrics[name]), expected[name], rtol=1e-4, atol=1e-5)
        assert max(metrics["beyond"]) == 0


def test_no_terms_give_no_logprobs_and_a_gradient_of_zeros():
    hidden, weight, _, labels = problem(11)
    weight.requires_grad_()
    logprobs, _ = term_logprobs(hidden[:0], OutputHead(weight, None, None), labels[:0], logits_bytes=10**6)
    logprobs.sum().backward()
    assert logprobs.shape == (0,) and not weight.grad.any()
