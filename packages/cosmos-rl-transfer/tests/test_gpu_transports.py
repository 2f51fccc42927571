"""Weights that stay on (pretend) GPUs all the way: packed, received and verified there."""

import asyncio
import queue
import socket
from importlib.util import find_spec

import msgspec
import pytest
import torch
from transfer_samples import TOKEN, blank, over, sync, weights_at

from cosmos_rl_core.hardware_log import log_choice
from cosmos_rl_core.weight_sync import NIXL_BUILDS
from cosmos_rl_transfer.errors import TransferError
from cosmos_rl_transfer.publish.publisher import Publisher
from cosmos_rl_transfer.pull.subscriber import Subscriber
from cosmos_rl_transfer.transports import cuda_ipc, nixl_vram
from cosmos_rl_transfer.transports.base import TransportUnavailable
from cosmos_rl_transfer.transports.collective import Collective
from cosmos_rl_transfer.transports.cuda_ipc import CudaIpc
from cosmos_rl_transfer.transports.nixl_agent import HOST, Space, agent_of
from cosmos_rl_transfer.transports.nixl_vram import NixlVram
from cosmos_rl_transfer.wire.link import Link
from cosmos_rl_transfer.wire.messages import Data
from doubles.pretend_cuda import pretend_cuda

pytestmark = pytest.mark.cuda_dry
GPU = torch.device("cuda", 0)


@pytest.fixture
def record():
    with pretend_cuda() as record:
        torch.cuda.set_device(0)
        yield record


class Work:
    """A send that is done, or a receive; as NCCL's, it makes the current stream wait, which it notes."""

    def __init__(self, streams, finish=lambda: None):
        self.streams, self.finish = streams, finish

    def wait(self, timeout):
        self.streams.append(torch.cuda.current_stream().name)
        self.finish()


class Nccl:
    """A rank of a group of two that passes tensors of one device on, and notes where they were and who waits."""

    def __init__(self, rank, wires, devices, streams):
        self._rank, self._wires, self._devices, self._streams = rank, wires, devices, streams

    def rank(self):
        return self._rank

    def size(self):
        return 2

    def send(self, tensors, peer, tag):
        [tensor] = tensors
        self._devices.append(tensor.device)
        self._wires[peer].put(tensor.held.clone())
        return Work(self._streams)

    def recv(self, tensors, peer, tag):
        [tensor] = tensors
        self._devices.append(tensor.device)
        wire = self._wires[self._rank]
        return Work(self._streams, lambda: tensor.held.copy_(wire.get(timeout=10)))


def group():
    wires, devices, streams = [queue.Queue(), queue.Queue()], [], []
    first, second = (Collective(Nccl(rank, wires, devices, streams), device="cuda:0") for rank in (0, 1))
    return first, second, devices, streams


def on_gpu(weights):
    return {name: tensor.to("cuda") for name, tensor in weights.items()}


async def moved(trained, live, publishing, reading, *, staging):
    publisher = Publisher(trained, token=TOKEN, **over(publishing, bucket_bytes=2048))
    subscriber = Subscriber(publisher.address, live, token=TOKEN, **over(reading, timeout_s=10, staging=staging))
    for version in (1, 2):
        await publisher.fence()
        for name, tensor in weights_at(version).items():
            trained[name].held.copy_(tensor)
        await publisher.publish(version, trained)
        await subscriber.stage(after=version - 1)
        subscriber.apply()
    pulled, buckets = subscriber.pulled, subscriber._plan.stream(0, 0)
    await subscriber.close()
    await publisher.close()
    return pulled, len(buckets)


@pytest.mark.parametrize("staging", ["in_place", "shadow"])
def test_nccl_moves_buckets_without_copies_in_host_memory(record, staging):
    trained, live = on_gpu(weights_at(0)), on_gpu(blank())
    publishing, reading, devices, streams = group()
    record.clear()
    pulled, buckets = asyncio.run(moved(trained, live, publishing, reading, staging=staging))
    for name, tensor in weights_at(2).items():
        assert torch.equal(live[name].held, tensor), name
    assert not pulled.repaired
    assert set(devices) == {GPU}
    assert set(streams) == {"side stream"}, "training waits for NCCL"
    for counts in (record.mismatches, record.stray, record.synchronisations, record.uploads):
        assert not counts, record
    assert not [stream for stream in record.streams if "default stream" in stream], record
    if staging == "in_place":  # the hashes alone, at both ends
        down = sum(count for stream, count in record.streams.items() if stream.startswith("to the host"))
        assert down == 2 * 2 * buckets, record
        up = sum(count for stream, count in record.streams.items() if stream.startswith("to the GPU"))
        assert up == 4, record  # the table of the hash, for each stream: of the publisher, the engine and the transport


