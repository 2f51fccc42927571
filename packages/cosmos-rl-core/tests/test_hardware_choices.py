"""Choices that depend on the hardware, with the device as an argument: float8, compilation, TF32, interfaces."""

import asyncio
import socket
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.hardware_log import log_choice
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.parallel import device as devices
from cosmos_rl_core.parallel import float8
from cosmos_rl_core.parallel.config import MemorySection, ParallelSection
from cosmos_rl_core.parallel.gradients import clip_gradients
from cosmos_rl_core.parallel.remat import wants_compile
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.workers import node as workers_node
from cosmos_rl_core.workers import ranks
from cosmos_rl_core.workers.context import Assignment, WorkerContext
from cosmos_rl_core.workers.main import use_expandable_segments
from cosmos_rl_core.workers.node import Node, interface_of, use_interface
from doubles.pretend_cuda import pretend_cuda
from doubles.ranks import run_ranks

SELECTIVE = {"activation_checkpointing": "selective"}
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def fresh_log():
    log_choice.cache_clear()


@pytest.mark.parametrize(
    ("device", "capability", "has"),
    [(CPU, (9, 0), False), (GPU, (8, 0), False), (GPU, (8, 9), True), (GPU, (9, 0), True)],
)
def test_float8_runs_on_the_hardware_of_the_given_device(monkeypatch, device, capability, has):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda asked: capability if asked == device else (0, 0))
    assert float8.has_float8(device) is has


@pytest.mark.parametrize(("has", "text"), [(True, "hardware"), (False, "emulated")])
@pytest.mark.filterwarnings("ignore")
def test_a_model_on_the_cpu_that_trains_on_a_gpu_is_not_emulated(monkeypatch, capsys, has, text):
    pytest.importorskip("torchao")
    monkeypatch.setattr(float8, "has_float8", lambda device: has and device == GPU)
    network = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    for _ in range(2):
        float8.use_float8(network, "tensorwise", device=GPU)
    assert network[0].config.emulate is not has
    assert capsys.readouterr().err == f"float8: {text} (tensorwise, cuda)\n"


@pytest.mark.filterwarnings("ignore")
def test_float8_that_is_not_compiled_has_a_remark(monkeypatch, capsys):
    pytest.importorskip("torchao")
    monkeypatch.setattr(float8, "has_float8", lambda device: True)
    float8.use_float8(nn.Sequential(nn.Linear(16, 16)), "rowwise", device=GPU, compiled=False)
    assert capsys.readouterr().err.endswith("scaled in passes of its own: compile = true\n")


@pytest.mark.parametrize(
    ("section", "device", "keys", "compiled", "text"),
    [
        ({}, CPU, {}, False, ""),
        ({}, GPU, {}, True, "compile: each block\n"),
        ({}, GPU, {"toolchain": "no Triton"}, False, "compile: off (no Triton)\n"),
        ({}, GPU, {"obstacle": "experts"}, False, "compile: off (experts)\n"),
        (SELECTIVE, GPU, {}, False, 'compile: off (activation_checkpointing = "selective")\n'),
        ({"compile": True}, CPU, {"obstacle": "experts"}, True, ""),
        ({"compile": False}, GPU, {}, False, ""),
    ],
)  # fmt: skip
def test_blocks_are_compiled_by_default_on_a_gpu(monkeypatch, capsys, section, device, keys, compiled, text):
    monkeypatch.setattr("cosmos_rl_core.parallel.remat._missing_toolchain", lambda: "")
    assert wants_compile(MemorySection(**section), device=device, **keys) is compiled
    assert capsys.readouterr().err == text


def test_a_replica_that_shards_layers_is_not_compiled_unless_the_recipe_says_so(monkeypatch, capsys):
    monkeypatch.setattr("cosmos_rl_core.parallel.remat._missing_toolchain", lambda: "")
    monkeypatch.setattr(devices, "own_device", lambda: GPU)
    assert ModelSetup(parallel=ParallelSection(dp_shard=8)).compiles()
    assert not ModelSetup(parallel=ParallelSection(tp=2, cp=4)).compiles()
    assert "compile: off (cp = 4, tp = 2)" in capsys.readouterr().err


