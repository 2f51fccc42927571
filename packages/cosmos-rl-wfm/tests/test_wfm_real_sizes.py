"""Wan2.1-14B on fake ranks: parameters, calls and bytes of collectives of a rank are those of `cosmos-rl plan`.

Nothing is allocated or sent.
"""

import json
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from cosmos_rl_core.parallel.config import MemorySection, ParallelSection, PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import materialise, parameters_on_meta
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.plan.estimate import estimate
from cosmos_rl_core.plan.live_bytes import LiveBytes
from cosmos_rl_core.plan.needs import START
from cosmos_rl_core.plan.traffic import traffic
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_wfm.domain import WFM
from cosmos_rl_wfm.models import weights
from cosmos_rl_wfm.models.folder import WEIGHTS
from cosmos_rl_wfm.models.weights import empty_network, with_defaults
from cosmos_rl_wfm.parallel.parallelize import parallelize
from cosmos_rl_wfm.parallel.shape import model_shape, num_tokens, parameter_shapes
from doubles.fake_ranks import Collectives, fake_rank

NAME = "WanTransformer3DModel"
WAN = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "text_dim": 4096, "freq_dim": 256}
LATENTS = (16, 2, 64, 48)


def sharded(mesh, *, layers, memory=None):
    """The network of one rank, on meta, with matrix products in bfloat16."""
    with parameters_on_meta():
        network = empty_network(NAME, {**WAN, "num_layers": layers}, dtype=torch.float32)
    section = ParallelSection(**dict(mesh.dims))
    setup = ModelSetup(mesh=mesh, parallel=section, memory=memory or MemorySection())
    parallelize(network.requires_grad_(True), setup, compute_dtype=torch.bfloat16)
    return network


def planned(layers):
    config = with_defaults(NAME, {**WAN, "num_layers": layers})
    shape = model_shape({**config, "_class_name": NAME}, dtype="bfloat16")
    assert shape is not None
    return shape, num_tokens(config, LATENTS)


@pytest.mark.parametrize(
    ("layers", "dims"),
    [
        (2, {"dp_shard": 64}),
        (2, {"dp_shard": 8, "cp": 8}),
        pytest.param(40, {"dp_shard": 64}, marks=pytest.mark.slow),
    ],
)
def test_a_rank_holds_the_planned_bytes_of_parameters(layers, dims):
    dims = ParallelDims(**dims)
    with fake_rank(dims) as mesh:
        parameters = list(sharded(mesh, layers=layers).parameters())
    assert all(isinstance(parameter, DTensor) and parameter.is_meta for parameter in parameters)
    policy = PolicySection(parallel=ParallelSection(**dict(dims)))
    expected = estimate(planned(layers)[0], dims=dims, policy=policy, tokens=1000)
    assert sum(parameter.to_local().nbytes for parameter in parameters) == pytest.approx(expected.parameters, rel=1e-3)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("dims", [{"dp_shard": 64}, {"dp_shard": 8, "cp": 8}, {"dp_shard": 4, "dp_replicate": 2}])
def test_a_pass_sends_the_planned_bytes(dims, checkpointing):
    dims, memory = ParallelDims(**dims), MemorySection(activation_checkpointing=checkpointing)
    with fake_rank(dims) as mesh:
        network = sharded(mesh, layers=2, memory=memory)
        with FakeTensorMode(allow_non_fake_inputs=True):
            network.to_empty(device="cpu")
            states, text = torch.empty(2, *LATENTS), torch.empty(2, 512, WAN["text_dim"])
            with Collectives(mesh) as seen:
                velocity = network(hidden_states=states, timestep=torch.empty(2), encoder_hidden_states=text).sample
                velocity.sum().backward()
    shape, tokens = planned(2)
    policy = PolicySection(parallel=ParallelSection(**dict(dims)), memory=memory)
    shape = replace(shape, tokens_per_term=tokens)
    assert seen.found == seen.expected(traffic(shape, dims=dims, policy=policy, tokens=2 * tokens))


class WithoutValues:
    """A file of safetensors in float32; the values of its slices do not exist."""

    def __init__(self, path, framework):
        self.shapes = parameter_shapes(NAME, json.loads((path.parent / "config.json").read_text()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def keys(self):
        return list(self.shapes)

    def get_slice(self, name):
        return SliceWithoutValues(self.shapes[name])


class SliceWithoutValues:
    def __init__(self, shape):
        self.shape = shape

    def get_shape(self):
        return list(self.shape)

    def __getitem__(self, box):
        return torch.empty([piece.stop - piece.start for piece in box])


@pytest.mark.parametrize("dims", [{"dp_shard": 64}, {"dp_shard": 8, "cp": 8}])
def test_a_rank_starts_within_the_planned_bytes(monkeypatch, tmp_path, dims):
    monkeypatch.setattr(weights, "safe_open", WithoutValues)
    config = {"_class_name": NAME, **with_defaults(NAME, {**WAN, "num_layers": 2})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with fake_rank(ParallelDims(**dims)) as mesh:
        network = sharded(mesh, layers=2)
        materialise(network, device=torch.device("cpu"))
        with LiveBytes(inputs=True) as held:
            for parameter in network.parameters():
                parameter.detach().to_local().detach()  # all of them are there before one is filled
            weights.fill(network, [tmp_path / WEIGHTS])
    recipe = {
        "run": {"domain": "wfm", "max_steps": 1},
        "model": {"path": str(tmp_path), "codec": "pixels", "text": {"encoder": "words"}},
        "data": {"path": "unused.jsonl", "size": {"frames": 1, "height": 64, "width": 64}},
        "algorithm": {"name": "sft"},
        "policy": {"parallel": dims},
    }
    config = load_config(recipe)
    policy = PolicySection(parallel=ParallelSection(**dims))
    rank = estimate(planned(2)[0], dims=ParallelDims(**dims), policy=policy, tokens=1000)
    expected = sum(part.bytes for part in WFM.held_by_policy(config, rank) if START in part.at)
    assert held.peak == pytest.approx(expected, rel=0.01)
