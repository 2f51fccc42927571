"""What ranks read and write, each its own parts, is what one process does: a model's directory, a checkpoint."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from vla_parity import MODULES, PPO, SAMPLES, decisions, loaded_model, microbatch_of, rows_of, save_model

from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.checkpoint import restore
from cosmos_rl_core.checkpoint.manifest import Origin, TrainState
from cosmos_rl_core.checkpoint.saver import CheckpointSaver
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.recipe.sections import CheckpointSection
from cosmos_rl_core.storage.folder import Folder
from cosmos_rl_core.train.optimizers.build import build_optimizer
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.types import Share, TrainBatch
from cosmos_rl_vla.build import build_policy
from cosmos_rl_vla.config import VLADataConfig, VLAModelConfig, VLASampling
from cosmos_rl_vla.models.families import load
from cosmos_rl_vla.policy.parallel import parallelize
from cosmos_rl_vla.policy.policy import VLAPolicy
from doubles import ranks
from doubles.ranks import run_ranks

ranks.preload(*MODULES)

LORA = {"lora": {"rank": 2, "alpha": 4.0}}
DIRECTORIES = [
    ("pi05", {}),
    ("openvla_oft", {}),
    ("no critic", {"critic": {"place": "prefix"}}),
    *([("pi05", LORA), ("openvla_oft", LORA)] if find_spec("peft") else []),
]
"""What is saved, and what its [model] section adds. peft is an extra of the package."""


def mesh_of_two():
    return ReplicaMesh.build(ParallelDims(dp_shard=2), device=torch.device("cpu"))


def values_of(module):
    """All parameters and buffers, whole."""
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: whole(tensor).numpy() for name, tensor in named.items()}


def filled_weights(rank, world_size, *, configs):
    """What `build_policy` fills after it has cut the model into parts, gathered."""
    setup = ModelSetup(mesh=mesh_of_two(), parallel=ParallelSection(dp_shard=2))
    data = VLADataConfig(simulator="reach", tasks=("red",))
    found = {}
    for number, keys in enumerate(configs):
        policy = build_policy(VLAModelConfig(**keys), data=data, sampling=None, seed=0, setup=setup)
        assert all(isinstance(parameter, DTensor) for parameter in policy.module.parameters())
        found |= {f"{number}/{name}": value for name, value in values_of(policy.module).items()}
    return found


@pytest.mark.ci
def test_ranks_read_the_weights_of_a_directory_as_one_process_does(tmp_path):
    for variant in {variant for variant, _ in DIRECTORIES}:
        saved = values_of(save_model(variant, tmp_path / variant).model)
        assert_same(values_of(load(VLAModelConfig(path=str(tmp_path / variant))).model), saved)
    configs = [{"path": str(tmp_path / variant), **added} for variant, added in DIRECTORIES]
    expected = {}
    for number, keys in enumerate(configs):
        weights = values_of(load(VLAModelConfig(**keys)).model)
        assert any(".lora_" in name for name in weights) == ("lora" in keys)
        expected |= {f"{number}/{name}": value for name, value in weights.items()}
    for found in run_ranks(filled_weights, 2, configs=configs):
        assert_same(found, expected)


def assert_same(found, expected):
    """To the bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name


def trainer_of(mesh, *, fresh):
    """A trainer of a tiny policy; `fresh` weights are others than those that are saved."""
    loaded = loaded_model("pi05")
    data, acted = decisions(loaded)
    if fresh:
        with torch.no_grad():
            for parameter in loaded.model.parameters():
                parameter.mul_(0.5)
    parallelize(loaded, ModelSetup(mesh=mesh))
    policy = VLAPolicy(loaded, sampling=VLASampling())
    microbatch = microbatch_of(data, acted, rows_of(Share() if mesh is None else mesh.share), supervised=False)
    batch = TrainBatch(microbatches=(microbatch,), num_terms=acted.logprobs.numel(), num_rollouts=SAMPLES)
    optimizer = build_optimizer(
        "adamw", policy.module, learning_rate=1e-3, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.01
    )
    objective = build_objective(PPO, max_terms=10)
    rate = {"lr_factor": lambda _: 1.0, "max_grad_norm": 1.0}
    return Trainer(policy, objective=objective, optimizer=optimizer, mesh=mesh, **rate), batch


def train(trainer, batch, *, until):
    while trainer.version < until:
        trainer.begin(batch)
        trainer.forward_backward(batch.microbatches)
        trainer.optim_step()


def save_at_two(rank, world_size, *, loads, saves):
    """Go on from `loads` or begin; save two steps on; return the weights one step later."""
    trainer, batch = trainer_of(None if world_size == 1 else mesh_of_two(), fresh=bool(loads))
    if loads:
        trainer.version = restore.load(loads, policy=trainer.policy, optimizer=trainer.optimizer, rank=rank).step
    group, step = RankGroup.of_all(), trainer.version + 2
    origin = Origin(num_ranks=group.size, recipe={"run": {"domain": "vla"}, "model": {"path": "somewhere"}})
    section, state = CheckpointSection(every_steps=1), TrainState(step=trainer.version)
    saver = CheckpointSaver(section, root=Folder.at(saves), trainer=trainer, state=state, ranks=group, origin=origin)
    train(trainer, batch, until=step)
    saver.after_step(TrainState(step=step))
    train(trainer, batch, until=step + 1)
    saver.settle()
    return {name: whole(tensor).numpy() for name, tensor in trainer.policy.weights().items()}


def test_a_checkpoint_goes_from_one_process_to_two_and_back(tmp_path):
    roots = [str(tmp_path / name) for name in ("one", "two", "back")]
    save_at_two(0, 1, loads="", saves=roots[0])
    both = run_ranks(save_at_two, 2, loads=f"{roots[0]}/step_2", saves=roots[1])
    back = save_at_two(0, 1, loads=f"{roots[1]}/step_4", saves=roots[2])
    trainer, batch = trainer_of(None, fresh=False)
    train(trainer, batch, until=5)
    for found in both:
        assert_close(found, trainer.policy.weights())
    train(trainer, batch, until=7)
    assert_close(back, trainer.policy.weights())


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor.detach().numpy(), atol=2e-5, err_msg=name)
