"""Sums over policy replicas, what happens when one is lost, and the state that a newcomer takes from a peer."""

import asyncio
import gc
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cosmos_rl_core.algorithms.objective import data_term_objective
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.rendezvous import STORE, Rendezvous
from cosmos_rl_core.errors import EpochOver, PeersUnreachable, UserError
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.train import byte_sums, replicas
from cosmos_rl_core.train.byte_sums import Checksum, packed, unpack
from cosmos_rl_core.train.learner import Undo
from cosmos_rl_core.train.replicas import MeshPlace, RankWaits, ReplicaGroup, WaitLimits
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.types import Share, StepResult
from cosmos_rl_core.wire.channel import serve
from cosmos_rl_core.wire.handshake import make_token
from cosmos_rl_core.workers.context import WorkerContext
from cosmos_rl_core.workers.failure import RefusedByController
from cosmos_rl_core.workers.mesh import PolicyMesh
from cosmos_rl_core.workers.steps import PolicySteps


def alone(data):
    """The ranks of a replica of one."""
    return [data]


def group(store, place, count, *, is_over=lambda: False, timeout_s=30.0, peer_s=30.0, waiting=None, newcomers=()):
    return ReplicaGroup(
        store,
        MeshPlace(place, count, newcomers),
        device=torch.device("cpu"),
        is_over=is_over,
        agree=alone,
        limits=WaitLimits(timeout_s=timeout_s, peer_s=peer_s),
        waiting=waiting,
    )


def in_threads(work, count):
    """Run work(place, store) for each place in a thread of its own; return the results, or raise the first error."""
    store = dist.HashStore()
    with ThreadPoolExecutor(count) as pool:
        return [each.result(timeout=60) for each in [pool.submit(work, place, store) for place in range(count)]]


def test_each_replica_gets_the_sum(monkeypatch):
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 40)  # three buckets of float32, one of float64
    shapes = [(3, 2), (5,), (0,), (4, 4), ()]

    def work(place, store):
        mine = [torch.full(shape, float(10**place)) for shape in shapes]
        mine.append(torch.full((3,), float(place), dtype=torch.float64))
        group(store, place, 3).sum(mine)
        return mine

    for totals in in_threads(work, 3):
        assert [tuple(total.shape) for total in totals] == [*shapes, (3,)]
        assert all(torch.equal(total, torch.full_like(total, 111.0)) for total in totals[:-1])
        assert totals[-1].tolist() == [3.0, 3.0, 3.0]
        assert totals[-1].dtype == torch.float64


@pytest.mark.parametrize("unit", [1, 3000])  # together with its length, one message holds 4096 bytes
def test_bytes_of_every_replica_come_in_the_order_of_places(unit):
    def work(place, store):
        return group(store, place, 3).gather(b"x" * place * unit)

    assert in_threads(work, 3) == [[b"", b"x" * unit, b"x" * 2 * unit]] * 3


def test_a_replica_that_never_comes_ends_the_wait_when_the_epoch_is_over():
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        store = StoreThatEnds(over)
        waiting = pool.submit(group, store, 0, 2, is_over=over.is_set)
        over.set()
        with pytest.raises(EpochOver, match="no connection to the other policy replicas"):
            waiting.result(timeout=30)


class Rerouted(dist.Store):
    """A store from which one place reads the addresses of another one with the port of a silent listener."""

    def __init__(self, store, pair, port):
        super().__init__()
        self._store, self._pair, self._port = store, pair, port

    def set(self, key, value):
        self._store.set(key, value)

    def get(self, key):
        value = self._store.get(key)
        address = re.compile(rb"\x02\x00..(\x7f\x00\x00\x01)", re.DOTALL)
        silent = b"\x02\x00" + self._port.to_bytes(2) + b"\x7f\x00\x00\x01"
        return address.sub(silent, value, count=1) if self._pair in key else value

    def wait(self, keys, timeout=None):
        self._store.wait(keys)


def test_replicas_that_cannot_reach_each_other_name_each_other_and_the_third_waits():
    over = threading.Event()

    def work(place, store):
        rerouted = Rerouted(store, "0-1/", silent.getsockname()[1])
        if place < 2:
            with pytest.raises(PeersUnreachable) as found:
                group(rerouted, place, 3, peer_s=1.0)
            return found.value.places
        threading.Timer(2.0, over.set).start()
        with pytest.raises(EpochOver, match="no connection"):
            group(rerouted, place, 3, is_over=over.is_set, peer_s=1.0)
        return ()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert in_threads(work, 3) == [(1,), (0,), ()]


