"""The trainer's sum, its step, and what it does with a gradient that is not finite."""

import math
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from cosmos_rl_core.algorithms.objective import data_term_objective
from cosmos_rl_core.interfaces import Objective
from cosmos_rl_core.parallel.device import to_device
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.gradients import accumulate, clip_gradients
from cosmos_rl_core.train.optimizers.build import build_optimizer, factor, parameter_groups
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.types import LossTerm, Microbatch, PolicyOutputs, TermBatch, TrainBatch
from doubles.pretend_cuda import pretend_cuda


class Linear:
    """A policy whose log-probability of a term is x . w + b."""

    def __init__(self, width=3):
        self.steps = []
        self.module = nn.Linear(width, 1, dtype=torch.float64)
        with torch.no_grad():
            self.module.weight.copy_(torch.arange(1.0, width + 1))
            self.module.bias.fill_(0.5)

    def forward(self, microbatch, *, with_entropy=False):
        logprobs = self.module(microbatch.inputs["x"])[:, 0]
        return PolicyOutputs(logprobs=logprobs, entropy=logprobs.square() if with_entropy else None)

    def forward_backward(self, microbatches, *, loss, with_entropy):
        accumulate(self, microbatches, loss=loss, with_entropy=with_entropy)

    def stepped(self, version):
        self.steps.append(version)

    def second_copies(self):
        return ()

    def metrics(self):
        return {}


class TwoLosses(Objective):
    """-advantage * logprob, and half the mean square beside it; a rollout's terms weigh 1 / its length."""

    def __init__(self, *, needs_entropy=False, normalizer=None):
        self.needs_entropy = needs_entropy
        self._normalizer = normalizer

    def __call__(self, outputs, terms):
        losses = [
            LossTerm(name="policy", values=-terms.advantages * outputs.logprobs),
            LossTerm(name="square", values=outputs.logprobs.square(), coef=0.5),
        ]
        metrics = {"logprob": outputs.logprobs.detach()}
        if self.needs_entropy:
            metrics["entropy"] = outputs.entropy.detach()
        return losses, metrics

    def term_weights(self, terms):
        lengths = torch.bincount(terms.rollout_index, weights=terms.loss_mask)
        return terms.loss_mask / lengths[terms.rollout_index]

    def normalizer(self, batch):
        return self._normalizer or batch.num_rollouts


LENGTHS = (2, 1, 3, 2)
MASK = (1, 0, 1, 1, 1, 1, 0, 1)
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)
ADVANTAGES = (1.0, 1.0, -0.5, 2.0, 2.0, 2.0, -1.5, -1.5)


def microbatch(first, last):
    """Rollouts first .. last - 1."""
    start, end = sum(LENGTHS[:first]), sum(LENGTHS[:last])
    lengths = torch.tensor(LENGTHS[first:last])
    terms = TermBatch(
        rollout_logprobs=torch.zeros(end - start, dtype=torch.float64),
        advantages=torch.tensor(ADVANTAGES[start:end], dtype=torch.float64),
        loss_mask=torch.tensor(MASK[start:end], dtype=torch.float64),
        rollout_index=torch.arange(last - first).repeat_interleave(lengths),
        num_rollouts=last - first,
    )
    return Microbatch(inputs={"x": X[start:end]}, terms=terms)


def batch(*cuts):
    """The whole batch, cut before these rollouts."""
    edges = [0, *cuts, len(LENGTHS)]
    parts = tuple(microbatch(a, b) for a, b in pairwise(edges))
    return TrainBatch(microbatches=parts, num_terms=sum(MASK), num_rollouts=4, metrics={"reward_mean": 0.25})


def make(
    *,
    learning_rate=0.1,
    max_grad_norm=0.0,
    lr_factor=lambda step: 1.0,
    objective=None,
    version=0,
    name="sgd",
    data_term=None,
):
    policy: Any = Linear()
    optimizer = build_optimizer(
        name, policy.module, learning_rate=learning_rate, betas=(0.0, 0.9), eps=1e-8, weight_decay=0.0
    )
    trainer = Trainer(
        policy,
        objective=objective or TwoLosses(),
        data_term=data_term,
        optimizer=optimizer,
        lr_factor=lr_factor,
        max_grad_norm=max_grad_norm,
    )
    trainer.version = version
    return trainer


def gradients(trainer):
    return torch.cat([parameter.grad.flatten() for parameter in trainer.policy.module.parameters()])


def weights(trainer):
    return torch.cat([parameter.detach().flatten().clone() for parameter in trainer.policy.module.parameters()])


def run_all(trainer, whole):
    trainer.begin(whole)
    trainer.forward_backward(whole.microbatches)
    return trainer


def one_step(trainer, whole):
    return run_all(trainer, whole).optim_step()


