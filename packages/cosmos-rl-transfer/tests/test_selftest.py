"""A path between (pretend) GPUs is taken by "auto" once it has passed a test between the two processes."""

import asyncio
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from transfer_samples import TOKEN, blank, sync, weights_at

from cosmos_rl_core.hardware_log import log_choice
from cosmos_rl_transfer.publish import server
from cosmos_rl_transfer.publish.publisher import Publisher
from cosmos_rl_transfer.publish.supply import Supply
from cosmos_rl_transfer.pull import puller
from cosmos_rl_transfer.pull.subscriber import Subscriber
from cosmos_rl_transfer.transports import cuda_ipc, nixl_vram
from cosmos_rl_transfer.transports.base import MappedSlots
from cosmos_rl_transfer.transports.nixl_agent import HOST
from cosmos_rl_transfer.transports.select import between_gpus
from cosmos_rl_transfer.transports.selftest import NUM_ROUNDS, SelfTest, ipc_domain
from doubles.pretend_cuda import pretend_cuda

pytestmark = pytest.mark.cuda_dry
needs_nixl = pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="needs NIXL, the extra `nixl`")
US = 2.0**-20
"""About a microsecond, which sums exactly."""


@pytest.fixture
def record():
    with pretend_cuda() as record:
        torch.cuda.set_device(0)
        log_choice.cache_clear()
        yield record
        log_choice.cache_clear()


class Driver:
    """Memory that is exported and mapped, in place of CUDA's."""

    def __init__(self):
        self.exported, self.mapped = {}, []
        self.at_export = self.at_map = lambda block: block

    def export(self, block):
        key = str(len(self.exported)).encode()
        self.exported[key] = self.at_export(block)
        return cuda_ipc.Handle(key, block.nbytes, 0, b"", 0, b"", False)

    def map_exported(self, handle, device):
        self.mapped.append(handle)
        return self.at_map(self.exported[handle.memory])