def test_the_others_wait_for_a_newcomer_for_a_short_time_alone(monkeypatch):
    monkeypatch.setattr(replicas, "NEWCOMER_S", 0.5)
    over = threading.Event()

    def work(place, store):
        rerouted = Rerouted(store, "2/", silent.getsockname()[1])
        newcomers, began = () if place == 2 else [2], time.monotonic()
        with pytest.raises(EpochOver) as found:
            group(rerouted, place, 3, newcomers=newcomers, is_over=over.is_set, peer_s=60.0)
        over.set()
        assert time.monotonic() - began < 30
        return found.value.places if isinstance(found.value, PeersUnreachable) else None

    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = in_threads(work, 3)[:2]
    assert (2,) in found and set(found) <= {(2,), None}  # None: another one was the first


def test_a_group_is_kept_until_the_operations_that_were_given_up_have_ended():
    over = threading.Event()

    def work(place, store):
        members = group(store, place, 2, is_over=over.is_set)
        if place == 1:
            assert left.wait(30)  # hangs, with its sockets open
            return
        over.set()
        with pytest.raises(EpochOver):
            members.sum([torch.ones(1000)])
        del members  # torch's destructor would wait for the other one
        gc.collect()
        left.set()

    left = threading.Event()
    in_threads(work, 2)


def test_a_wait_for_other_replicas_is_seen_while_it_can_be_left():
    waits = [RankWaits(), RankWaits()]
    over = threading.Event()

    def work(place, store):
        members = group(store, place, 2, is_over=over.is_set, waiting=waits[place])
        before = waits[place].completed
        members.sum([torch.ones(3)])
        assert waits[place].completed == before + 1
        if place == 1:
            assert left.wait(30)  # hangs, with its sockets open
            return
        threading.Timer(0.2, over.set).start()
        with pytest.raises(EpochOver):
            members.sum([torch.ones(3)])
        assert waits[place].is_now
        assert waits[place].completed == before + 1
        left.set()

    left = threading.Event()
    assert not RankWaits().is_now
    in_threads(work, 2)


class StoreThatEnds(dist.Store):
    """A store in which nobody else sets anything."""

    def __init__(self, over):
        super().__init__()
        self._over = over

    def set(self, key, value):
        pass

    def get(self, key):
        assert self._over.wait(30)
        raise EpochOver("a later mesh was formed")

    def wait(self, keys, timeout=None):
        self.get(keys[0])


def test_a_sum_that_a_hung_replica_does_not_join_is_given_up_and_the_gradients_stay():
    over = threading.Event()

    def work(place, store):
        members = group(store, place, 2, is_over=over.is_set)
        if place == 1:
            assert over.wait(30)  # hangs, with its sockets open
            return None
        gradient = torch.ones(1000)
        threading.Timer(0.2, over.set).start()
        with pytest.raises(EpochOver, match="was lost"):
            members.sum([gradient])
        return gradient

    gradient, _ = in_threads(work, 2)
    assert torch.equal(gradient, torch.ones(1000))


def test_all_ranks_of_a_replica_see_the_loss_of_a_peer_of_one():
    """Rank 1's peer is there, rank 0's is lost: rank 1 gives up too."""

    def work(place, store):
        agree = alone if place else lambda data: [data, b"l"]  # what rank 0 of the same replica says
        members = ReplicaGroup.__new__(ReplicaGroup)
        members._is_over, members._timeout_s, members._agree = (lambda: False), 30, agree
        members._group, members._waiting, members._device = None, RankWaits(), torch.device("cpu")
        with pytest.raises(EpochOver) if place == 0 else nothing():
            members._finish([])

    in_threads(work, 2)


@contextmanager
def nothing():
    yield


