"""The additive hash of tensors on a device has the value of the one in host memory."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl_transfer.content import gpu
from cosmos_rl_transfer.content.digest import TABLE, tensor_sum
from cosmos_rl_transfer.content.gpu import MASK, device_sum
from cosmos_rl_transfer.layout.box import Box, whole_box
from doubles.pretend_cuda import pretend_cuda

ON_CPU = torch.from_numpy(TABLE.view(np.int64))
WIDTHS = [1, 2, 4, 8]


def both(box, shape, width, *, seed=0):
    """The hash of random elements, by digest.py and by torch."""
    packed = np.random.default_rng(seed).integers(0, 256, box.numel * width, np.uint8)
    there = torch.from_numpy(np.concatenate([packed, np.zeros(-packed.size % 8, np.uint8)]))[: packed.size]
    host = tensor_sum(packed.view(f"u{width}").reshape(box.shape), box, shape)
    return host, int(device_sum(there, box, shape, item_bytes=width, table=ON_CPU)) & MASK


@st.composite
def boxes(draw):
    """A tensor's shape and a box in it."""
    shape, offset, size = [], [], []
    for _ in range(draw(st.integers(0, 4))):
        extent = draw(st.sampled_from([1, 2, 3, 8, 40, 96]))
        before, behind = (draw(st.sampled_from([0, 0, 1, 8])) for _ in range(2))
        shape.append(before + extent + behind)
        offset.append(before)
        size.append(extent)
    return tuple(shape), Box(tuple(offset), tuple(size))


@settings(max_examples=150, deadline=None)
@given(boxes(), st.sampled_from(WIDTHS), st.integers(0, 9))
def test_any_box_has_the_hash_of_the_host(made, width, seed):
    shape, box = made
    if box.numel * width > 1 << 22:
        return
    host, device = both(box, shape, width, seed=seed)
    assert host == device


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70000), st.integers(0, 70000), st.sampled_from(WIDTHS))
def test_any_run_has_the_hash_of_the_host(size, start, width):
    host, device = both(Box((start,), (size,)), (start + size + 3,), width)
    assert host == device


@pytest.mark.parametrize("shape", [(3, 5000), (40, 96)])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_computed_in_chunks(monkeypatch, shape, width):
    monkeypatch.setattr(gpu, "_CHUNK", 1000)
    host, device = both(whole_box(shape), shape, width)
    assert host == device


@pytest.mark.cuda_dry
def test_nothing_waits_for_the_device():
    box, shape = Box((8, 0), (40, 33)), (96, 33)
    packed = torch.randint(0, 256, (box.numel * 2,), dtype=torch.uint8)
    host = tensor_sum(packed.numpy().view(np.uint16).reshape(box.shape), box, shape)
    with pretend_cuda() as record:
        torch.cuda.set_device(0)
        side = gpu.SideStream(torch.device("cuda", 0))
        there = packed.pin_memory().to("cuda", non_blocking=True)
        record.clear()
        found = device_sum(there, box, shape, item_bytes=2, table=side.table)
        counts = {name: count.total() for name, count in vars(record).items() if count}
        assert not counts, record
        assert int(found.held) & MASK == host
