"""The store of a mesh is open as long as its group: torch's threads of a group poll it."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cosmos_rl_core.algorithms.objective import data_term_objective
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.rendezvous import Rendezvous
from cosmos_rl_core.errors import EpochOver
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.train.replicas import WaitLimits
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.wire.channel import serve
from cosmos_rl_core.wire.handshake import make_token
from cosmos_rl_core.workers import mesh as mesh_module
from cosmos_rl_core.workers.context import WorkerContext
from cosmos_rl_core.workers.mesh import PolicyMesh


class Monitored:
    """A group with a thread that polls its store until the group is aborted, as torch's monitor of NCCL does."""

    def __init__(self, group, store):
        self._group, self._store = group, store
        self.polls, self.errors, self.open_at_abort = 0, [], None
        self.aborted = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self):
        while not self.aborted.wait(0.01):
            try:
                assert not self._store.check(["dump"])
                self.polls += 1
            except EpochOver as error:
                self.errors.append(error)
                return

    def wait_for_polls(self, count):
        deadline, enough = time.monotonic() + 30, self.polls + count
        while self.polls < enough and not self.errors and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.polls >= enough, self.errors

    def abort(self):
        self.open_at_abort = not self._store.check(["dump"])
        self.aborted.set()
        self._thread.join(30)


def mesh_of(name, address, token):
    module = nn.Linear(2, 1)
    policy = SimpleNamespace(module=module, weights=lambda: dict(module.named_parameters()))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    trainer = Trainer(
        policy, objective=data_term_objective(1.0), optimizer=optimizer, lr_factor=lambda step: 1.0, max_grad_norm=1.0
    )
    context = WorkerContext(name=name, token=token, timeline=Timeline(process=name), threads=1)
    limits = WaitLimits(timeout_s=30.0)
    return PolicyMesh(context, controller=lambda: address, trainer=trainer, is_over=lambda epoch: False, limits=limits)


@pytest.fixture
def stores(monkeypatch):
    """The stores that were made, which torch's C++ code does not keep alive."""
    made = []

    class Kept(mesh_module.ChannelStore):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(mesh_module, "ChannelStore", Kept)
    return made


@asynccontextmanager
async def joined(tmp_path):
    """Two meshes of epoch 1, the controller's rendezvous, and the names of whoever connected to it."""
    token, rendezvous, connected = make_token(tmp_path / "token"), Rendezvous(), []

    async def on_connect(connection):
        connected.append(connection.peer.name)
        await rendezvous.serve(connection)

    server = await serve("tcp://127.0.0.1:0", token=token, decode=p.ToController, on_connect=on_connect)
    rendezvous.begin(1)
    meshes = [mesh_of(f"policy-{i}", server.address, token) for i in range(2)]
    message = p.Remesh(epoch=1, members=("policy-0", "policy-1"), version=0, lineage=0)
    await asyncio.gather(*(asyncio.to_thread(mesh.join, message) for mesh in meshes))
    try:
        yield meshes, connected
    finally:
        for mesh in meshes:
            mesh.leave()
        await server.close()


def monitored(mesh, store):
    """Put a group that is aborted, as NCCL's, in place of a mesh's own."""
    group = mesh.group
    group._group, group._device = Monitored(group._group, dist.PrefixStore("0", store)), torch.device("cuda")
    return group._group


def wait_until_closed(store):
    deadline = time.monotonic() + 30
    with pytest.raises(EpochOver, match="has left the mesh"):
        while time.monotonic() < deadline:
            store.check(["dump"])


def test_a_monitor_polls_one_open_store_for_the_whole_epoch_and_ends_before_the_store(tmp_path, stores):
    async def epoch():
        async with joined(tmp_path) as (meshes, connected):
            ends = {store._connect.__self__: store for store in stores}
            for mesh in meshes:
                monitor = monitored(mesh, ends[mesh])
                await asyncio.to_thread(monitor.wait_for_polls, 5)
                alone = p.Remesh(epoch=2, members=(mesh._replica,), version=0, lineage=0)
                await asyncio.to_thread(mesh.join, alone)
                assert await asyncio.to_thread(monitor.aborted.wait, 30)
                await asyncio.to_thread(wait_until_closed, ends[mesh])
                assert monitor.open_at_abort and not monitor.errors
            assert sorted(connected) == ["policy-0.0", "policy-1.0"], "a closed store connected again"

    asyncio.run(epoch())


def test_a_call_that_waits_in_a_store_ends_when_the_replica_leaves(tmp_path, stores):
    async def leave():
        async with joined(tmp_path) as (meshes, _):
            waiting = [asyncio.create_task(asyncio.to_thread(store.get, "never set")) for store in stores]
            await asyncio.sleep(0)
            for mesh in meshes:
                mesh.leave()
            for call in waiting:
                with pytest.raises(EpochOver, match="has left the mesh"):
                    await call

    asyncio.run(leave())


def test_a_group_that_was_given_up_is_aborted_once(tmp_path, stores):
    async def leave():
        async with joined(tmp_path) as (meshes, _):
            [store] = [store for store in stores if store._connect.__self__ is meshes[0]]
            monitor = monitored(meshes[0], store)
            calls, abort = [], monitor.abort
            monitor.abort = lambda: (calls.append(1), abort())
            meshes[0].group._give_up([])
            meshes[0].leave()
            await asyncio.to_thread(wait_until_closed, store)
            assert calls == [1]

    asyncio.run(leave())