@pytest.fixture
def driver(record, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(cuda_ipc, "export", driver.export)
    monkeypatch.setattr(cuda_ipc, "map_exported", driver.map_exported)
    return driver


class Clock:
    """A round over the tested path takes `tested` seconds, one over what is taken otherwise `other`."""

    def __init__(self, tested=US, other=2 * US):
        self._now, self._calls, self._seconds = 0.0, 0, (tested, other)

    def __call__(self):
        rounds, ends = divmod(self._calls, 2)
        self._calls += 1
        self._now += ends * self._seconds[rounds >= NUM_ROUNDS]
        return self._now


@pytest.fixture
def timed(monkeypatch):
    """Set the clock and the limit of tests."""

    def set_to(clock, **options):
        monkeypatch.setattr(puller, "SelfTest", partial(SelfTest, clock=clock, **options))

    set_to(Clock())
    return set_to


def on_gpu(weights):
    return {name: tensor.to("cuda") for name, tensor in weights.items()}


def moved(capsys, *, live=None, reconnects=0, timeout_s=30.0):
    """Move a version to each of so many connections; return the lines about the transport that is read."""
    live = on_gpu(blank()) if live is None else live

    async def move():
        publisher = Publisher(on_gpu(weights_at(1)), token=TOKEN, settings=sync(bucket_bytes=2048, timeout_s=timeout_s))
        subscriber = Subscriber(publisher.address, live, token=TOKEN, settings=sync(timeout_s=30.0))
        for version in range(1, 2 + reconnects):
            await publisher.publish(version, publisher._live._weights or on_gpu(weights_at(1)))
            await subscriber.stage(after=version - 1)
            subscriber.apply()
            assert not subscriber.pulled.repaired
            subscriber._sources.disconnect()
        await subscriber.close()
        await publisher.close()

    asyncio.run(move())
    for name, tensor in weights_at(1).items():
        assert torch.equal(getattr(live[name], "held", live[name]), tensor), name
    return [line for line in capsys.readouterr().err.splitlines() if "read over" in line]


def test_a_path_that_is_exact_and_faster_is_taken(record, driver, timed, capsys):
    record.clear()
    assert moved(capsys) == ["weights are read over cuda_ipc"]
    for counts in (record.mismatches, record.stray, record.synchronisations):
        assert not counts, record
    assert not [stream for stream in record.streams if "default stream, weights" in stream], record


def test_what_is_no_faster_is_not_taken(driver, timed, capsys):
    timed(Clock(2 * US, US))
    reason = "cuda_ipc: it is no faster than shm: 1.1 against 2.1 GB/s"
    assert moved(capsys) == [f"weights are read over shm (not over {reason})"]


def test_memory_that_does_not_follow_the_publishers_is_not_taken(driver, timed, capsys):
    driver.at_map = lambda block: block.clone()
    assert moved(capsys) == ["weights are read over shm (not over cuda_ipc: other bytes arrived than were sent)"]


def failing(block):
    raise RuntimeError("CUDA error: invalid resource handle")


@pytest.mark.parametrize("where", ["at_export", "at_map"])
def test_an_error_of_the_driver_is_the_reason_for_the_other_path(driver, timed, capsys, where):
    setattr(driver, where, failing)
    (line,) = moved(capsys)
    assert line.startswith("weights are read over shm (not over cuda_ipc: ")
    assert "CUDA error: invalid resource handle" in line


def test_a_round_whose_slot_others_got_meanwhile_does_not_count(driver, timed, monkeypatch, capsys):
    made, torn_rounds, receive, begin = [], [], MappedSlots.receive, Supply.__init__

    def noted(self, *args, **options):
        made.append(self)
        begin(self, *args, **options)

    def torn(self, data, *, out):
        packed = receive(self, data, out=out)
        if torn_rounds:
            return packed
        torn_rounds.append(data)
        slots = made[0].route("cuda_ipc")[0].slots
        slots.leave(next(hold.owner for hold in slots._holds if hold is not None))
        return packed ^ 1

    monkeypatch.setattr(Supply, "__init__", noted)
    monkeypatch.setattr(MappedSlots, "receive", torn)
    assert moved(capsys) == ["weights are read over cuda_ipc"]
    assert torn_rounds


@contextmanager
def hanging():
    """A call of the driver that hangs inside; the threads in it have ended afterwards."""
    goes_on = threading.Event()
    yield lambda block: goes_on.wait(60) and block
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "weights-selftest":
            thread.join(30)


@pytest.mark.parametrize("where", ["map", "copy"])
def test_a_driver_that_hangs_is_given_up_and_not_tried_again(driver, timed, capsys, where):
    with hanging() as block:
        if where == "map":
            driver.at_map = block
        timed(Clock() if where == "map" else lambda: 0.0 if is_main() else block(1.0), limit_s=0.2)
        lines = moved(capsys, reconnects=1)
        assert lines == ["weights are read over shm (not over cuda_ipc: the driver did not answer within 0.2 s)"]
        assert len(driver.mapped) == (1 if where == "map" else 2), "two slots, once"


def is_main():
    """Whether this thread is not that of a driver."""
    return threading.current_thread().name != "weights-selftest"


def test_an_export_that_hangs_is_given_up_at_the_publisher(driver, timed, capsys):
    with hanging() as block:
        driver.at_export = block
        lines = moved(capsys, timeout_s=0.8)
    assert lines == ["weights are read over shm (not over cuda_ipc: the driver did not answer within 0.2 s)"]


def test_weights_in_the_engines_host_memory_are_not_tested(driver, timed, capsys):
    assert moved(capsys, live=blank()) == ["weights are read over shm"]
    assert not driver.exported


@pytest.mark.parametrize("elsewhere", ["another-boot ipc:[1]", ""])
@needs_nixl
def test_a_process_that_shares_no_memory_is_read_over_nixl(driver, timed, monkeypatch, capsys, elsewhere):
    """Real NIXL on the memory that the pretend tensors hold."""
    monkeypatch.setattr(nixl_vram, "space_of", lambda device: HOST)
    monkeypatch.setattr(server, "ipc_domain", lambda: elsewhere)
    assert moved(capsys) == ["weights are read over nixl_vram"]
    assert not driver.exported


@needs_nixl
def test_memory_of_a_gpu_that_nixl_cannot_register_leaves_the_other_path(driver, timed, monkeypatch, capsys):
    monkeypatch.setattr(server, "ipc_domain", lambda: "another-boot ipc:[1]")
    (line,) = moved(capsys)
    assert line.startswith("weights are read over shm (not over nixl_vram: NIXL cannot register 2 pieces of memory")


def test_only_auto_offers_paths_to_test_and_none_that_would_leave_the_host_in_plain():
    assert between_gpus("auto", encrypted=False) == ("cuda_ipc", "nixl_vram")
    assert between_gpus("auto", encrypted=True) == ("cuda_ipc",)
    assert between_gpus("shm", encrypted=False) == ()


def test_processes_share_gpu_memory_within_an_ipc_namespace():
    code = "from cosmos_rl_transfer.transports.selftest import ipc_domain; print(ipc_domain())"
    child = [sys.executable, "-c", code]
    assert subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip() == ipc_domain()
    apart = subprocess.run(["unshare", "--ipc", *child], capture_output=True, text=True)
    if apart.returncode:
        pytest.skip(f"no other namespace can be made here: {apart.stderr.strip()}")
    assert apart.stdout.strip() != ipc_domain()
    assert apart.stdout.split()[0] == ipc_domain().split()[0]
