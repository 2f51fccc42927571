"""Copies between GPU and host: pinned memory of the exact size, and streams beside the computation."""

import gc

import pytest
import torch
from torch import nn

from cosmos_rl_core.checkpoint import host
from cosmos_rl_core.checkpoint.host import copy_to_host, host_buffers, pinned
from cosmos_rl_core.hardware_log import log_choice
from cosmos_rl_core.parallel.offload import activations as offload
from cosmos_rl_core.parallel.offload.activations import offload_activations
from doubles.pretend_cuda import pretend_cuda
from doubles.pretend_tensor import CUDA, REGISTERED, PretendTensor

pytestmark = pytest.mark.cuda_dry


@pytest.fixture
def record():
    with pretend_cuda() as record:
        torch.cuda.set_device(CUDA)
        yield record


def boxes():
    torch.manual_seed(0)
    sizes = {"a": (300, 4), "b": (7,), "c": (128, 8), "d": ()}
    found = {name: torch.randn(shape).to(CUDA) for name, shape in sizes.items()}
    return found | {"e": torch.arange(5).to(CUDA), "on the host": torch.randn(3)}


def num_bytes(tensors):
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def test_pinned_memory_has_the_exact_size_in_pieces_of_whole_tensors(record):
    tensors = boxes()
    before = dict(REGISTERED)
    buffers = host_buffers(tensors, piece_bytes=4820)
    pieces = {address: size for address, size in REGISTERED.items() if address not in before}
    assert sum(pieces.values()) == num_bytes(tensors)
    assert len(pieces) == 3  # 4,800 bytes of a, 4,096 of c, the small ones
    for buffer in buffers.values():
        first, size = buffer.data_ptr(), buffer.numel() * buffer.itemsize
        assert sum(address <= first and first + size <= address + own for address, own in pieces.items()) == 1
    assert all(buffer.is_pinned() for buffer in buffers.values())
    del buffers, buffer
    gc.collect()
    assert not pieces.keys() & REGISTERED.keys()


def test_snapshots_are_copied_on_a_side_stream_and_waited_for_by_one_event(record):
    tensors = boxes()
    buffers = host_buffers(tensors)
    record.clear()
    copy_to_host(tensors, buffers, torch.cuda.Stream(CUDA))
    assert set(record.streams) == {"to the host, side stream, MainThread"}
    assert not record.synchronisations
    assert record.waits.total() == 1
    for name, tensor in tensors.items():
        assert torch.equal(buffers[name], tensor.cpu())


def test_memory_that_cannot_be_locked_is_pageable_with_a_line_in_the_log(record, monkeypatch, capsys):
    log_choice.cache_clear()

    class Runtime:
        @staticmethod
        def cudaHostRegister(address, size, flags):
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    assert not pinned(4096, CUDA).is_pinned()
    assert "cannot be pinned (CUDA error 2)" in capsys.readouterr().err


def test_host_memory_alone_is_one_plain_block(monkeypatch):
    monkeypatch.setattr(host, "pinned", None)
    buffers = host_buffers({"a": torch.zeros(4), "b": torch.zeros(2, 3)})
    assert buffers["a"].untyped_storage().data_ptr() == buffers["b"].untyped_storage().data_ptr()


WIDTH, BLOCKS = 16, 4


def network():
    torch.manual_seed(1)
    block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))  # noqa: E731
    return nn.Sequential(*(block() for _ in range(BLOCKS)))


def gradients(module, device):
    module.to(device)
    for seed in range(2):  # two microbatches
        inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)
        module(inputs).square().sum().backward()
    return {name: parameter.grad.cpu() for name, parameter in module.named_parameters()}


@pytest.fixture
def offloaded(monkeypatch):
    monkeypatch.setattr(offload, "_KINDS", {*offload._KINDS, PretendTensor})
    module = network()
    offload_activations(module, min_bytes=0)
    return module


def test_offloaded_activations_move_on_a_side_stream_alone(offloaded, record):
    expected = gradients(network(), CUDA)
    record.clear()
    found = gradients(offloaded, CUDA)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    streams = {text.rpartition(",")[0] for text in record.streams if "side stream" in text}
    assert streams == {"to the host, side stream", "to the GPU, side stream"}
    parameters = len(expected)
    assert sum(n for text, n in record.streams.items() if "to the host, default" in text) == parameters  # .cpu() above
    moved = sum(n for text, n in record.streams.items() if text.startswith("to the host, side"))
    assert moved == 2 * BLOCKS * 2  # of each microbatch and block: the inputs of both products
    back = sum(n for text, n in record.streams.items() if text.startswith("to the GPU, side"))
    assert back == moved
    assert record.waits.total() == 0


def test_the_block_before_is_on_its_way_while_a_block_runs_backward(offloaded, record, monkeypatch):
    """When the first tensor of a block is needed, all of the block before it have been queued already."""
    runs, order = [], []
    begin, get = offload._Copies.begin, offload._Moved.get

    def noted(copies):
        runs.append(begin(copies))
        return runs[-1]

    def needed(moved):
        block = next(index for index, run in enumerate(runs) if moved in run.moved)
        order.append((block, moved._on_gpu is not None))
        return get(moved)

    monkeypatch.setattr(offload._Copies, "begin", noted)
    monkeypatch.setattr(offload._Moved, "get", needed)
    offloaded.to(CUDA)
    offloaded(torch.randn(8, WIDTH).to(CUDA)).sum().backward()
    last = BLOCKS - 1
    assert [block for block, _ in order] == sorted((block for block, _ in order), reverse=True)
    assert all(queued for block, queued in order if block != last)
    assert not order[0][1]


def test_tensors_are_freed_one_block_later_and_host_memory_with_the_graph(offloaded, record):
    copies = offloaded[0].forward.args[3]
    offloaded.to(CUDA)
    gc.collect()
    gc.disable()
    try:
        out = offloaded(torch.randn(8, WIDTH).to(CUDA))
        assert len(copies._leaving) == 1  # the last block's
        out.sum().backward()
        del out
    finally:
        gc.enable()
    assert not copies._leaving
    assert copies._last() is None  # freed with the graph, not by the garbage collector
