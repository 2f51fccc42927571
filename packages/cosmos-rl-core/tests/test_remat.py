"""Recomputed, offloaded and compiled blocks give the same gradients, and hold less."""

import copy
import shutil
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import MemorySection
from cosmos_rl_core.parallel.offload.activations import offload_activations
from cosmos_rl_core.parallel.remat import checkpoint_activations, save_memory
from doubles.ranks import run_ranks

MODES = ["none", "selective", "full"]
ROW_BYTES = 64 * 32 * 4
"""Of one activation [rows, width]."""


class Block(nn.Module):
    """Attention and a gated unit of one width."""

    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.gate = nn.Linear(width, 2 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden, *, scale=1.0):
        query, key, value = self.qkv(self.norm(hidden)).unflatten(-1, (3, 4, -1)).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)
        hidden = hidden + attended[0].transpose(0, 1).flatten(1)
        return hidden + scale * self.down(F.silu(self.gate(self.norm(hidden))) * self.up(self.norm(hidden)))


def model(num_blocks=3):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_blocks)))


def run(network, *, rows=64):
    """The gradients after one backward pass over fixed rows, by name."""
    hidden = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))
    for block in network:
        hidden = block(hidden, scale=0.5)
    hidden.square().mean().backward()
    return {name: p.grad for name, p in network.named_parameters()}


def assert_same_gradients(network, **tolerance):
    expected, found = run(model()), run(network)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name, **tolerance or {"rtol": 1e-6, "atol": 1e-6})


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that were made while it was active and are not freed."""

    def __init__(self, network):
        super().__init__()
        self.live = 0
        self._seen = weakref.WeakSet(parameter.untyped_storage() for parameter in network.parameters())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self._seen:
                self._seen.add(storage)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        return result

    def _freed(self, nbytes):
        self.live -= nbytes


def held_by_graph(network, *, rows=64, width=32):
    """Bytes that a forward pass leaves for the backward pass, its input and output included."""
    with LiveBytes(network) as counter:
        output = network(torch.randn(rows, width))
        held = counter.live
    assert output.shape == (rows, width)
    return held


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offload", [False, True])
def test_gradients_stay_the_same(mode, offload):
    network = model()
    checkpoint_activations(network, mode)
    if offload:
        offload_activations(network, min_bytes=0)
    assert_same_gradients(network)


def test_each_mode_holds_less_than_the_one_before():
    held = {}
    for mode in MODES:
        network = model()
        checkpoint_activations(network, mode)
        held[mode] = held_by_graph(network)
    assert held["none"] > 1.5 * held["selective"] > 1.5 * 1.5 * held["full"]


def test_full_holds_the_inputs_of_blocks_alone():
    network = model(3)
    checkpoint_activations(network, "full")
    assert held_by_graph(network) == 4 * ROW_BYTES  # three inputs and the output


def test_products_are_not_computed_again_in_selective_mode():
    calls = {}
    for mode in MODES:
        network = model(1)
        checkpoint_activations(network, mode)
        with CountCalls("addmm") as counter:
            run(network)
        calls[mode] = counter.calls
    assert calls["selective"] == calls["none"] == 4
    assert calls["full"] > 4


class CountCalls(TorchDispatchMode):
    """Counts the calls of one operator."""

    def __init__(self, name):
        super().__init__()
        self._name, self.calls = name, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.overloadpacket.__name__ == self._name
        return func(*args, **kwargs or {})


def test_names_of_parameters_stay_the_same():
    network = model()
    names = list(network.state_dict())
    save_memory(network, MemorySection(activation_checkpointing="full", activation_offload=True), compiled=False)
    assert list(network.state_dict()) == names


def test_a_copy_of_a_model_recomputes_with_its_own_weights():
    network = model()
    checkpoint_activations(network, "full")
    twin = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert_same_gradients(twin)


def test_parameters_and_small_tensors_are_not_offloaded():
    network = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    kept = held_by_graph(network)
    offload_activations([network], min_bytes=ROW_BYTES + 1)
    assert held_by_graph(network) == kept


def test_large_activations_are_moved():
    network = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    kept = held_by_graph(network)
    offload_activations([network], min_bytes=ROW_BYTES)
    assert held_by_graph(network) == kept + ROW_BYTES  # copies of input and output; the output itself is held here


def test_what_several_operators_save_is_moved_once():
    network = Twice()
    kept = held_by_graph(network)
    offload_activations([network], min_bytes=ROW_BYTES)
    assert held_by_graph(network) == kept  # the copy takes the place of the input


class Twice(nn.Module):
    """Saves its input for two products."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, hidden):
        return self.left(hidden) + self.right(hidden)


def test_without_gradients_nothing_is_held():
    network = model()
    save_memory(network, MemorySection(activation_checkpointing="full", activation_offload=True), compiled=False)
    with torch.no_grad():
        assert held_by_graph(network) == ROW_BYTES


def test_compile_with_selective_recomputation_is_refused():
    with pytest.raises(UserError, match=r'compile.*"none" or "full"'):
        save_memory([], MemorySection(activation_checkpointing="selective", compile=True), compiled=True)


def test_compile_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"C\+\+ compiler, and no-such-compiler"):
        save_memory([], MemorySection(compile=True), compiled=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile calls a C++ compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_blocks_give_the_same_gradients(mode):
    network = model()
    save_memory(network, MemorySection(activation_checkpointing=mode, compile=True), compiled=True)
    assert_same_gradients(network, rtol=1e-5, atol=1e-6)


def sharded_gradients(rank, world_size, *, mode, offload):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    network = model()
    mesh = init_device_mesh("cpu", (world_size,))
    checkpoint_activations(network, mode)
    if offload:
        offload_activations(network, min_bytes=0)
    for block in [*network, network]:
        fully_shard(block, mesh=mesh)
        block.set_gradient_divide_factor(world_size)  # every rank trains on the same rows here
    network(torch.zeros(1, 32))
    return {name: gradient.full_tensor().numpy() for name, gradient in run(network).items()}


@pytest.mark.parametrize(("mode", "offload"), [("selective", False), ("full", True)])
def test_sharded_blocks_give_the_same_gradients(mode, offload):
    first, second = run_ranks(sharded_gradients, 2, mode=mode, offload=offload)
    for name, gradient in run(model()).items():
        torch.testing.assert_close(torch.from_numpy(first[name]), gradient, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(torch.from_numpy(second[name]), gradient, rtol=1e-6, atol=1e-6)