def test_damage_on_the_way_is_found_on_the_gpu(record):
    trained, live = on_gpu(weights_at(0)), on_gpu(blank())
    publishing, reading, _, _ = group()
    sends = []

    def damaged(tensors, peer, tag, send=publishing._group.send):
        sends.append(tensors)
        if len(sends) == 2:
            broken = tensors[0].clone()
            broken.held[3] ^= 1
            return send([broken], peer, tag)
        return send(tensors, peer, tag)

    publishing._group.send = damaged
    _, buckets = asyncio.run(moved(trained, live, publishing, reading, staging="shadow"))
    for name, tensor in weights_at(2).items():
        assert torch.equal(live[name].held, tensor), name
    assert len(sends) == 2 * buckets + 1


def test_weights_in_host_memory_are_refused(record):
    publishing, *_ = group()
    with pytest.raises(TransportUnavailable, match="moves weights of a GPU"):
        Publisher(weights_at(0), token=TOKEN, **over(publishing))


@pytest.fixture
def shared(monkeypatch):
    """Exported memory by handle, in place of the driver; each export is good for one mapping."""
    exported = {}

    def export(block):
        key = str(len(exported)).encode()
        exported[key] = block
        return cuda_ipc.Handle(key, block.nbytes, 0, b"", 0, b"", False)

    def mapped(handle, device):
        if handle.memory not in exported:
            raise RuntimeError("invalid resource handle")
        return exported.pop(handle.memory)

    monkeypatch.setattr(cuda_ipc, "export", export)
    monkeypatch.setattr(cuda_ipc, "map_exported", mapped)
    return exported


@pytest.mark.parametrize("staging", ["in_place", "shadow"])
def test_cuda_ipc_moves_buckets_from_gpu_to_gpu(record, shared, staging):
    trained, live = on_gpu(weights_at(0)), on_gpu(blank())
    record.clear()
    pulled, buckets = asyncio.run(moved(trained, live, CudaIpc(), CudaIpc(), staging=staging))
    for name, tensor in weights_at(2).items():
        assert torch.equal(live[name].held, tensor), name
    assert not pulled.repaired
    for counts in (record.mismatches, record.stray, record.synchronisations, record.uploads):
        assert not counts, record
    assert not [stream for stream in record.streams if "default stream" in stream], record
    if staging == "in_place":  # the hashes at both ends, and the nonces of two slots
        down = sum(count for stream, count in record.streams.items() if stream.startswith("to the host"))
        assert down == 2 * 2 * buckets + 2, record


def test_a_subscriber_on_another_host_reads_over_tcp(record, shared, monkeypatch):
    trained, live = on_gpu(weights_at(0)), on_gpu(blank())
    asyncio.run(moved(trained, live, CudaIpc(), "auto", staging="shadow"))
    for name, tensor in weights_at(2).items():
        assert torch.equal(live[name].held, tensor), name
    assert not record.mismatches, record
    assert not [stream for stream in record.streams if "default stream, weights" in stream], record


def test_no_handle_is_exported_for_nobody(record, shared):
    """torch keeps a block until each of its handles was mapped and dropped."""
    outlet = CudaIpc().open(bucket_bytes=64, num_slots=2)
    ends = [CudaIpc().attach(None, offer=dict(outlet.offer), memory=[]) for _ in range(2)]
    assert len(ends) == 2 and shared == {}
    outlet.close()


def test_memory_that_cannot_be_mapped_is_named(record, shared):
    outlet = CudaIpc().open(bucket_bytes=64, num_slots=1)
    offer = dict(outlet.offer)
    shared.clear()
    with pytest.raises(TransportUnavailable, match="invalid resource handle"):
        CudaIpc().attach(None, offer=offer, memory=[])
    with pytest.raises(TransportUnavailable, match="not the one it offered"):
        CudaIpc().attach(None, offer=dict(outlet.offer) | {"nonce": "00" * 16}, memory=[])
    with pytest.raises(TransportUnavailable, match="not on a GPU"):
        CudaIpc().attach(None, offer={}, memory=[])


def test_a_bucket_that_a_fence_copied_is_loaded_into_a_slot(record, shared):
    trained, live = on_gpu(weights_at(1)), on_gpu(blank())

    async def leave():
        publisher = Publisher(trained, token=TOKEN, transport=CudaIpc(), settings=sync(bucket_bytes=2048))
        subscriber = Subscriber(publisher.address, live, token=TOKEN, transport=CudaIpc(), settings=sync(timeout_s=10))
        await publisher.publish(1, trained)
        feed = subscriber._feeds()[0]
        feed.borrow(1, keep=True, base=-1)
        await publisher.fence()
        for tensor in trained.values():
            tensor.held.zero_()
        subscriber._puller.pull([feed], subscriber.pulled)
        subscriber._puller.landing.apply(pool=subscriber._pool)
        await subscriber.close()
        await publisher.close()

    asyncio.run(leave())
    for name, tensor in weights_at(1).items():
        assert torch.equal(live[name].held, tensor), name


needs_nixl = pytest.mark.skipif(not any(map(find_spec, NIXL_BUILDS)), reason="needs NIXL, the extra `nixl`")


@pytest.fixture
def vram(monkeypatch):
    """Real NIXL on the memory that the pretend tensors hold."""
    monkeypatch.setattr(nixl_vram, "space_of", lambda device: HOST)


@pytest.fixture
def link():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Link(ours, timeout_s=2, side="subscriber")


