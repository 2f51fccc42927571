"""Gradients are summed over the policy replicas in a window of buckets, with the bits of one operation for all."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cosmos_rl_core.errors import EpochOver
from cosmos_rl_core.train import replicas
from cosmos_rl_core.train.replicas import MeshPlace, ReplicaGroup, WaitLimits
from cosmos_rl_core.train.trainer import Trainer

COUNT = 3


def meet(store, place, *, count=COUNT, agree=lambda data: [data], is_over=lambda: False):
    return ReplicaGroup(
        store,
        MeshPlace(place, count),
        device=torch.device("cpu"),
        is_over=is_over,
        agree=agree,
        limits=WaitLimits(timeout_s=30.0),
    )


def in_threads(work, count=COUNT):
    store = dist.HashStore()
    with ThreadPoolExecutor(count) as pool:
        return [each.result(timeout=60) for each in [pool.submit(work, place, store) for place in range(count)]]


class Counted:
    """A group of one whose sums are there at once, and which notes how many of its buffers exist at a time."""

    def __init__(self):
        self._buffers, self.most = [], 0

    def allreduce(self, tensors):
        self._buffers = [each for each in self._buffers if each() is not None] + [weakref.ref(tensors[0])]
        self.most = max(self.most, len(self._buffers))
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)


def gradients_of(place):
    generator = torch.Generator().manual_seed(place)
    shapes = [*((7, 3) for _ in range(30)), (), (0,), (500,), *((11,) for _ in range(60))]
    rows = [torch.randn(shape, generator=generator) for shape in shapes]
    return [*rows, torch.randn(4, 6, generator=generator).t(), torch.randn(9, generator=generator, dtype=torch.float64)]


def all_at_once(group, tensors):
    """The sums as one operation for each bucket, all begun before the first is waited for."""
    buckets = list(replicas._buckets(tensors))
    flats = [torch.cat([tensors[i].reshape(-1) for i in bucket]) for bucket in buckets]
    for work in [group._group.allreduce([flat]) for flat in flats]:
        work.wait()
    totals = {}
    for bucket, flat in zip(buckets, flats):
        parts = flat.split([tensors[i].numel() for i in bucket])
        totals |= {i: part.view(tensors[i].shape) for i, part in zip(bucket, parts)}
    return [totals[i] for i in range(len(tensors))]


def test_at_most_a_window_of_buckets_exists(monkeypatch):
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 200)
    members, mine = meet(dist.HashStore(), 0, count=1), gradients_of(0)
    assert len(list(replicas._buckets(mine))) > 3 * replicas.WINDOW
    members._group = counted = Counted()
    members.sum(mine)
    assert counted.most == replicas.WINDOW
    assert all(torch.equal(*pair) for pair in zip(mine, gradients_of(0)))


def test_the_sums_have_the_bits_of_one_operation_for_each_bucket(monkeypatch):
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 200)

    def work(place, store):
        members, mine = meet(store, place), gradients_of(place)
        expected = all_at_once(members, gradients_of(place))
        members.sum(mine)
        return expected, mine

    for expected, mine in in_threads(work):
        assert all(torch.equal(*pair) for pair in zip(expected, mine))


def test_a_bucket_larger_than_half_a_window_is_summed_with_one_other_half(monkeypatch):
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 40)
    large, small = torch.ones(100), torch.ones(10)
    assert [len(half) for half in replicas._halves([large, small, small, small, small, small, large])] == [1, 4, 1, 1]


def test_ranks_of_a_replica_with_different_numbers_of_buckets_exchange_as_often(monkeypatch):
    """Stages of a pipeline have different parameters; every exchange takes all ranks of a replica."""
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 40)
    together = threading.Barrier(2, timeout=30)
    said = [b"", b""]

    def work(rank, _):
        def agree(data):
            said[rank] = data
            together.wait()
            both = list(said)
            together.wait()
            return both

        members = meet(dist.HashStore(), 0, count=1, agree=agree)
        mine = [torch.full((10,), 2.0) for _ in range(20 if rank else 3)]
        members.sum(mine)
        return members.gather(b"next"), mine

    for gathered, mine in in_threads(work, 2):
        assert gathered == [b"next"]
        assert all(torch.equal(each, torch.full((10,), 2.0)) for each in mine)


def test_gradients_that_may_be_half_summed_are_dropped():
    over = threading.Event()
    module = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    trainer = Trainer(None, objective=None, optimizer=optimizer, lr_factor=lambda step: 1.0, max_grad_norm=1.0)
    module(torch.ones(1, 3)).sum().backward()

    def work(place, store):
        members = meet(store, place, count=2, is_over=(lambda: False) if place else over.is_set)
        if place == 1:
            members.gather(b"\1\1")
            assert left.wait(30)  # hangs before the sum, with its sockets open
            return
        finish = members._finish

        def last(operations, **options):
            if "behind" in options:
                over.set()
            finish(operations, **options)

        members._finish = last
        with pytest.raises(EpochOver, match="was lost"):
            trainer.sum_over(members)
        left.set()

    left = threading.Event()
    in_threads(work, 2)
    assert all(parameter.grad is None for parameter in module.parameters())