@pytest.mark.parametrize("cuts", [(1,), (2,), (1, 2, 3)])
def test_any_split_into_microbatches_gives_the_same_losses_and_gradient(cuts):
    whole, parts = run_all(make(), batch()), run_all(make(), batch(*cuts))
    torch.testing.assert_close(gradients(parts), gradients(whole), rtol=0, atol=1e-12)
    expected, found = whole.optim_step().metrics, parts.optim_step().metrics
    assert set(found) == set(expected)
    assert found == pytest.approx(expected, abs=1e-12)
    assert parts.progress == len(cuts) + 1


def test_the_named_losses_by_hand():
    trainer = make()
    weight, bias = trainer.policy.module.parameters()
    logprobs = (X @ weight[0] + bias).detach()
    share = torch.tensor([1, 0, 1, 1 / 3, 1 / 3, 1 / 3, 0, 1], dtype=torch.float64)
    policy = -(share * torch.tensor(ADVANTAGES) * logprobs).sum().item() / 4
    square = (share * logprobs.square()).sum().item() / 4
    metrics = one_step(trainer, batch(2)).metrics
    assert metrics["loss_policy"] == pytest.approx(policy)
    assert metrics["loss_square"] == pytest.approx(square)
    assert metrics["loss"] == pytest.approx(policy + 0.5 * square)
    assert metrics["logprob"] == pytest.approx(logprobs[torch.tensor(MASK) > 0].mean().item())
    assert metrics["reward_mean"] == 0.25


def test_the_objectives_normalizer_divides():
    plain, other = run_all(make(), batch(2)), run_all(make(objective=TwoLosses(normalizer=8.0)), batch(2))
    torch.testing.assert_close(gradients(other), gradients(plain) / 2)
    assert other.optim_step().metrics["loss"] == pytest.approx(plain.optim_step().metrics["loss"] / 2)


def test_entropy_is_computed_where_the_objective_asks_for_it():
    assert "entropy" in one_step(make(objective=TwoLosses(needs_entropy=True)), batch()).metrics
    assert "entropy" not in one_step(make(), batch()).metrics


def test_a_step_follows_the_gradient_at_the_scheduled_rate():
    trainer = make(lr_factor=lambda step: {7: 0.5}[step], version=7)
    before, slope = weights(trainer), gradients(run_all(trainer, batch(2))).clone()
    result = trainer.optim_step()
    torch.testing.assert_close(weights(trainer), before - 0.05 * slope)
    assert (result.policy_version, trainer.version, result.skipped) == (8, 8, False)
    assert result.metrics["learning_rate"] == 0.05
    assert result.metrics["grad_norm"] == pytest.approx(slope.norm().item())


def test_gradients_do_not_leak_into_the_next_step():
    trainer = make(learning_rate=1e-30)
    one_step(trainer, batch())
    torch.testing.assert_close(gradients(run_all(trainer, batch())), gradients(run_all(make(), batch())))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_gradient_that_is_not_finite_leaves_weights_and_optimizer_alone(bad, name):
    trainer = make(name=name)
    one_step(trainer, batch())
    before, moments = weights(trainer), _moments(trainer)
    whole = batch(2)
    whole.microbatches[0].terms.advantages[0] = bad
    result = one_step(trainer, whole)
    assert (result.skipped, result.policy_version) == (True, 2)
    assert not math.isfinite(result.metrics["grad_norm"])
    assert torch.equal(weights(trainer), before)
    assert all(torch.equal(a, b) for a, b in zip(_moments(trainer), moments, strict=True))
    assert not one_step(trainer, batch()).skipped
    assert not torch.equal(weights(trainer), before)


def _moments(trainer):
    entries = trainer.optimizer.state.values()
    return [value.clone() for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]


def parameters(*values):
    """One parameter of one element for each gradient; None leaves a gradient out."""
    made = []
    for value in values:
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = None if value is None else torch.tensor([value])
        made.append(parameter)
    return made


def test_gradients_are_clipped_by_their_joint_norm():
    trained = parameters(3.0, None, 4.0)
    assert clip_gradients(trained, max_norm=2.5) == 5.0
    assert [None if p.grad is None else p.grad.item() for p in trained] == pytest.approx([1.5, None, 2.0])


@pytest.mark.parametrize("max_norm", [5.5, 0.0])
def test_gradients_within_the_norm_are_left_alone_and_zero_switches_clipping_off(max_norm):
    trained = parameters(3.0, 4.0)
    assert clip_gradients(trained, max_norm=max_norm) == 5.0
    assert [p.grad.item() for p in trained] == [3.0, 4.0]


def test_a_gradient_that_is_not_finite_is_reported_and_not_touched():
    trained = parameters(3.0, math.inf)
    assert clip_gradients(trained, max_norm=1.0) == math.inf
    assert [p.grad.item() for p in trained] == [3.0, math.inf]


