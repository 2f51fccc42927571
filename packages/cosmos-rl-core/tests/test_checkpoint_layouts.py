"""Checkpoints over ranks: saved under one layout, loaded under any other, and training goes on as it would have."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.checkpoint import restore
from cosmos_rl_core.checkpoint.contents import Contents
from cosmos_rl_core.checkpoint.manifest import Origin, TrainState, list_steps, verify
from cosmos_rl_core.checkpoint.saver import CheckpointSaver, SavingRun
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.recipe.sections import CheckpointSection
from cosmos_rl_core.storage.folder import Folder
from cosmos_rl_core.testing.tiny_model import TinyPolicy, collate_answers
from cosmos_rl_core.testing.tiny_task import TinyModel
from cosmos_rl_core.train.optimizers.build import build_optimizer
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.types import Share
from doubles.ranks import run_ranks

pytestmark = [pytest.mark.ci, pytest.mark.xdist_group("checkpoint_layouts")]  # one process makes what they share

MODEL = TinyModel(actions=3, contexts=5, hidden=4)
"""Rows that neither 2 nor 4 ranks divide; of four, one holds nothing of some."""
LAYOUTS = {
    "one": {},
    "shard 2": {"dp_shard": 2},
    "shard 4": {"dp_shard": 4},
    "replicate 2 x shard 2": {"dp_replicate": 2, "dp_shard": 2},
}


@cache
def mesh_of(layout):
    dims = ParallelDims(**LAYOUTS[layout])
    return None if dims.world_size == 1 else ReplicaMesh.build(dims, device=torch.device("cpu"))


def make(layout, *, seed, name="adamw"):
    mesh = mesh_of(layout)
    policy = TinyPolicy(MODEL.model_copy(update={"seed": seed}), temperature=1.0, setup=ModelSetup(mesh=mesh))
    return Trainer(
        policy,
        objective=build_objective(AlgorithmConfig(name="sft"), max_terms=3),
        optimizer=build_optimizer(
            name, policy.module, learning_rate=0.05, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1
        ),
        lr_factor=lambda step: 1.0 / (1 + step),
        max_grad_norm=1.0,
        mesh=mesh,
    )


def train(trainer, layout, *, until):
    mesh = mesh_of(layout)
    while trainer.version < until:
        rows = [{"context": (trainer.version + i) % 5} for i in range(4)]
        share = mesh.share if mesh else Share()
        batch = collate_answers(rows, actions=3, length=3, microbatch_terms=6, share=share)
        trainer.begin(batch)
        trainer.forward_backward(batch.microbatches)
        trainer.optim_step()


class Complaining(SavingRun):
    """A run that keeps the errors of its saver."""

    def __init__(self, complaints):
        super().__init__()
        self.failed = complaints.append


def saver_of(trainer, layout, root, **keys):
    ranks = RankGroup.of_all() if mesh_of(layout) else RankGroup()
    section = CheckpointSection(every_steps=1, keep=9)
    origin = Origin(num_ranks=ranks.size, layout=layout)
    return CheckpointSaver(
        section, root=Folder.at(root), trainer=trainer, state=TrainState(step=0), ranks=ranks, origin=origin, **keys
    )


def weights(trainer):
    return {name: whole(tensor).numpy().copy() for name, tensor in trainer.policy.weights().items()}


def save_and_go_on(rank, world_size, *, layout, root, name="adamw"):
    """Two steps, a save beside the third, and on to the fifth."""
    trainer = make(layout, seed=0, name=name)
    saver = saver_of(trainer, layout, root)
    train(trainer, layout, until=2)
    saver.after_step(TrainState(step=2, next_sample=8))
    train(trainer, layout, until=5)
    saver.finish()
    return weights(trainer)


def load_and_go_on(rank, world_size, *, layout, roots, name="adamw"):
    """From each of the checkpoints three steps on."""
    found = {}
    for root in roots:
        trainer = make(layout, seed=7, name=name)
        state = restore.load(f"{root}/step_2", policy=trainer.policy, optimizer=trainer.optimizer, rank=rank)
        assert (state.step, state.next_sample) == (2, 8)
        trainer.version = state.step
        train(trainer, layout, until=5)
        found |= {f"{root}:{key}": value for key, value in weights(trainer).items()}
    return found


def in_ranks(function, layout, **arguments):
    """What rank 0 of a layout returns; one process needs no group."""
    num_ranks = ParallelDims(**LAYOUTS[layout]).world_size
    if num_ranks == 1:
        return function(0, 1, layout=layout, **arguments)
    return run_ranks(function, num_ranks, layout=layout, **arguments)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Each layout's checkpoint folder, and its weights three steps later."""
    roots = {layout: str(tmp_path_factory.mktemp("saved")) for layout in LAYOUTS}
    return {layout: (root, in_ranks(save_and_go_on, layout, root=root)) for layout, root in roots.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_goes_on_from_the_checkpoint_of_any_other(saved, layout):
    roots = [root for root, _ in saved.values()]
    found = in_ranks(load_and_go_on, layout, roots=roots)
    for written_by, (root, expected) in saved.items():
        for name, value in expected.items():
            there = found[f"{root}:{name}"]
            np.testing.assert_allclose(there, value, atol=1e-6, rtol=0, err_msg=f"{written_by}: {name}")
            assert written_by != layout or np.array_equal(there, value), f"{layout}: {name} is not the same bits"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_is_written_once(saved, layout):
    root, _ = saved[layout]
    contents = Contents.read(Folder.at(root) / "step_2")
    for name, entry in contents.tensors.items():
        count = np.zeros(entry.size, np.int64)
        for part in entry.parts:
            count[tuple(slice(at, at + length) for at, length in zip(part.offset, part.shape))] += 1
        assert (count == 1).all(), name
    verify(f"{root}/step_2")


def test_replicas_share_the_work(saved):
    root, _ = saved["replicate 2 x shard 2"]
    folder = Folder.at(root) / "step_2"
    files = [name for name in folder.walk() if name.startswith("training/")]
    sizes = [len(folder.read(name)) for name in files]
    assert len(files) == 4
    assert max(sizes) < 0.5 * sum(sizes)


def test_momentum_travels_too(tmp_path):
    """SGD keeps one tensor a parameter and no counter."""
    root = str(tmp_path)
    expected = in_ranks(save_and_go_on, "shard 2", root=root, name="sgd")
    found = in_ranks(load_and_go_on, "one", roots=[root], name="sgd")
    for name, value in expected.items():
        np.testing.assert_allclose(found[f"{root}:{name}"], value, atol=1e-6, rtol=0)


class Stage(nn.Module):
    """One of two layers, by the name it has in the whole model."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4, bias=False) for i in layers})


class StagePolicy:
    """The part of a policy that a checkpoint sees. `tied` names a tensor that both stages hold."""

    def __init__(self, layers):
        self.module = Stage(layers)
        self.tied = nn.Parameter(torch.ones(4, 4))
        self.module.register_parameter("tied_copy", self.tied)

    def weights(self):
        layers = {name: tensor.detach() for name, tensor in self.module.layers.named_parameters(prefix="layers")}
        return {**layers, "embed.weight": self.tied.detach()}

    def save_config(self, directory):
        (directory / "config.json").write_text("{}")


def filled_stage(layers):
    policy = StagePolicy(layers)
    with torch.no_grad():
        for i in layers:
            policy.module.layers[str(i)].weight.fill_(i + 1)
        policy.tied.fill_(9)
    optimizer = torch.optim.AdamW(policy.module.parameters(), lr=0.1)
    for parameter in policy.module.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    trainer = Trainer(policy, objective=None, optimizer=optimizer, lr_factor=lambda step: 1.0, max_grad_norm=1.0)
    trainer.version = 1
    return trainer


def save_stage(rank, world_size, *, root):
    saver_of_stage(filled_stage([rank]), root).finish()


def saver_of_stage(trainer, root):
    ranks = RankGroup.of_all()
    return CheckpointSaver(
        CheckpointSection(), root=Folder.at(root), trainer=trainer, state=TrainState(step=1), ranks=ranks
    )


def test_stages_of_a_pipeline_make_one_model(tmp_path):
    run_ranks(save_stage, 2, root=str(tmp_path))
    expected = filled_stage([0, 1])
    found = StagePolicy([0, 1])
    optimizer = torch.optim.AdamW(found.module.parameters(), lr=0.1)
    restore.load(tmp_path / "step_1", policy=found, optimizer=optimizer)
    for name, tensor in expected.policy.weights().items():
        assert torch.equal(found.weights()[name], tensor)
    for mine, other in zip(found.module.parameters(), expected.policy.module.parameters()):
        assert all(
            torch.equal(optimizer.state[mine][key], other_state)
            for key, other_state in expected.optimizer.state[other].items()
        )


class FullForOne(Folder):
    """A store that is full when rank 1 writes its second checkpoint."""

    def write(self, name, parts):
        if "step_2" in str(self) and name.endswith("rank_1.safetensors"):
            super().write(name, [b"half"])
            raise OSError(28, "No space left on device")
        return super().write(name, parts)


def save_into_a_full_store(rank, world_size, *, root):
    trainer = make("shard 2", seed=0)
    told = []
    saver = saver_of(trainer, "shard 2", FullForOne.at(root), run=Complaining(told))
    for step in (1, 2, 3):
        train(trainer, "shard 2", until=step)
        saver.after_step(TrainState(step=step))
    saver.finish()
    return {"told": np.array(told, dtype=np.str_)}


def test_one_rank_without_room_fails_the_save_of_all_and_training_goes_on(tmp_path):
    first, second = run_ranks(save_into_a_full_store, 2, root=str(tmp_path))
    [told] = first["told"].tolist()
    assert "step 2 could not be saved: rank 1: No space left on device" in told
    assert "training goes on" in told
    assert second["told"].tolist() == []
    assert list_steps(tmp_path) == [1, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_3"]


def save_into_folders_of_their_own(rank, world_size, *, root):
    trainer, told = make("shard 2", seed=0), []
    saver = saver_of(trainer, "shard 2", Folder.at(f"{root}/machine_{rank}"), run=Complaining(told))
    train(trainer, "shard 2", until=1)
    saver.after_step(TrainState(step=1))
    with pytest.raises(UserError, match="a folder that all ranks reach"):
        saver.finish()
    return {"told": np.array(told, dtype=np.str_)}


def test_ranks_that_write_into_different_folders_make_no_checkpoint(tmp_path):
    first, _ = run_ranks(save_into_folders_of_their_own, 2, root=str(tmp_path))
    [told] = first["told"].tolist()
    assert "rank_1.safetensors is not in" in told
    assert list_steps(tmp_path / "machine_0") == []


def test_a_model_of_other_shapes_is_refused_by_every_layout(saved, tmp_path):
    root, _ = saved["shard 4"]
    policy = TinyPolicy(MODEL.model_copy(update={"hidden": 6}), temperature=1.0, setup=ModelSetup())
    optimizer = torch.optim.AdamW(policy.module.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"context.weight is \[5, 4\] there, \[5, 6\] in this model: is it of another"):
        restore.load(f"{root}/step_2", policy=policy, optimizer=optimizer)
