"""A second set of weights: it follows by hand, counts inside, is cut over ranks, and is not what engines read."""

import numpy as np
import pytest
import torch
from torch import nn
from wfm_fixtures import mock_data, pixel_model

from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.recipe.load import load_domain
from cosmos_rl_core.types import Microbatch, TermBatch
from cosmos_rl_wfm.ema import Follower
from cosmos_rl_wfm.sampling import FlowSampling
from doubles import ranks
from doubles.ranks import run_ranks

ranks.preload("diffusers.models.transformers.transformer_wan")

LORA = {"rank": 2}
STEPS = [4.0, 2.0, 7.0]


def one_weight(value, dtype=torch.float32):
    module = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(value)
    return module.to(dtype)


def follow(module, follower, values):
    follower.weights()
    for version, value in enumerate(values, start=1):
        with torch.no_grad():
            module.weight.fill_(value)
        follower.follow(version)
    return follower.weights()["weight"].item()


def test_three_steps_by_hand():
    module = one_weight(8.0)
    follower = Follower(module, decay=lambda version: [0.5, 0.75, 0.0][version - 1])
    assert follow(module, follower, STEPS[:2]) == 0.75 * (8.0 / 2 + 4.0 / 2) + 0.25 * 2.0
    assert follow(module, follower, STEPS) == 7.0  # with decay 0 it is the weights


def test_weights_in_bfloat16_are_followed_in_steps_that_it_cannot_tell_apart():
    module = one_weight(1.0, torch.bfloat16)
    follower = Follower(module, decay=lambda version: 0.999)
    assert follow(module, follower, [2.0, 2.0, 2.0]) == pytest.approx(2 - 0.999**3)


def test_the_network_gets_its_own_weights_back():
    module = one_weight(2.0)
    follower = Follower(module, decay=lambda version: 0.5)
    assert follow(module, follower, [4.0]) == 3.0
    with pytest.raises(RuntimeError, match="inside"), follower.counting():
        assert module.weight.item() == 3.0
        raise RuntimeError("inside")
    assert module.weight.item() == 4.0