@needs_nixl
@pytest.mark.parametrize("staging", ["in_place", "shadow"])
def test_nixl_moves_buckets_from_gpu_to_gpu(record, vram, staging):
    trained, live = on_gpu(weights_at(0)), on_gpu(blank())
    record.clear()
    pulled, buckets = asyncio.run(moved(trained, live, NixlVram(), NixlVram(), staging=staging))
    for name, tensor in weights_at(2).items():
        assert torch.equal(live[name].held, tensor), name
    assert not pulled.repaired
    for counts in (record.mismatches, record.stray, record.synchronisations, record.uploads):
        assert not counts, record
    assert not [stream for stream in record.streams if "default stream" in stream], record
    if staging == "in_place":  # the hashes at both ends, and the nonces of two slots
        down = sum(count for stream, count in record.streams.items() if stream.startswith("to the host"))
        assert down == 2 * 2 * buckets + 2, record


@needs_nixl
def test_nixl_registers_slots_as_memory_of_the_gpu(record):
    """The addresses are host memory in truth, which UCX refuses to register as a GPU's."""
    refused = agent_of("publisher-vram")
    with pytest.raises(TransportUnavailable, match="NIXL cannot register 2 pieces of memory"):
        NixlVram().open(bucket_bytes=64, num_slots=2)
    assert agent_of("publisher-vram") is not refused  # peers cannot load its metadata any more


def test_memory_of_a_gpu_has_its_index():
    assert nixl_vram.space_of(torch.device("cuda", 3)) == Space("VRAM_SEG", 3)


@needs_nixl
def test_nixl_memory_that_is_not_the_offered_is_refused(record, vram, link):
    outlet = NixlVram().open(bucket_bytes=64, num_slots=2)
    offer = outlet.offer["gpu_memory"]
    other = offer.replace(msgspec.json.decode(offer)["nonce"], "00" * 16)
    with pytest.raises(TransportUnavailable, match="other memory than the publisher offered"):
        NixlVram().attach(link, offer={"gpu_memory": other}, memory=[])
    with pytest.raises(TransportUnavailable, match="not understood"):
        NixlVram().attach(link, offer={"gpu_memory": "{}"}, memory=[])
    with pytest.raises(TransportUnavailable, match="does not serve GPU memory"):
        NixlVram().attach(link, offer={}, memory=[])
    inlet = NixlVram().attach(link, offer=outlet.offer, memory=[])
    for slot, num_bytes in ((2, 64), (-1, 64), (0, 65)):
        with pytest.raises(TransferError, match="not offered"):
            inlet.receive(Data(0, num_bytes, 0, (), slot=slot), out=None)
    inlet.close()
    outlet.close()
    outlet.close()


@pytest.fixture
def allocator():
    """torch's real settings of allocators, which a build without CUDA has too."""
    before = torch._C._accelerator_getAllocatorSettings()
    log_choice.cache_clear()
    yield torch._C._accelerator_setAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(before)
    log_choice.cache_clear()


@pytest.mark.parametrize(
    ("settings", "inside", "logged"),
    [
        ("", "", ""),
        ("expandable_segments:False", "expandable_segments:False", ""),
        (
            "max_split_size_mb:100,expandable_segments:True",
            "max_split_size_mb:100,expandable_segments:True,expandable_segments:False",
            "weights: slots on the GPU are allocated outside expandable segments\n",
        ),
    ],
)
def test_slots_are_outside_expandable_segments(
    record, shared, allocator, monkeypatch, capsys, settings, inside, logged
):
    """torch cannot share such a segment with a process that may not read this one's file descriptors."""
    allocator(settings)
    at_allocation, zeros = [], torch.zeros
    monkeypatch.setattr(
        torch,
        "zeros",
        lambda *args, **keys: (
            at_allocation.append(torch._C._accelerator_getAllocatorSettings()) or zeros(*args, **keys)
        ),
    )
    for _ in range(2):
        CudaIpc().open(bucket_bytes=64, num_slots=2).close()
    assert at_allocation == [inside] * 4
    assert torch._C._accelerator_getAllocatorSettings() == settings
    assert capsys.readouterr().err == logged


@pytest.mark.parametrize("transport", [CudaIpc, NixlVram])
def test_without_a_gpu_it_is_unavailable(transport):
    with pytest.raises(TransportUnavailable, match="needs a GPU"):
        transport().open(bucket_bytes=64, num_slots=1)


def test_the_path_of_the_weights_is_logged_once(record, shared, capsys):
    log_choice.cache_clear()
    trained = on_gpu(weights_at(0))
    for transport in ("shm", CudaIpc(), group()[0]):
        asyncio.run(Publisher(trained, token=TOKEN, **over(transport, bucket_bytes=2048)).close())
    asyncio.run(Publisher(weights_at(0), token=TOKEN, settings=sync(bucket_bytes=2048)).close())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("weights: ")]
    paths = ("pinned host", "cuda ipc", "collective", "pageable")
    assert [line for line in lines if "slots" not in line] == [f"weights: {path}" for path in paths]
