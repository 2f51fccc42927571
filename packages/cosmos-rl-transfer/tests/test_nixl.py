import gc
import os
import re
import signal
import socket
import sys
import time
from contextlib import closing
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.weight_sync import NIXL_BUILDS
from cosmos_rl_transfer.errors import PeerLost, TransferError
from cosmos_rl_transfer.testing.conformance import (
    BUCKET_BYTES,
    CHECKS,
    Ends,
    a_killed_publisher_is_noticed,
    live_memory_is_read_in_place,
    silence_ends_by_the_deadline,
    slots_arrive_whole,
)
from cosmos_rl_transfer.testing.sample_exchange import PublisherProcess, SampleReader, Serve
from cosmos_rl_transfer.transports.base import ByteRun, TransportUnavailable
from cosmos_rl_transfer.transports.nixl import Nixl
from cosmos_rl_transfer.transports.nixl_agent import _bindings, agent_of
from cosmos_rl_transfer.wire.link import Link
from cosmos_rl_transfer.wire.messages import Data

pytestmark = pytest.mark.skipif(not any(map(find_spec, NIXL_BUILDS)), reason="needs NIXL, the extra `nixl`")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check):
    check(Ends.of(Nixl))


@pytest.mark.parametrize(
    "check",
    [
        slots_arrive_whole,
        live_memory_is_read_in_place,
        silence_ends_by_the_deadline,
        a_killed_publisher_is_noticed,
    ],
    ids=lambda check: check.__name__,
)
def test_conformance_where_the_kernel_forbids_reading_another_process(check, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")  # agents live as long as their ends, so these are made with it
    check(Ends.of(Nixl))


def announced(num_bytes, *, slot=0, runs=()):
    return Data(bucket=0, num_bytes=num_bytes, hash=0, sums=(), slot=slot, runs=runs)


@pytest.fixture
def link():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Link(ours, timeout_s=2, side="subscriber")


@pytest.fixture
def outlet():
    made = Nixl().open(bucket_bytes=100, num_slots=1)
    yield made
    made.close()


def test_without_the_package_the_line_that_installs_it(monkeypatch):
    gc.collect()  # an agent of an earlier test would be used again
    for package in NIXL_BUILDS:
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"{package}._bindings", raising=False)
    for cuda, requirement in (
        (None, "cosmos-rl-transfer[nixl]"),
        ("13.0", "cosmos-rl-transfer[nixl]"),
        ("12.8", "nixl-cu12>=1.5.1"),
    ):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(TransportUnavailable, match=re.escape(pip_install(requirement))):
            Nixl().open(bucket_bytes=10, num_slots=1)


@pytest.mark.parametrize(("cuda", "chosen"), [(None, "nixl_cu13"), ("13.0", "nixl_cu13"), ("12.8", "nixl_cu12")])
def test_of_two_builds_that_of_torchs_cuda_is_loaded(cuda, chosen, monkeypatch):
    gc.collect()
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for package in NIXL_BUILDS:
        monkeypatch.setitem(sys.modules, f"{package}._bindings", SimpleNamespace(name=package))
    assert _bindings().name == chosen


def test_a_process_has_one_agent_for_each_role_and_none_without_ends(link, outlet):
    inlets = [Nixl().attach(link, offer=outlet.offer, memory=[]) for _ in range(2)]
    assert agent_of("subscriber") is inlets[0]._agent is inlets[1]._agent
    assert agent_of("publisher") is outlet._agent is not inlets[0]._agent
    for inlet in inlets:
        inlet.close()


def test_one_of_two_inlets_may_leave(link, outlet):
    out = np.zeros(100, np.uint8)
    stays, leaves = (Nixl().attach(link, offer=outlet.offer, memory=[out]) for _ in range(2))
    leaves.close()
    outlet.slots[0][:] = 7
    stays.receive(announced(100, runs=outlet.locate([ByteRun(outlet.slots[0], 0)])), out=out)
    assert (out == 7).all()
    stays.close()


def test_agents_that_wait_leave_the_processor_alone(link, outlet):
    inlet = Nixl().attach(link, offer=outlet.offer, memory=[])
    started = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - started < 0.1
    inlet.close()


def test_another_memory_than_the_offered_is_refused(link, outlet):
    with pytest.raises(TransportUnavailable, match="other memory than the publisher offered"):
        Nixl().attach(link, offer={**outlet.offer, "nonce": "00" * 16}, memory=[])


def test_a_publisher_that_cannot_be_read_is_unavailable_with_the_reason(link):
    outlet = Nixl().open(bucket_bytes=100, num_slots=1)
    offer = dict(outlet.offer)
    outlet.close()
    del outlet  # and with it the agent; its memory may still be readable: the nonce is gone
    with pytest.raises(TransportUnavailable, match=r"NIXL (cannot (reach|read) the publisher|read other memory)"):
        Nixl().attach(link, offer=offer, memory=[])


def test_exposing_the_same_memory_again_registers_nothing(outlet):
    live = np.zeros(4096, np.uint8)
    outlet.expose([live[:1000], live[1000:]])
    ((first, _, _),) = outlet.locate([])
    outlet.expose([live])
    assert outlet.locate([]) == ((first, 0, 0),)
    outlet.expose([live[:100]])
    assert outlet.locate([]) == ((first + 1, 0, 0),)


def test_bytes_outside_the_bucket_are_not_written(link, outlet):
    out = np.zeros(100, np.uint8)
    inlet = Nixl().attach(link, offer=outlet.offer, memory=[out])
    address = outlet.slots[0].ctypes.data
    with pytest.raises(TransferError, match="outside its 50"):
        inlet.receive(announced(50, runs=((0, 0, 0), (address, 10, 50))), out=out[:50])
    inlet.close()


def test_a_read_that_stands_still_ends_by_the_deadline(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")  # where the publisher's thread has to answer
    with closing(PublisherProcess.of("nixl", bucket_bytes=BUCKET_BYTES)) as publisher:
        reader = SampleReader(publisher.connect(timeout_s=20), Nixl(), bucket_bytes=BUCKET_BYTES)
        reader.ask(Serve.SLOT, 0)
        data = reader.announced()
        os.kill(publisher.pid, signal.SIGSTOP)
        reader.link.set_deadlines(timeout_s=0.3, idle_s=0.3)
        started = time.monotonic()
        with pytest.raises(PeerLost, match=r"did not arrive within 0.3 s"):
            reader.receive(data)
        assert time.monotonic() - started < 2
        with pytest.raises(PeerLost, match="lost before"):
            reader.receive(data)
        reader.close()
