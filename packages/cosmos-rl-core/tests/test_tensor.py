"""Regions over tp against the same network in one process: outputs, and gradients of inputs and parameters."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from cosmos_rl_core.parallel.axes.tensor import (
    TensorAxis,
    cut_columns,
    cut_rows,
    cut_vectors,
    cut_vocabulary,
    region,
    replicate,
    whole_sequence,
)
from doubles.ranks import run_ranks

VOCABULARY, WIDTH, INNER, LENGTH = 11, 6, 10, 8


class Scale(nn.Module):
    """Multiplies the last dim by a vector."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, hidden):
        return hidden * self.weight


class Part(nn.Module):
    """Inputs scaled by a vector all hold, to channels with a gain each, and back."""

    def __init__(self):
        super().__init__()
        self.shared = Scale(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.gains = Scale(INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, hidden_states, note=None):
        return self.down(self.gains(torch.tanh(self.up(self.shared(hidden_states))))), note


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=7)
        self.norm = Scale(WIDTH)
        self.part = Part()
        self.mixer = nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)

    def forward(self, tokens):
        hidden = self.norm(self.embedding(tokens))
        hidden = hidden + self.part(hidden_states=hidden, note="kept")[0]
        return hidden + self.mixer(hidden)


TOKENS = torch.tensor([[3, 7, 10, 0, 3, 9, 5, 6]])
SLOPES = torch.linspace(-1, 1, LENGTH)[None, :, None]


def spread(network, axis):
    cut_vocabulary(network.embedding, axis)
    replicate(network.norm, axis, partial=axis.sequence)
    replicate(network.part.shared, axis, partial=True)
    cut_columns(network.part.up, axis)
    cut_vectors(network.part.gains, axis)
    cut_rows(network.part.down, axis)
    region(network.part, axis)
    replicate(network.mixer, axis, partial=False)
    whole_sequence(network.mixer, axis)


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def results(rank, world_size, *, sequence):
    axis = TensorAxis(init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)), sequence)
    network = Network()
    spread(network, axis)
    output = network(TOKENS)
    if sequence:
        assert output.shape[1] == LENGTH // world_size
        output = axis.gather(output)
    (SLOPES * output.square()).sum().backward()
    gradients = {name: whole(parameter.grad).numpy() for name, parameter in network.named_parameters()}
    return {"output": output.detach().numpy(), **gradients}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_spread_network_equals_one_process(world_size, sequence):
    network = Network()
    output = network(TOKENS)
    (SLOPES * output.square()).sum().backward()
    for found in run_ranks(results, world_size, sequence=sequence):
        np.testing.assert_allclose(found["output"], output.detach().numpy(), rtol=1e-5, atol=1e-5)
        for name, parameter in network.named_parameters():
            np.testing.assert_allclose(found[name], parameter.grad.numpy(), rtol=1e-4, atol=1e-4, err_msg=name)


def holds(rank, world_size):
    network = Network()
    values = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    spread(network, TensorAxis(init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))))
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter.full_tensor(), values[name]), name
    return {name: np.array(parameter.to_local().shape) for name, parameter in network.named_parameters()}


def test_matrices_are_cut_and_vectors_are_whole():
    first, second = run_ranks(holds, 2)
    assert first["embedding.weight"].tolist() == [6, WIDTH] and second["embedding.weight"].tolist() == [5, WIDTH]
    assert first["part.up.weight"].tolist() == [INNER // 2, WIDTH]
    assert first["part.down.weight"].tolist() == [WIDTH, INNER // 2]
    assert all(first[name].tolist() == [INNER] for name in ("part.up.bias", "part.gains.weight"))