def test_other_ranks_do_not_repeat_the_log(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    log_choice("attention: flash")
    assert capsys.readouterr().err == ""


def test_nccl_is_bound_to_the_ranks_gpu(monkeypatch):
    assert ranks._backend() == ("gloo", None)
    current = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert ranks._backend() == ("cpu:gloo,cuda:nccl", GPU)
    assert current == [GPU]


def norm_with_an_idle_rank(rank, world_size):
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0]) if rank == 0 else None
    return {"norm": float(clip_gradients([parameter], max_norm=0.0, num_stages=2, device=CPU))}


def test_a_rank_without_gradients_adds_its_zero_on_the_device_of_the_mesh():
    assert [float(found["norm"]) for found in run_ranks(norm_with_an_idle_rank, 2)] == [5.0, 5.0]


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""  # an address for documentation, RFC 5737


@pytest.mark.parametrize(
    ("node", "controller"),
    [(Node(num_nodes=2, rendezvous="10.0.0.1:4000"), "tcp://127.0.0.1:1"), (Node(), "tcp://10.0.0.9:1")],
    ids=["the first machine of a replica", "the controller of a worker of one machine"],
)
def test_libraries_use_the_interface_that_leads_to_the_others(node, controller, monkeypatch, capsys):
    monkeypatch.setattr(workers_node, "interface_of", {"10.0.0.1": "eth1"}.__getitem__)
    monkeypatch.setattr(
        workers_node, "worker_address", {"tcp://10.0.0.9:1": "10.0.0.1", "tcp://127.0.0.1:1": "127.0.0.1"}.__getitem__
    )
    monkeypatch.setattr(workers_node, "rdma_devices", lambda: [])
    environment = {}
    use_interface(node, environment, controller=controller)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1", "UCX_NET_DEVICES": "eth1"}
    assert capsys.readouterr().err == "network interfaces: gloo eth1, nccl =eth1, ucx eth1\n"


def test_with_rdma_devices_ucx_chooses(monkeypatch, capsys):
    monkeypatch.setattr(workers_node, "interface_of", lambda host: "eth1")
    monkeypatch.setattr(workers_node, "worker_address", lambda controller: "10.0.0.1")
    monkeypatch.setattr(workers_node, "rdma_devices", lambda: ["mlx5_0"])
    environment = {}
    use_interface(Node(), environment, controller="tcp://10.0.0.9:1")
    assert "ucx its own choice" in capsys.readouterr().err
    assert "UCX_NET_DEVICES" not in environment


def test_the_users_interfaces_stay(monkeypatch, capsys):
    monkeypatch.setattr(workers_node, "interface_of", lambda host: "")
    node, environment = Node(num_nodes=2, rendezvous="10.0.0.1:4000"), {"NCCL_SOCKET_IFNAME": "ib0"}
    use_interface(node, environment, controller="tcp://10.0.0.1:1")
    assert environment == {"NCCL_SOCKET_IFNAME": "ib0"}
    assert "gloo its own choice, nccl ib0" in capsys.readouterr().err


@pytest.mark.parametrize(("initialized", "identity"), [(True, "GPU-7"), (False, "")])
def test_a_worker_knows_the_gpu_that_it_uses(initialized, identity, monkeypatch):
    """A process whose children use the GPU makes no context on it to ask."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-7"))
    assert devices.gpu_identity() == identity


@pytest.mark.parametrize("name", ["", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_users_allocator_settings_stay(name):
    given = {name: "max_split_size_mb:128"} if name else {}
    environment = dict(given)
    use_expandable_segments(environment)
    assert environment == (given or {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})


def test_one_machine_uses_the_loopback_interface():
    environment = {}
    use_interface(Node(ranks_per_node=2), environment, controller="tcp://127.0.0.1:1")
    assert environment == {"GLOO_SOCKET_IFNAME": "lo"}


def test_another_machine_asks_the_route(monkeypatch):
    """The address of a socket connected to the rendezvous is this machine's on that route."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        node = Node(index=1, num_nodes=2, rendezvous=f"127.0.0.1:{server.getsockname()[1]}")
        assert interface_of(node.address_among_machines()) == "lo"


