"""Checkpoints of language models over every axis: saved under one layout, trained on under others, and exported."""

from dataclasses import replace

import llm_parity as parity
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.checkpoint import restore
from cosmos_rl_core.checkpoint.export import export
from cosmos_rl_core.checkpoint.manifest import Origin, TrainState
from cosmos_rl_core.checkpoint.saver import CheckpointSaver
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.parallel.stages import microbatch_multiple
from cosmos_rl_core.recipe.sections import CheckpointSection
from cosmos_rl_core.storage.folder import Folder
from cosmos_rl_core.train.optimizers.build import build_optimizer
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.types import Share
from cosmos_rl_llm.policy.pipelined import PipelinedPolicy
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from doubles.ranks import run_ranks

pytestmark = pytest.mark.ci

RECIPE = {"run": {"domain": "llm"}, "model": {"path": "somewhere"}}


def make(family, dims, *, fresh):
    """A trainer of the family's tiny model; `fresh` weights are others than those that are saved."""
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu")) if dims else None
    setup = ModelSetup(mesh=mesh, parallel=ParallelSection.model_validate(dims))
    model = parity.make_tiny(family)
    if fresh:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    kind = PipelinedPolicy if dims.get("pp", 1) > 1 else CausalLMPolicy
    policy = kind(model, setup=setup)
    return Trainer(
        policy,
        objective=build_objective(AlgorithmConfig(name="sft"), max_terms=32),
        optimizer=build_optimizer(
            "adamw", policy.module, learning_rate=1e-2, betas=(0.9, 0.99), eps=1e-2, weight_decay=0.01
        ),
        lr_factor=lambda _: 1.0,
        max_grad_norm=1.0,
        mesh=mesh,
    ), setup


def train(trainer, setup, *, until):
    mesh = setup.mesh
    share = Share() if mesh is None else replace(mesh.share, multiple=microbatch_multiple(setup.parallel))
    while trainer.version < until:
        batch = parity.make_batch(trainer.version, share=share, supervised=True, microbatch_terms=48)
        trainer.begin(batch)
        trainer.forward_backward(batch.microbatches)
        trainer.optim_step()


def weights(trainer):
    return {f"weight/{name}": whole(tensor).numpy() for name, tensor in trainer.policy.weights().items()}


def save_and_go_on(rank, world_size, *, family, dims, root):
    trainer, setup = make(family, dims, fresh=False)
    ranks = RankGroup.of_all()
    saver = CheckpointSaver(
        CheckpointSection(every_steps=2),
        root=Folder.at(root),
        trainer=trainer,
        state=TrainState(step=0),
        ranks=ranks,
        origin=Origin(num_ranks=ranks.size, recipe=RECIPE),
    )
    train(trainer, setup, until=2)
    saver.after_step(TrainState(step=2))
    train(trainer, setup, until=5)
    saver.settle()
    return weights(trainer)


def load_and_go_on(rank, world_size, *, family, dims, root):
    trainer, setup = make(family, dims, fresh=True)
    state = restore.load(f"{root}/step_2", policy=trainer.policy, optimizer=trainer.optimizer, rank=rank)
    trainer.version = state.step
    train(trainer, setup, until=5)
    return weights(trainer)


def in_ranks(function, dims, **arguments):
    num_ranks = ParallelDims(**dims).world_size
    if num_ranks == 1:
        return [function(0, 1, dims=dims, **arguments)]
    return run_ranks(function, num_ranks, dims=dims, **arguments)


ONE = {}
CASES = [
    ("qwen3", ONE, {"pp": 2}),  # its head is the embedding, on both stages
    ("qwen3", {"pp": 2}, {"dp_shard": 2, "tp": 2}),
    ("qwen3", {"dp_shard": 2, "tp": 2}, ONE),
    ("qwen3", {"cp": 2}, {"dp_replicate": 2}),
    ("qwen3-moe", {"dp_shard": 2, "ep": 2}, {"tp": 2}),
    ("qwen3-moe", {"dp_shard": 4, "ep": 2}, ONE),
]

SLOW = (CASES[3], CASES[5])


def name_of(dims):
    return " ".join(f"{axis}={size}" for axis, size in dims.items()) or "one"


@pytest.mark.parametrize(
    ("family", "saved_under", "loaded_under"),
    [pytest.param(*case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES],
    ids=[f"{family}: {name_of(before)} to {name_of(after)}" for family, before, after in CASES],
)
def test_training_goes_on_under_another_layout(tmp_path, family, saved_under, loaded_under):
    expected = {}
    for metrics in in_ranks(save_and_go_on, saved_under, family=family, root=str(tmp_path)):
        expected |= metrics
    found = in_ranks(load_and_go_on, loaded_under, family=family, root=str(tmp_path))
    parity.assert_equal(expected, found, tolerance=1e-5)


@pytest.mark.parametrize(
    ("family", "dims"), [("qwen3", ONE), ("qwen3", {"pp": 2}), ("qwen3-moe", {"dp_shard": 2, "ep": 2})]
)
def test_an_export_loads_with_transformers(tmp_path, family, dims):
    root = str(tmp_path / "checkpoints")
    saved = in_ranks(save_and_go_on, dims, family=family, root=root)
    export(root, tmp_path / "model", max_shard_bytes=100_000)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    trainer, _ = make(family, ONE, fresh=True)
    restore.load_weights(f"{root}/step_2", trainer.policy.weights())
    ours = trainer.policy.weights()
    loaded = model.state_dict()
    assert saved
    assert all(np.array_equal(loaded[name].numpy(), tensor.numpy()) for name, tensor in ours.items())