def test_counters_among_the_buffers_are_copied():
    module = nn.BatchNorm1d(2)
    follower = Follower(module, decay=lambda version: 0.5)
    follower.weights()
    module(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
    follower.follow(1)
    assert follower.weights()["num_batches_tracked"] == 1


# In a policy


def policy(*, ema, lora=None, sampling=None, setup=None):
    if lora is not None:
        pytest.importorskip("peft", reason="an extra of the package")
    model = pixel_model(ema=ema, lora=lora)
    sampling = FlowSampling(num_steps=4, **(sampling or {}))
    return load_domain("wfm").build_policy(
        model, data=mock_data(), sampling=sampling, seed=0, setup=setup or ModelSetup()
    )


def microbatch(count=2):
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(count, 3, 4, 8, 8, generator=generator)
    return Microbatch(
        inputs={
            "states": states,
            "next_states": states + 0.1 * torch.randn(states.shape, generator=generator),
            "times": torch.tensor([0.8, 0.5])[:count],
            "next_times": torch.tensor([0.5, 0.25])[:count],
            "text": torch.randn(count, 4, 16, generator=generator),
            "text_mask": torch.ones(count, 4, dtype=torch.bool),
        },
        terms=TermBatch(
            rollout_logprobs=torch.zeros(count),
            advantages=torch.zeros(count),
            loss_mask=torch.ones(count),
            rollout_index=torch.arange(count),
            num_rollouts=count,
        ),
    )


def divergence(trained):
    """KL(policy || reference) of a microbatch."""
    with torch.no_grad():
        own, other = (of.forward(microbatch()).tensors["whitened"] for of in (trained, trained.reference()))
    return (own - other).square().sum(1).mean().item() / 2


def begin(trained):
    """Nothing to train on, but the followers are made."""
    trained.forward_backward([], loss=lambda outputs, batch: outputs.logprobs.sum(), with_entropy=False)


def shift(trained, version, by=0.05):
    with torch.no_grad():
        for parameter in trained.module.parameters():
            if parameter.requires_grad:
                parameter.add_(by)
    trained.stepped(version)


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_divergence_from_the_average_is_zero_at_first_and_then_not(lora):
    trained = policy(ema={"decay": 0.5, "reference": True}, lora=lora)
    begin(trained)
    assert divergence(trained) == 0
    found = []
    for version in (1, 2, 3):
        shift(trained, version)
        found.append(divergence(trained))
    assert min(found) > 1e-4
    for version in range(4, 40):
        shift(trained, version, by=0.0)  # an average that catches up
    assert divergence(trained) < 1e-6 * min(found)


@pytest.mark.parametrize("lora", [None, LORA])
def test_an_average_is_of_what_is_trained_and_saved_by_its_names(lora):
    trained = policy(ema={"decay": 0.75}, lora=lora)
    first = {name: tensor.clone() for name, tensor in trained.weights().items()}
    shift(trained, 1, by=0.5)
    now = trained.weights()
    names = [name for name in now if not name.startswith("average:")]
    assert now.keys() == {*names, *(f"average:{name}" for name in names)}
    assert all(name.startswith("base_model.") for name in names) == (lora is not None)
    for name in names:
        expected = 0.75 * first[name] + 0.25 * now[name]
        torch.testing.assert_close(now[f"average:{name}"], expected)
    assert trained.rollout_weights().keys() == set(names)


def test_the_average_is_put_in_place_once_for_all_microbatches_of_a_step():
    trained = policy(ema={"decay": 0.5, "reference": True})
    begin(trained)
    shift(trained, 1)
    reference = trained.reference()
    one_by_one = [reference.forward(microbatch()).logprobs for _ in range(3)]
    weight = next(trained.module.parameters())
    before, own = weight._version, weight.detach().clone()
    with torch.no_grad(), reference.prepared():
        together = [reference.forward(microbatch()).logprobs for _ in range(3)]
    assert weight._version == before + 2  # in and out
    assert torch.equal(weight, own)
    assert all(map(torch.equal, one_by_one, together))


def test_without_the_key_the_reference_is_not_the_average():
    assert policy(ema={"decay": 0.5}).reference() is None


def test_engines_never_see_the_average_that_counts_inside():
    trained = policy(ema={"decay": 0.5, "reference": True})
    sent = trained.rollout_weights()
    begin(trained)
    shift(trained, 1)
    name = next(iter(sent))
    own = trained.weights()[name]
    before = own.clone()
    inside = []
    hook = trained.module.register_forward_hook(lambda *_: inside.append((sent[name].clone(), own.clone())))
    trained.reference().forward(microbatch())
    hook.remove()
    ((rollout_weights, computing),) = inside
    assert torch.equal(rollout_weights, before)
    assert not torch.equal(computing, before)
    assert torch.equal(own, before)


@pytest.mark.parametrize("lora", [None, LORA])
def test_old_weights_sample_and_are_contrasted(lora):
    trained = policy(ema=None, lora=lora, sampling={"rule": "ode", "old_decay": "late"})
    rollout_weights = trained.rollout_weights()
    start = {name: tensor.clone() for name, tensor in rollout_weights.items()}
    shift(trained, 100)  # decay 0.1875
    for name, tensor in rollout_weights.items():
        current = trained.weights()[name]
        torch.testing.assert_close(tensor, 0.1875 * start[name] + 0.8125 * current)
    assert {f"old:{name}" for name in rollout_weights} <= trained.weights().keys()


# Over ranks


def followed(rank, world_size, *, dims):
    parallel = ParallelSection(**dims)
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu")) if dims else None
    setup = ModelSetup(mesh=mesh, parallel=parallel)
    trained = policy(ema={"decay": 0.5, "reference": True}, setup=setup)
    trained.rollout_weights()
    begin(trained)
    shift(trained, 1)
    with torch.no_grad():
        reference = trained.reference().forward(microbatch()).logprobs
        own = trained.forward(microbatch()).logprobs
    held = {name: tensor for name, tensor in trained.weights().items() if name.startswith("average:")}
    local = sum(getattr(tensor, "_local_tensor", tensor).numel() for tensor in held.values())
    metrics = {"own": own, "reference": reference} | {name: whole(tensor) for name, tensor in held.items()}
    return {"local": local, **{name: tensor.numpy() for name, tensor in metrics.items()}}


def test_each_rank_holds_its_part():
    alone = followed(0, 1, dims={})
    for metrics in run_ranks(followed, 2, dims={"dp_shard": 2}):
        assert metrics["local"] <= 0.55 * alone["local"]  # uneven ones round up
        for name, expected in alone.items():
            if name != "local":
                np.testing.assert_allclose(metrics[name], expected, rtol=1e-5, atol=1e-6)
    assert np.abs(alone["own"] - alone["reference"]).min() > 1e-4
