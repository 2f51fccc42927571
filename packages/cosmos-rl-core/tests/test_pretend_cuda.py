"""The pretend CUDA device computes as the CPU does, and counts what CUDA would refuse or wait for."""

import threading

import pytest
import torch
from torch.nn import functional as F

from doubles.pretend_cuda import pretend_cuda
from doubles.pretend_tensor import CUDA, PretendTensor

pytestmark = pytest.mark.cuda_dry


@pytest.fixture
def record():
    with pretend_cuda() as record:
        yield record


def test_a_model_trains_to_the_same_values_as_on_the_cpu(record):
    def train(device):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 2)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for tokens in torch.tensor([[0, 3, 3], [6, 2, 0]]):
            optimizer.zero_grad()
            model(tokens.to(device)).square().sum().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    on_cpu, on_gpu = train("cpu"), train("cuda")
    assert all(torch.equal(a, b) for a, b in zip(on_cpu, on_gpu))
    assert not record.mismatches
    assert record.streams["to the GPU, default stream, MainThread"] == 3 + 2  # parameters, tokens


def test_the_device_is_that_of_every_result(record):
    values = torch.randn(3, 4, device="cuda")
    made = [values + 1, values.new_zeros(2), torch.zeros_like(values), torch.tensor([1.0], device="cuda"), values[0]]
    made += [torch.arange(3, device=CUDA), values.cuda(), values.to(torch.float64), torch.as_tensor([2], device="cuda")]
    assert {(type(tensor), tensor.device, tensor.is_cuda) for tensor in made} == {(PretendTensor, CUDA, True)}
    assert type(values.cpu()) is torch.Tensor
    with pytest.raises(TypeError, match="numpy"):
        values.numpy()


@pytest.mark.parametrize(
    ("counter", "work"),
    [
        ("mismatches", lambda gpu: gpu + torch.ones(4)),
        ("mismatches", lambda gpu: torch.ones(4)[gpu.long()]),
        ("synchronisations", lambda gpu: gpu[0].item()),
        ("synchronisations", lambda gpu: gpu.tolist()),
        ("synchronisations", lambda gpu: gpu.nonzero()),
        ("synchronisations", lambda gpu: gpu[gpu > 0]),
        ("synchronisations", lambda gpu: torch.empty(4).copy_(gpu)),
        ("synchronisations", lambda gpu: torch.empty(4).copy_(gpu, non_blocking=True)),  # not pinned
        ("uploads", lambda gpu: torch.ones(4).to("cuda")),
        ("uploads", lambda gpu: gpu[torch.tensor([0, 1])]),
        ("synchronisations", lambda gpu: torch.cuda.synchronize()),
        ("synchronisations", lambda gpu: torch.cuda.current_stream().synchronize()),
        ("waits", lambda gpu: torch.cuda.Stream().synchronize()),
        ("mismatches", lambda gpu: torch.stack([gpu[0], torch.zeros(())])),
        ("uploads", lambda gpu: gpu[:2].copy_(torch.ones(4).pin_memory()[::2], non_blocking=True)),
        ("uploads", lambda gpu: torch.ones(4).pin_memory()[::2].to("cuda", non_blocking=True)),
        ("synchronisations", lambda gpu: torch.ones(8).pin_memory()[::2].copy_(gpu, non_blocking=True)),
        ("stray", lambda gpu: gpu.to("cpu", non_blocking=True)),
    ],
)
def test_each_kind_of_event_is_counted_once(record, counter, work):
    gpu = torch.zeros(4, device="cuda")
    if counter != "stray":
        torch.cuda.set_device(0)
    record.clear()
    work(gpu)
    counts = {name: count.total() for name, count in vars(record).items() if count and name != "streams"}
    assert counts == {counter: 1}, record


def test_products_of_groups_in_bfloat16_have_a_kernel_from_hopper_on(record, monkeypatch):
    rows, weight = torch.zeros(8, 8, device="cuda").bfloat16(), torch.zeros(1, 8, 8, device="cuda").bfloat16()
    ends = torch.full((1,), 8, device="cuda", dtype=torch.int32)
    F.grouped_mm(rows, weight, offs=ends)
    assert not record.synchronisations, record
    F.grouped_mm(rows.float(), weight.float(), offs=ends)
    assert record.synchronisations.total() == 1, record
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    F.grouped_mm(rows, weight, offs=ends)
    assert record.synchronisations.total() == 2, record


def test_memory_of_another_dtype_or_order_is_copied_without_waiting(record):
    """CUDA converts what is not blocking on the GPU."""
    gpu = torch.zeros(3, 4, device="cuda", dtype=torch.bfloat16)
    gpu.copy_(torch.ones(3, 4).pin_memory(), non_blocking=True)
    torch.ones(4, 3).pin_memory().t().to("cuda", non_blocking=True)
    assert not record.uploads, record


def test_pinned_memory_is_copied_without_waiting(record):
    def work():
        torch.cuda.set_device(0)
        with torch.cuda.stream(torch.cuda.Stream()):
            gpu = torch.ones(4).pin_memory().to("cuda", non_blocking=True)
            torch.empty(4).pin_memory().copy_(gpu, non_blocking=True)

    thread = threading.Thread(target=work, name="side")
    thread.start()
    thread.join()
    assert record.streams == {"to the GPU, side stream, side": 1, "to the host, side stream, side": 1}
    assert not record.synchronisations, record
    assert not record.uploads, record
    assert not record.stray, record


@pytest.mark.parametrize(
    ("dtype", "heads", "masked", "dim", "falls"),
    [
        (torch.bfloat16, 2, False, 64, False),  # flash
        (torch.bfloat16, 2, True, 64, True),
        (torch.float32, 2, False, 64, True),
        (torch.float32, 4, True, 64, False),  # memory-efficient
        (torch.bfloat16, 2, False, 320, True),
        (torch.float64, 4, False, 64, True),
    ],
)
def test_attention_without_a_fused_kernel_is_counted(record, dtype, heads, masked, dim, falls):
    query = torch.zeros(1, 4, 8, dim, device="cuda", dtype=dtype)
    key = torch.zeros(1, heads, 8, dim, device="cuda", dtype=dtype)
    mask = torch.zeros(8, 8, device="cuda", dtype=dtype) if masked else None
    F.scaled_dot_product_attention(query, key, key, attn_mask=mask, is_causal=not masked, enable_gqa=True)
    assert bool(record.math_attention) == falls


def test_mixed_precision_computes_on_the_device(record):
    layer = torch.nn.Linear(8, 4).to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = layer(torch.ones(2, 8, device="cuda"))
        weights = torch.softmax(found, -1, dtype=torch.float32)
        assert (F.rms_norm(found, (4,)).dtype, found.exp().dtype) == (torch.float32, torch.float32)
    weights.sum().backward()
    assert (found.dtype, found.device) == (torch.bfloat16, CUDA)
    assert (weights.dtype, weights.device) == (torch.float32, CUDA)
    assert layer.weight.grad.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert not record.mismatches, record
    assert not record.synchronisations, record


def test_torch_is_as_before_afterwards():
    with pretend_cuda():
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available()
    assert torch.ones(2).pin_memory is not None
    assert not torch.ones(2).is_pinned()