@pytest.mark.cuda_dry
@pytest.mark.parametrize("bad", [0.0, math.inf])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_waits_for_the_gpu_once(num_ranks, bad):
    """To read the norm together with the metrics; clipping, and with several ranks their sums, stay on the GPU."""
    with pretend_cuda() as record, fake_ranks(num_ranks) as mesh:
        policy: Any = Linear()
        policy.module.to("cuda")
        optimizer = build_optimizer(
            "adamw", policy.module, learning_rate=0.1, betas=(0.0, 0.9), eps=1e-8, weight_decay=0.0
        )
        keys = {"optimizer": optimizer, "lr_factor": lambda step: 1.0, "max_grad_norm": 0.1, "mesh": mesh}
        trainer = Trainer(policy, objective=TwoLosses(), **keys)
        whole = to_device(batch(1, 2, 3), torch.device("cuda", 0))
        whole.microbatches[0].terms.advantages[0] += bad
        run_all(trainer, whole)
        record.clear()
        assert trainer.optim_step().skipped is (bad > 0)
        assert record.synchronisations.total() == 1 and not record.waits, record
        assert not record.mismatches and not record.uploads, record


@contextmanager
def fake_ranks(size):
    """The mesh of rank 0 of `size` on the pretend GPU, whose collectives do nothing; None for one."""
    if size == 1:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield SimpleNamespace(dims=ParallelDims(dp_shard=size), rank=0, device=torch.device("cuda", 0))
    finally:
        dist.destroy_process_group()


def test_vectors_do_not_decay_and_frozen_parameters_are_left_out():
    module = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    module[2].requires_grad_(False)
    matrices, vectors = parameter_groups(module, weight_decay=0.1, learning_rate=1e-3, rates={})
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert [p.shape for p in matrices["params"]] == [(3, 2)]
    assert [p.shape for p in vectors["params"]] == [(3,), (3,), (3,)]


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_optimizers_are_built_by_name_and_step(name, kind):
    module = nn.Linear(2, 1)
    optimizer = build_optimizer(name, module, learning_rate=0.1, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1)
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    settings = SimpleNamespace(**optimizer.param_groups[0])
    assert settings.momentum == 0.8 if name == "sgd" else (settings.betas, settings.eps) == ((0.8, 0.99), 1e-6)
    before = module.weight.detach().clone()
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(module.weight, before)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_without_a_gradient_only_matrices_shrink(name):
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.fill_(2.0)
        module.bias.fill_(2.0)
    optimizer = build_optimizer(name, module, learning_rate=0.1, betas=(0.0, 0.9), eps=1e-8, weight_decay=0.5)
    module(torch.zeros(1, 2)).sum().mul(0).backward()
    optimizer.step()
    assert (module.weight < 2.0).all()
    assert (module.bias == 2.0).all()


def rates(name, steps, **keys):
    return [factor(name, step, **{"warmup_steps": 0, "total_steps": 8, "min_ratio": 0.0, **keys}) for step in steps]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_the_warm_up_rises_linearly_to_the_peak(name):
    assert rates(name, range(5), warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_constant_stays_and_needs_no_end():
    assert rates("constant", [0, 10**6], total_steps=None, min_ratio=0.5) == [1.0, 1.0]


def test_linear_falls_to_the_minimum_at_the_end_and_stays():
    assert rates("linear", [0, 2, 4, 8, 20]) == [1.0, 0.75, 0.5, 0.0, 0.0]
    assert rates("linear", [4, 6, 8], warmup_steps=4, min_ratio=0.5) == [1.0, 0.75, 0.5]


def test_cosine_falls_slowly_at_both_ends():
    half = math.sqrt(0.5)
    assert rates("cosine", [0, 2, 4, 6, 8]) == pytest.approx([1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0])
    assert rates("cosine", [0, 4, 8, 9], min_ratio=0.2) == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_the_anchors_gradient_is_added_with_its_coefficient_and_counts_of_its_own():
    plain, trainer = make(), make(data_term=data_term_objective(0.5))
    for each in (plain, trainer):
        each.begin(batch())
        each.forward_backward(batch().microbatches)
    rows = TrainBatch(microbatches=(microbatch(1, 3),), num_terms=4, num_rollouts=2)
    trainer.forward_backward_data_term(rows)
    inside = microbatch(1, 3)
    nll = -(inside.terms.loss_mask[:, None] * inside.inputs["x"]).sum(0) / 4  # the gradient of -(x . w + b) is -x
    expected = gradients(plain)[:3] + 0.5 * nll
    assert torch.allclose(gradients(trainer)[:3], expected)
    metrics = trainer.optim_step().metrics
    assert metrics["loss_data_term"] != 0
    assert metrics["loss"] == pytest.approx(plain.optim_step().metrics["loss"] + 0.5 * metrics["loss_data_term"])


def test_the_policy_is_told_of_steps_that_were_taken():
    trainer = make(version=6)
    trainer.begin(batch())
    trainer.forward_backward(batch().microbatches)
    trainer.optim_step()
    assert trainer.policy.steps == [7]
    trainer.begin(batch())
    trainer.forward_backward(batch().microbatches)
    trainer.policy.module.weight.grad.fill_(float("nan"))
    trainer.optim_step()
    assert trainer.policy.steps == [7]
