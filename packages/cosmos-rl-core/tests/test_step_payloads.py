"""What the ranks of a replica read of a batch: all of it, or the same that is lost."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.rollout.spool.reader import PayloadGone
from cosmos_rl_core.rollout.spool.store import Spooled
from cosmos_rl_core.workers.batch import StepPayloads
from doubles.ranks import run_ranks


class Reader:
    """Reads what it has."""

    def __init__(self, files):
        self.files = files

    async def read(self, reference):
        if reference.path not in self.files:
            raise PayloadGone(f"{reference.path} is gone")
        return memoryview(self.files[reference.path])


def spooled(path):
    return Spooled(path=path, num_bytes=100, digest=bytes(32))


def batch(*payloads, epoch=1):
    return p.Batch(step=3, epoch=epoch, samples=tuple(range(7, 7 + len(payloads))), payloads=list(payloads))


def test_small_and_large_groups_come_in_the_order_of_the_samples():
    payloads = asyncio.run(StepPayloads(Reader({"a": b"A"}), None).read(batch(b"x", spooled("a"), b"y")))
    assert payloads.encoded == [b"x", b"A", b"y"]
    assert (payloads.metrics["spooled_bytes"], payloads.metrics["spool_lost"]) == (100, 0)
    assert payloads.metrics["spool_fetch_s"] > 0


def test_a_batch_without_references_has_no_figures_of_spools():
    payloads = asyncio.run(StepPayloads(Reader({}), None).read(batch(b"x")))
    assert (payloads.encoded, payloads.metrics) == ([b"x"], {})


def test_what_cannot_be_read_is_named_and_counted_in_the_figures_of_the_step():
    async def go():
        reader = Reader({"a": b"A"})
        read = StepPayloads(reader, None).read
        lost = await read(batch(spooled("b"), spooled("a"), b"x"))
        assert lost == p.PayloadsUnreadable(step=3, epoch=1, samples=(7,), reason="b is gone")
        reader.files["b"] = b"B"
        assert (await read(batch(spooled("b"), spooled("a"), epoch=2))).metrics["spool_lost"] == 1
        assert (await read(batch(spooled("b"), epoch=2))).metrics["spool_lost"] == 0

    asyncio.run(go())


def losses(rank, world_size):
    """Each rank lacks another file."""
    import torch.distributed as dist

    from cosmos_rl_core.parallel.rank_group import RankGroup
    from cosmos_rl_core.workers.ranks import Ranks

    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    ranks = Ranks(RankGroup(group), group, ThreadPoolExecutor(1), dist.HashStore())
    reader = Reader({name: b"" for name in "abc" if name != "abc"[rank]})
    lost = asyncio.run(StepPayloads(reader, ranks).read(batch(*map(spooled, "abcc"))))
    assert lost.reason == "a is gone", lost
    return {"lost": len(lost.samples), "last": lost.samples[-1]}


def test_ranks_agree_on_what_any_of_them_lacks():
    assert [(int(f["lost"]), int(f["last"])) for f in run_ranks(losses, 2)] == [(2, 8), (2, 8)]
