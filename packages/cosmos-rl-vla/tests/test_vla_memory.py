"""What `cosmos-rl plan` counts of a robot policy's rollout replica."""

import pytest
import torch
from safetensors.torch import save_file

from cosmos_rl_core.parallel.offload.swap import tensors_of
from cosmos_rl_core.plan.live_bytes import LiveBytes
from cosmos_rl_core.plan.run_plan import plan
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.config import VLAModelConfig
from cosmos_rl_vla.models.base import Inputs, Randomness
from cosmos_rl_vla.models.families import load
from cosmos_rl_vla.preflight import spec_of

SIZES = {"action_dim": 2, "state_dim": 2, "words": ("reach the red square",)}


@pytest.fixture(scope="module", params=["pi0", "pi05", "openvla", "openvla_oft"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    loaded = load(VLAModelConfig(family=request.param, **SIZES), stats=ActionStats.unit(2))
    loaded.save_config(folder)
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in loaded.weights().items()}, folder / "model.safetensors"
    )
    return folder


def config_of(folder, *, model=None, **options):
    return load_config(
        {
            "run": {"domain": "vla", "max_steps": 1},
            "model": {"path": str(folder), **(model or {})},
            "data": {"simulator": "reach", "tasks": ["red"]},
            "algorithm": {"name": "grpo"},
            "rollout": {"group_size": 2, "options": options},
            "reward": {"functions": [{"name": "success"}]},
            "policy": {"prompts_per_step": 2},
        }
    )


def parts_of(config):
    planned = plan(config).memory
    assert planned is not None and planned.rollout is not None
    return {part.name: part for part in planned.rollout.parts}, planned


@pytest.mark.parametrize(("options", "rows"), [({}, 16), ({"slots": 3, "processes": 1}, 3), ({"steady": True}, 8)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rollout_replica_takes_the_planned_memory(folder, dtype, options, rows):
    """Peaks of the same decision with and without values, and the bytes of the engine's model."""
    config = config_of(folder, model={"dtype": dtype}, **options)
    parts, planned = parts_of(config)
    loaded = load(config.model)
    loaded.cast_parameters(getattr(torch, dtype))
    module, spec = loaded.model.requires_grad_(False), spec_of(config.data)
    weights = parts["weights"].bytes + parts["parameters in float32, tables, heads"].bytes
    assert weights == sum(tensor.nbytes for tensor in tensors_of(module))
    [(height, width)], length = spec.cameras.values(), loaded.instructions.max_length
    with LiveBytes(without=tensors_of(module)) as live:
        inputs = Inputs(
            images=torch.zeros(rows, 1, height, width, 3, dtype=torch.uint8),
            state=torch.zeros(rows, spec.state_dim),
            tokens=torch.zeros(rows, length, dtype=torch.int64),
            token_mask=torch.ones(rows, length, dtype=torch.bool),
        )
        loaded.model.act(inputs, randomness=Randomness(seeds=range(rows), places=[0] * rows))
    assert parts["a decision"].bytes == live.peak
    assert planned.unknown == ("a rollout replica: simulators",)


def test_without_the_sizes_of_its_cameras_a_decision_is_not_counted(folder):
    parts, planned = parts_of(config_of(folder, python="python3"))
    assert parts["a decision"].bytes is None
    assert planned.fits is not True
