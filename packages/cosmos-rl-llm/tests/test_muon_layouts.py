"""Muon over ranks: with equal gradients every layout has the bits of one rank, also resumed in another."""

from functools import partial

import llm_parity as parity
import numpy as np
import pytest
import torch

from cosmos_rl_core.checkpoint import restore
from cosmos_rl_core.checkpoint.manifest import Origin, TrainState
from cosmos_rl_core.checkpoint.saver import CheckpointSaver
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import fill_own_part, whole
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.recipe.sections import CheckpointSection
from cosmos_rl_core.storage.folder import Folder
from cosmos_rl_core.train.optimizers.build import build_optimizer
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from doubles.ranks import run_ranks

pytestmark = pytest.mark.ci


def make(family, dims):
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu")) if dims else None
    policy = CausalLMPolicy(
        parity.make_tiny(family), setup=ModelSetup(mesh=mesh, parallel=ParallelSection.model_validate(dims))
    )
    optimizer = build_optimizer(
        "muon", policy.module, learning_rate=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01
    )
    return Trainer(policy, objective=None, optimizer=optimizer, lr_factor=lambda _: 1.0, max_grad_norm=0.0, mesh=mesh)


@torch.no_grad()
def step(trainer, number):
    """Update with gradients that depend on the step and the parameter's place alone."""
    for place, parameter in enumerate(trainer.policy.module.parameters()):
        random = torch.Generator().manual_seed(1000 * number + place)
        gradient = torch.randn(parameter.shape, generator=random)
        parameter.grad = torch.empty_like(parameter)
        fill_own_part(parameter.grad, gradient.__getitem__)
    trainer.optimizer.step()
    trainer.version += 1


def results(trainer):
    """Weights, and momentum or moments, whole."""
    found = {f"weight {name}": whole(tensor).numpy() for name, tensor in trainer.policy.weights().items()}
    for name, parameter in restore.parameter_names(trainer.policy, trainer.optimizer).items():
        for key, value in trainer.optimizer.state[parameter].items():
            found[f"{key} {name}"] = whole(value).numpy().copy()
    return found


def steps_and_save(rank, world_size, *, family, dims, root):
    trainer, ranks = make(family, dims), RankGroup.of_all() if dims else RankGroup()
    section = CheckpointSection(every_steps=1)
    saver = CheckpointSaver(
        section,
        root=Folder.at(root),
        trainer=trainer,
        state=TrainState(step=0),
        ranks=ranks,
        origin=Origin(num_ranks=ranks.size),
    )
    for number in range(2):
        step(trainer, number)
    saver.after_step(TrainState(step=2))
    step(trainer, 2)
    saver.finish()
    return results(trainer)


def load_and_step(rank, world_size, *, family, dims, root):
    trainer = make(family, dims)
    state = restore.load(f"{root}/step_2", policy=trainer.policy, optimizer=trainer.optimizer, rank=rank)
    step(trainer, state.step)
    return results(trainer)


def in_ranks(function, dims, **arguments):
    size = ParallelDims(**dims).world_size
    return (
        [partial(function, 0, 1)(dims=dims, **arguments)]
        if size == 1
        else run_ranks(function, size, dims=dims, **arguments)
    )


@pytest.mark.parametrize(
    ("family", "saved_under", "loaded_under"),
    [
        ("qwen3", {"dp_shard": 2}, {"tp": 2}),
        ("qwen3", {"dp_shard": 2, "tp": 2}, {}),
        ("qwen3", {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}),
        ("qwen3-moe", {"dp_shard": 2, "ep": 2}, {"dp_shard": 2}),
    ],
)
def test_every_layout_and_resumed_in_another_has_the_bits_of_one_rank(tmp_path, family, saved_under, loaded_under):
    [alone] = in_ranks(steps_and_save, {}, family=family, root=str(tmp_path / "one"))
    root = str(tmp_path / "ranks")
    ranks = in_ranks(steps_and_save, saved_under, family=family, root=root)
    resumed = in_ranks(load_and_step, loaded_under, family=family, root=root)
    momenta = [name for name in alone if name.startswith("momentum_buffer ")]
    assert len(momenta) >= 10
    for found in (*ranks, *resumed):
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            if f"momentum_buffer {name.partition(' ')[2]}" in momenta:
                assert np.array_equal(found[name], value), name
            else:  # AdamW's fused kernel rounds the last elements of a shard as single ones
                np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-7, err_msg=name)
