"""Muon: the updates of torch's own class on hidden matrices, AdamW's on the rest, as one optimizer."""

import copy

import pytest
import torch
from torch import nn

from cosmos_rl_core.parallel.config import MuonSection, OptimizerSection, PolicySection
from cosmos_rl_core.plan.estimate import num_moments
from cosmos_rl_core.train.learner import Undo
from cosmos_rl_core.train.optimizers.build import build_optimizer
from cosmos_rl_core.types import WeightSpec

KEYS = {"learning_rate": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def network():
    torch.manual_seed(0)
    layers = {
        "embedding": nn.Embedding(5, 8),
        "wide": nn.Linear(8, 12),
        "norm": nn.LayerNorm(12),
        "tall": nn.Linear(12, 3, bias=False),
        "lm_head": nn.Linear(3, 4),
    }
    return nn.ModuleDict(layers)


def logits(module, tokens):
    for layer in module.values():
        tokens = layer(tokens)
    return tokens


def step(module, *optimizers, tokens=(0, 1, 4)):
    module.zero_grad()
    loss = nn.functional.cross_entropy(logits(module, torch.tensor(tokens)), torch.arange(len(tokens)))
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize(
    "keys", [{}, {"adjust_lr_fn": "original", "momentum": 0.8}, {"nesterov": False, "ns_steps": 3}]
)
def test_on_one_rank_the_bits_are_those_of_torchs_muon_and_adamw(keys):
    ours, theirs = network(), network()
    muon = MuonSection(**keys)
    optimizer = build_optimizer("muon", ours, muon=muon, **KEYS)
    hidden = [theirs["wide"].weight, theirs["tall"].weight]
    vectors = [parameter for parameter in theirs.parameters() if parameter.ndim == 1]
    others = [theirs["embedding"].weight, theirs["lm_head"].weight]
    matrices = torch.optim.Muon(hidden, lr=0.1, weight_decay=0.1, **muon.model_dump(exclude={"adamw"}))
    groups = [{"params": others, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    rest = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.99), eps=1e-8, fused=True)
    before = [parameter.detach().clone() for parameter in ours.parameters()]
    for _ in range(3):
        step(ours, optimizer)
        step(theirs, matrices, rest)
    for old, one, other in zip(before, ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, old)


def test_the_update_of_a_matrix_has_equal_singular_values():
    """Two rows of lengths 1 and 3 at a right angle: their directions remain, with lengths near 1."""
    layer = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(layer.weight)
    keys = {**KEYS, "weight_decay": 0.0, "learning_rate": 1.0}
    optimizer = build_optimizer("muon", layer, muon=MuonSection(adjust_lr_fn="original", ns_steps=12), **keys)
    layer.weight.grad = torch.tensor([[0.0, 1.0], [3.0, 0.0]])
    optimizer.step()
    moved = -layer.weight.detach()
    assert moved[0, 0] == moved[1, 1] == 0.0
    assert 0.6 < moved[0, 1] < 1.3  # torch's coefficients end in this interval, and not at 1
    assert 0.6 < moved[1, 0] < 1.3


@pytest.mark.parametrize(("fn", "factor"), [("original", 2.0), ("match_rms_adamw", 0.8)])
def test_the_rate_is_adjusted_to_the_shape(fn, factor):
    """[16, 4]: sqrt(16 / 4) = 2, or 0.2 sqrt(16) = 0.8."""
    moved = []
    for rate in (1.0, factor):
        layer = nn.Linear(4, 16, bias=False)
        nn.init.zeros_(layer.weight)
        optimizer = build_optimizer(
            "muon", layer, muon=MuonSection(adjust_lr_fn=fn), **{**KEYS, "learning_rate": rate, "weight_decay": 0.0}
        )
        layer.weight.grad = torch.eye(16, 4)
        optimizer.step()
        moved.append(layer.weight.detach())
    size = moved[0].diagonal().mean()
    torch.testing.assert_close(moved[1], moved[0] * factor)
    assert 0.6 * factor < -size < 1.3 * factor


def test_embeddings_heads_vectors_and_stacked_experts_are_adamws():
    module = network()
    module["experts"] = nn.ParameterDict({"up": nn.Parameter(torch.ones(2, 3, 4))})
    optimizer = build_optimizer("muon", module, **KEYS)
    named = {parameter: name for name, parameter in module.named_parameters()}
    by_muon = {
        named[parameter] for group in optimizer.param_groups if "ns_steps" in group for parameter in group["params"]
    }
    assert by_muon == {"wide.weight", "tall.weight"}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(named)
    everything = build_optimizer("muon", network(), muon=MuonSection(adamw=("*",)), **KEYS)
    assert not any("ns_steps" in group for group in everything.param_groups)


def test_a_step_is_undone_with_its_state():
    """As policy replicas do where one is lost in a step of several updates."""
    module = network()
    optimizer = build_optimizer("muon", module, **KEYS)
    step(module, optimizer)
    undo = Undo(optimizer)
    before = copy.deepcopy(module.state_dict())
    momentum = optimizer.state[module["wide"].weight]["momentum_buffer"].clone()
    step(module, optimizer, tokens=(2, 3, 4))
    after = copy.deepcopy(module.state_dict())
    undo()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(optimizer.state[module["wide"].weight]["momentum_buffer"], momentum)
    step(module, optimizer, tokens=(2, 3, 4))
    assert all(torch.equal(value, after[name]) for name, value in module.state_dict().items())


def test_it_learns_and_rates_of_the_schedule_reach_both_parts():
    module = network()
    optimizer = build_optimizer("muon", module, **{**KEYS, "learning_rate": 0.03, "weight_decay": 0.0})
    losses = [step(module, optimizer) for _ in range(40)]
    assert losses[-1] < 0.05 < losses[0]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(module.state_dict())
    step(module, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"precision": {"parameters": "bfloat16"}}, "precision.parameters"),
        ({"memory": {"parameter_offload": True}}, "off"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(section, key):
    with pytest.raises(ValueError, match=f'optimizer.name = "muon".*{key}'):
        PolicySection.model_validate({"optimizer": {"name": "muon"}, **section})
    PolicySection.model_validate({"optimizer": {"name": "adamw"}, **section})


def test_the_plan_counts_one_moment_of_a_hidden_matrix():
    muon = OptimizerSection(name="muon")
    moments = {
        "model.layers.0.mlp.up_proj.weight": 1,
        "model.embed_tokens.weight": 2,
        "lm_head.weight": 2,
        "model.layers.0.mlp.experts.3.up_proj.weight": 2,
    }
    for name, number in moments.items():
        assert num_moments(muon, WeightSpec(name=name, shape=(4, 4), dtype="float32")) == number
        assert num_moments(OptimizerSection(), WeightSpec(name=name, shape=(4, 4), dtype="float32")) == 2
    assert num_moments(muon, WeightSpec(name="model.norm.weight", shape=(4,), dtype="float32")) == 2