def trainer(seed, *, steps=0, hidden=3, layers=2, dtype=torch.float32, frozen=0):
    """A trainer of a small network after some steps of Adam."""
    torch.manual_seed(seed)
    sizes = [4, *[hidden] * (layers - 1), 2]
    module = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes))).to(dtype)
    trained = [parameter for layer in module[frozen:] for parameter in layer.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    policy = SimpleNamespace(module=module, weights=lambda: dict(module.named_parameters()))
    for step in range(steps):
        module(torch.full((2, 4), 1.0 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    built = Trainer(
        policy, objective=data_term_objective(1.0), optimizer=optimizer, lr_factor=lambda step: 1.0, max_grad_norm=1.0
    )
    built.version = steps
    return built


def values(of):
    state = of.optimizer.state
    parameters = list(of.policy.module.parameters())
    return [*(p.detach() for p in parameters), *(state[p][key] for p in parameters for key in sorted(state[p]))]


def meshes_of(*, models=None):
    """Makes the mesh of a place and its trainer."""

    def mesh(place, mine):
        context = WorkerContext(name=f"policy-{place}", token=b"", timeline=Timeline(process="test"), threads=1)
        found = PolicyMesh(
            context,
            controller=str,
            trainer=mine,
            is_over=lambda epoch: False,
            limits=WaitLimits(timeout_s=30.0),
            models=models(mine) if models else {},
        )
        found.members = ("policy-0", "policy-1", "policy-2")
        return found

    return mesh


def exchange(trainers, *, version, **options):
    """Let replicas with these trainers exchange outlines and state; return each one's result or error."""
    meshes, over = meshes_of(**options), threading.Event()

    def work(place, store):
        mesh = meshes(place, trainers[place])
        try:
            return mesh._catch_up(group(store, place, len(trainers), is_over=over.is_set), version=version)
        except (EpochOver, UserError) as error:
            if "was lost" in str(error):  # and reports it: a new epoch begins
                over.set()
            return error

    return in_threads(work, len(trainers))


@pytest.mark.parametrize("piece_bytes", [byte_sums.PIECE_BYTES, 16])  # of 16: tensors are cut, and put together
def test_a_newcomer_has_weights_and_optimizer_state_of_its_peer_to_the_bit(monkeypatch, piece_bytes):
    monkeypatch.setattr(byte_sums, "PIECE_BYTES", piece_bytes)
    trainers = [trainer(seed=place, steps=0 if place else 3) for place in range(3)]
    assert exchange(trainers, version=3) == [False, True, True]
    old, *others = map(values, trainers)
    for new in others:
        assert len(old) == len(new) == 4 + 3 * 4
        assert all(torch.equal(*pair) for pair in zip(old, new))
    assert [each.version for each in trainers] == [3, 3, 3]


def test_the_others_wait_for_the_state_of_a_newcomer_longer_than_for_a_sum(monkeypatch):
    """It is sent for longer than the limit of an operation, and one of three has nothing to do meanwhile."""
    monkeypatch.setattr(byte_sums, "PIECE_BYTES", 16)
    add = Checksum.add
    monkeypatch.setattr(Checksum, "add", lambda self, data: (time.sleep(0.1), add(self, data)))
    waits = [RankWaits() for _ in range(3)]

    def work(place, store):
        members = group(store, place, 3, timeout_s=1.0, waiting=waits[place])
        before, mine = waits[place].completed, torch.full((100,), float(place))
        if place == 0:
            members.send([mine], to=[1])
        elif place == 1:
            members.receive([mine], source=0)
        else:
            members.wait_for(0)
        return mine, waits[place].completed - before

    (_, sent), (received, counted), _ = in_threads(work, 3)
    assert torch.equal(received, torch.zeros(100))
    assert sent >= 25 and counted >= 25, "pieces did not count as progress"


def test_replicas_that_begin_with_other_weights_take_those_of_the_first():
    trainers = [trainer(seed=seed) for seed in (0, 1, 0)]
    assert exchange(trainers, version=0) == [False, True, False]
    assert all(torch.equal(*pair) for pair in zip(values(trainers[0]), values(trainers[1])))


def frozen_beside(value):
    """Models with weights that are not trained."""

    def models(mine):
        frozen = nn.Parameter(torch.full((3,), value[mine.version]), requires_grad=False)
        return {"reference": SimpleNamespace(tensors=lambda: [frozen, torch.rand(3)])}

    return models


@pytest.mark.parametrize(
    ("other", "options", "text"),
    [
        ({"hidden": 5}, {}, r"model/0.bias is float32 \[5\] here and float32 \[3\] there; start it with"),
        ({"layers": 3}, {}, r"model/2.bias is only here"),
        ({"dtype": torch.float64}, {}, r"model/0.bias is float64 \[3\] here and float32 \[3\] there"),
        ({"frozen": 1}, {}, r"0.bias is trained only there"),
        (
            {},
            {"models": frozen_beside([1.0, 0.0])},
            r"the frozen weights of its reference have other values; start it with the same files of the model",
        ),
    ],
)
def test_a_replica_that_cannot_train_with_the_others_is_named_on_both_sides(other, options, text):
    trainers = [trainer(seed=0, steps=1), trainer(seed=1, **other)]
    before = [value.clone() for value in values(trainers[0])]
    first, second = exchange(trainers, version=1, **options)
    assert isinstance(second, RefusedByController) and re.match(f"cannot train with policy-0: {text}", str(second))
    assert isinstance(first, EpochOver) and str(first) == "policy-1 cannot train with policy-0"
    assert all(torch.equal(*pair) for pair in zip(before, values(trainers[0])))


def test_equal_frozen_weights_are_no_difference():
    trainers = [trainer(seed=0, steps=1), trainer(seed=1)]
    assert exchange(trainers, version=1, models=frozen_beside([1.0, 1.0])) == [False, True]


def test_damaged_state_is_sent_again(monkeypatch):
    damages = [1]

    def flip(data, piece):
        unpack(data, piece)
        if damages:
            damages.pop()
            data[5] ^= 4

    monkeypatch.setattr(replicas, "unpack", flip)
    trainers = [trainer(seed=0, steps=1), trainer(seed=1)]
    _, error = exchange(trainers, version=1)
    assert isinstance(error, EpochOver)
    assert trainers[1].version == 0
    assert exchange(trainers, version=1) == [False, True]


@pytest.mark.parametrize("sends", [True, False], ids=["it receives", "it sends"])
def test_a_peer_that_dies_before_a_transfer_is_lost_and_nothing_else_happens(sends):
    """gloo raises at the call of a send or receive if the connection has closed."""

    def work(place, store):
        members = group(store, place, 2)
        if place == 1:
            del members  # its sockets close
            gc.collect()
            return
        deadline = time.monotonic() + 20
        with pytest.raises(RuntimeError):
            while time.monotonic() < deadline:
                members._group.send([torch.ones(10)], 1, 0)
        with pytest.raises(EpochOver, match="was lost"):
            members.send([torch.ones(10)], to=[1]) if sends else members.receive([torch.ones(10)], source=1)

    in_threads(work, 2)


def test_what_was_given_up_writes_nothing_more():
    """The state may be received anew while an operation of the old mesh still runs."""
    over = threading.Event()

    def work(place, store):
        members = group(store, place, 2, is_over=over.is_set)
        if place == 0:
            assert over.wait(30)
            assert left.wait(30)
            members._group.send([packed([torch.ones(80).view(torch.uint8)], torch.device("cpu"))], 1, 0).wait()
            return None
        mine = torch.zeros(80)
        threading.Timer(0.2, over.set).start()
        with pytest.raises(EpochOver):
            members.receive([mine], source=0)
        left.set()
        return mine, members

    left = threading.Event()
    _, (mine, members) = in_threads(work, 2)
    time.sleep(0.2)  # it would be written by now
    assert torch.equal(mine, torch.zeros(80))
    del members


class FakeNccl:
    """A group whose operations never end unless it is aborted."""

    def __init__(self):
        self.aborted = threading.Event()

    def allreduce(self, tensors):
        return SimpleNamespace(is_completed=self.aborted.is_set, wait=lambda: None)

    def abort(self):
        self.aborted.set()


def test_a_group_that_can_be_aborted_is():
    over = threading.Event()
    members = ReplicaGroup.__new__(ReplicaGroup)
    members._is_over, members._timeout_s, members._agree = over.is_set, 30, alone
    members._device, members._waiting, members._group = torch.device("cuda"), RankWaits(), FakeNccl()
    members._aborting = None
    threading.Timer(0.1, over.set).start()
    with pytest.raises(EpochOver, match="was lost"):
        members.sum([torch.ones(3)])
    assert members._group.aborted.wait(10)


def test_a_watchdog_that_would_end_the_process_is_off_for_groups_between_replicas(monkeypatch):
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    with replicas._member_may_die():
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    with replicas._member_may_die():
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_a_digest_depends_on_every_bit_and_on_the_order():
    device = torch.device("cpu")
    tensors = [torch.arange(3, dtype=torch.float32), torch.ones(3, dtype=torch.bfloat16)]
    before = byte_sums.digest(tensors, device)
    assert before == byte_sums.digest([each.clone() for each in tensors], device)
    assert before != byte_sums.digest(reversed(tensors), device)
    for tensor in tensors:
        for i in range(8 * tensor.nbytes):
            data = tensor.view(torch.uint8)
            data[i // 8] ^= 1 << i % 8
            assert byte_sums.digest(tensors, device) != before
            data[i // 8] ^= 1 << i % 8


def test_updates_that_were_taken_before_a_loss_are_undone():
    mine = trainer(seed=0, steps=2)
    before = [value.clone() for value in values(mine)]
    undo = Undo(mine.optimizer)
    mine.policy.module(torch.ones(2, 4)).sum().backward()
    mine.optimizer.step()
    assert not all(torch.equal(*pair) for pair in zip(before, values(mine)))
    undo()
    assert all(torch.equal(*pair) for pair in zip(before, values(mine)))


def test_the_state_of_a_first_update_is_undone_too():
    mine = trainer(seed=0)
    undo = Undo(mine.optimizer)
    mine.policy.module(torch.ones(2, 4)).sum().backward()
    mine.optimizer.step()
    undo()
    assert not mine.optimizer.state


def test_shares_of_several_replicas_are_disjoint_and_complete():
    shares = [Share(index=rank, count=2).of_replica(place, 3) for place in range(3) for rank in range(2)]
    assert [share.index for share in shares] == list(range(6))
    assert {share.count for share in shares} == {6}


def test_keys_of_an_epoch_that_is_over_are_gone():
    store = Rendezvous()
    store.begin(1)
    assert store.answer(p.StoreSet(1, "a", b"x")) == p.StoreValue()
    assert store.answer(p.StoreGet(1, "a")) == p.StoreValue(value=b"x")
    assert store.answer(p.StoreGet(2, "a")) == p.StoreValue()  # this rank was told first
    store.begin(2)
    assert store.answer(p.StoreGet(1, "a")) == p.StoreValue(over=True)
    assert store.answer(p.StoreGet(2, "a")) == p.StoreValue()
    with pytest.raises(ValueError, match="bytes under"):
        store.answer(p.StoreSet(2, "b", b"x" * 100_000))


def test_replicas_meet_at_the_controller_and_the_one_that_is_behind_catches_up(tmp_path):
    token = make_token(tmp_path / "token")
    rendezvous = Rendezvous()
    roles = []

    async def on_connect(connection):
        roles.append(connection.peer.role)
        await rendezvous.serve(connection)

    async def meet():
        server = await serve("tcp://127.0.0.1:0", token=token, decode=p.ToController, on_connect=on_connect)
        rendezvous.begin(4)
        message = p.Remesh(epoch=4, members=("policy-1", "policy-0"), version=3, lineage=0)
        meshes = [mesh_of(f"policy-{i}", server.address, token, steps=3 * i) for i in range(2)]
        caught_up = await asyncio.gather(*(asyncio.to_thread(mesh.join, message) for mesh in meshes))
        for mesh in meshes:
            mesh.leave()
        await server.close()
        return meshes, caught_up

    (first, second), caught_up = asyncio.run(meet())
    assert roles == [STORE] * 2
    assert caught_up == [True, False]
    assert (first.place, second.place, first.leads, second.leads) == (1, 0, False, True)
    assert all(torch.equal(*pair) for pair in zip(values(first._trainer), values(second._trainer)))
    assert first._trainer.version == 3


def mesh_of(name, address, token, *, steps):
    context = WorkerContext(name=name, token=token, timeline=Timeline(process=name), threads=1)
    mine = trainer(seed=steps, steps=steps)
    return PolicyMesh(
        context,
        controller=lambda: address,
        trainer=mine,
        is_over=lambda epoch: False,
        limits=WaitLimits(timeout_s=30.0),
    )


class Link:
    """A controller's link with the messages it will pass on."""

    def __init__(self, *messages):
        self.messages, self.sent, self.requested, self.lost = list(messages), [], [], []

    def request_batch(self, step, *, epoch):
        self.requested.append((step, epoch))

    async def batch(self):
        return self.messages.pop(0)

    committed = batch

    async def send(self, message):
        self.sent.append(message)

    def peers_lost(self, epoch, reason, suspects=()):
        self.lost.append(epoch)


def remesh(epoch, version=0):
    return p.Remesh(epoch=epoch, members=("policy-0",), version=version, lineage=0)


class Replica:
    """A rank whose batches are the messages themselves."""

    def __init__(self, *, fails=(), cut_off=()):
        """fails: epochs in which a replica is lost while the batch is made. cut_off: epochs that cannot be joined."""
        self._fails, self._cut_off = fails, cut_off
        self.calls = []

    async def before_step(self, step):
        self.calls.append(f"before step {step}")

    async def after_steps(self):
        self.calls.append("after steps")

    async def idle(self):
        self.calls.append("idle")

    async def join(self, message):
        if message.epoch in self._cut_off:
            raise EpochOver("no connection")
        return message.version

    async def batch(self, message):
        if message.epoch in self._fails:
            raise EpochOver("a policy replica of the mesh was lost")
        return message

    async def written(self):
        pass

    async def finish_step(self, committed):
        pass


def steps_of(link, **options):
    return PolicySteps(link, Replica(**options), Timeline(process="policy"))


def test_the_held_out_loss_is_due_before_the_wait_for_a_batch_and_the_profile_ends_after_the_last():
    steps = steps_of(Link(remesh(1), p.Batch(0, 1, (1,)), None))

    async def play():
        await steps.next_batch(0)
        return await steps.next_batch(1)

    assert asyncio.run(play()) is None
    assert steps._replica.calls == ["before step 0", "idle", "idle", "before step 1", "idle", "after steps"]


def test_a_step_whose_mesh_changed_is_redone_in_the_new_epoch():
    first, again = p.Batch(5, 1, (1, 2)), p.Batch(5, 2, (1, 2))
    link = Link(remesh(1, 5), first, remesh(2, 5), remesh(2, 5), first, again, p.Committed(5, 3, ()))

    async def play():
        steps = steps_of(link)
        assert await steps.next_batch(5) == first
        with pytest.raises(EpochOver, match="epoch 2 began before step 5"):
            await steps.commit(5)
        assert await steps.next_batch(5) == again, "a batch of an earlier epoch is passed over"
        await steps.commit(5)
        await steps.report(StepResult(policy_version=6, metrics={}), {})

    asyncio.run(play())
    assert link.requested == [(5, 1), (5, 2), (6, 2)]
    assert [message.epoch for message in link.sent if isinstance(message, p.Vote)] == [1, 2]


def test_a_batch_whose_parts_could_not_be_put_together_is_asked_for_in_the_next_epoch():
    again = p.Batch(5, 2, (1, 2), part=(1, 2))
    link = Link(remesh(1, 5), p.Batch(5, 1, (1, 2), part=(1,)), remesh(2, 5), again)
    assert asyncio.run(steps_of(link, fails={1}).next_batch(5)) == again
    assert link.requested == [(5, 1), (5, 2)]
    assert link.lost == [1]


def test_a_newcomer_asks_for_the_step_after_the_weights_it_was_given():
    link = Link(remesh(7, 40), p.Batch(40, 7, (1,)))
    assert asyncio.run(steps_of(link).next_batch(0)).step == 40
    assert link.requested == [(40, 7)]


def test_a_mesh_that_cannot_be_joined_is_reported_and_the_next_one_is():
    link = Link(remesh(1), remesh(2), p.Batch(0, 2, (1,)))
    assert asyncio.run(steps_of(link, cut_off={1}).next_batch(0)).epoch == 2
    assert link.lost == [1]
    assert link.requested == [(0, 2)]


def test_a_step_that_could_not_be_summed_is_reported_before_it_is_redone():
    link = Link(remesh(1), p.Batch(0, 1, (1,)), remesh(2), p.Batch(0, 2, (1,)))

    async def play():
        steps = steps_of(link)
        await steps.next_batch(0)  # and its gradients could not be summed
        return await steps.next_batch(0)

    assert asyncio.run(play()).epoch == 2
    assert link.lost == [1]