@pytest.mark.parametrize("index", [0, 1])
def test_a_machine_waits_for_the_name_of_the_first_one(index, monkeypatch, capsys):
    """A platform's DNS has the name of a pod once it runs; the first machine's own takes a moment too."""
    answers = iter([socket.gaierror(-2, "Name or service not known")] * 2)
    resolved = socket.getaddrinfo

    def later(host, *arguments, **options):
        if host == "pod-0.run" and (error := next(answers, None)):
            raise error
        return resolved("127.0.0.1" if host == "pod-0.run" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", later)
    monkeypatch.setattr(workers_node, "RETRY_S", 0.0)
    node, environment = Node(index=index, num_nodes=2, rendezvous="pod-0.run:4000"), {}
    use_interface(node, environment, controller="tcp://127.0.0.1:1", join_s=60.0)
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    waits, chosen = capsys.readouterr().err.splitlines()
    assert (
        waits
        == "waiting for pod-0.run:4000: cannot reach the replica's first machine pod-0.run: Name or service not known"
    )
    assert chosen.startswith("network interfaces: gloo lo, nccl =lo")


def test_a_first_machine_that_stays_unknown_is_an_error_with_its_name():
    node = Node(index=1, num_nodes=2, rendezvous="pod-0.invalid:4000")
    with pytest.raises(UserError, match=r"cannot reach the replica's first machine pod-0\.invalid: "):
        use_interface(node, {}, controller="tcp://127.0.0.1:1")


def test_a_worker_of_several_ranks_waits_for_the_name_of_the_controller(monkeypatch, capsys):
    answers = iter([UserError("cannot reach controller.run")] * 2)

    def later(controller):
        if error := next(answers, None):
            raise error
        return "127.0.0.1"

    monkeypatch.setattr(workers_node, "worker_address", later)
    monkeypatch.setattr(workers_node, "RETRY_S", 0.0)
    environment = {}
    use_interface(Node(ranks_per_node=2), environment, controller="tcp://controller.run:1", wait_s=60.0)
    assert environment["NCCL_SOCKET_IFNAME"] == "=lo"
    assert capsys.readouterr().err.startswith("waiting for tcp://controller.run:1: cannot reach controller.run\n")


@pytest.mark.cuda_dry
@pytest.mark.parametrize(("tf32", "text"), [(True, "TF32"), (False, "exact")])
def test_float32_products_use_tf32_unless_the_recipe_says_no(capsys, tf32, text):
    class Config:
        class run:
            pass

    Config.run.tf32 = tf32
    context = WorkerContext(name="", token=b"", timeline=Timeline(""), threads=None, shares_process=True)
    keys = dict.fromkeys(("domain", "compute", "run_dir", "shares_run_dir", "welcome"))
    with pretend_cuda():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not tf32
        Assignment(context=context, config=Config(), **keys).prepare_torch()
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is tf32
    assert capsys.readouterr().err == f"float32 matrix products: {text}\n"


@pytest.mark.cuda_dry
def test_the_threads_of_a_worker_have_its_gpu():
    """Of `asyncio.to_thread` and of executors, as a worker sets them up; a bare thread is reported."""

    def copy():
        return torch.ones(3, device="cuda:0").cpu()

    with pretend_cuda() as record:
        from concurrent.futures import ThreadPoolExecutor

        async def work():
            threads = ThreadPoolExecutor(initializer=devices.use_device)
            asyncio.get_running_loop().set_default_executor(threads)
            await asyncio.to_thread(copy)

        asyncio.run(work())
        assert not record.stray
        bare = threading.Thread(target=copy)
        bare.start()
        bare.join()
        assert record.stray
