"""Groups that stay with their producer: the files, who may read them, and what is said of those that are gone."""

import asyncio
import functools
import hashlib
import resource

import numpy as np
import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.rollout.spool.reader import PayloadGone, SpoolReader
from cosmos_rl_core.rollout.spool.store import (
    PIECE_BYTES,
    Answer,
    Pull,
    Spool,
    Spooled,
    SpoolPiece,
    clear_spools,
    serve_spool,
    spool_root,
)
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup
from cosmos_rl_core.wire.channel import serve
from cosmos_rl_core.wire.handshake import make_token
from cosmos_rl_core.wire.payload import decode_group, encode_group

TOKEN = b"t" * 32


def in_a_loop(test):
    """Make a test of a coroutine."""

    @functools.wraps(test)
    def run(*arguments, **keywords):
        asyncio.run(asyncio.wait_for(test(*arguments, **keywords), 60))

    return run


def spool(tmp_path, *, threshold_bytes=0, capacity_bytes=100, step_groups=1, kept=()):
    return Spool(
        tmp_path / "rollout-0",
        threshold_bytes=threshold_bytes,
        capacity_bytes=capacity_bytes,
        step_groups=step_groups,
        kept=kept,
    )


def files(tmp_path):
    return sorted(path.name for path in (tmp_path / "rollout-0").iterdir())


def reader(*, timeout_s=5.0, token=TOKEN):
    return SpoolReader(token=token, name="policy-0", timeout_s=timeout_s)


def reference(data, *, path="/not/on/this/machine.group", address=""):
    return Spooled(path=path, num_bytes=len(data), digest=hashlib.sha256(data).digest(), address=address)


# -- the files


@in_a_loop
async def test_a_large_group_becomes_a_file_and_a_small_one_stays_what_it_is(tmp_path):
    kept = spool(tmp_path, threshold_bytes=4)
    assert await kept.put(b"abc", name="1-1") == b"abc"
    found = await kept.put(b"abcd", name="2-1")
    assert (found.num_bytes, found.digest, found.address) == (4, hashlib.sha256(b"abcd").digest(), "")
    [name] = files(tmp_path)
    assert found.path == str(tmp_path / "rollout-0" / name)
    assert name.startswith("2-1-")
    assert (tmp_path / "rollout-0" / name).read_bytes() == b"abcd"


@in_a_loop
async def test_room_is_counted_in_groups_of_the_largest_size(tmp_path):
    kept = spool(tmp_path, capacity_bytes=100)
    assert kept.room() == 100
    first = await kept.put(b"x" * 30, name="1-1")
    await kept.put(b"x" * 10, name="2-1")
    assert (kept.num_bytes, kept.room()) == (40, 2)
    await kept.put(b"x" * 50, name="3-1")
    assert kept.room() == 0
    kept.release([first.path])
    assert (kept.num_bytes, kept.room()) == (60, 0)


@in_a_loop
async def test_a_spool_that_can_never_hold_its_part_of_a_step_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"capacity_bytes = 100 is too small: .* 3 groups .* 40 bytes. Set it to 120"):
        await spool(tmp_path, step_groups=3).put(b"x" * 40, name="1-1")
    assert files(tmp_path) == []


@in_a_loop
async def test_a_successor_keeps_what_is_still_needed_and_removes_the_rest(tmp_path):
    before = spool(tmp_path)
    needed, other = await before.put(b"needed", name="1-1"), await before.put(b"other", name="2-1")
    (tmp_path / "rollout-0" / "3-1-aa.part").write_bytes(b"half")
    after = spool(tmp_path, kept=[needed.path, "/of/another/machine.group"])
    assert [str(tmp_path / "rollout-0" / name) for name in files(tmp_path)] == [needed.path]
    assert after.num_bytes == 6
    assert after.read(needed.path, offset=2, num_bytes=3) == b"ede"
    assert after.read(other.path, offset=0, num_bytes=9) is None


@in_a_loop
async def test_only_files_of_the_spool_are_read_and_removed(tmp_path):
    secret = tmp_path / "token"
    secret.write_bytes(b"secret")
    kept = spool(tmp_path)
    assert kept.read(str(secret), offset=0, num_bytes=9) is None
    kept.release([str(secret)])
    assert secret.exists()


@in_a_loop
async def test_a_group_whose_lease_is_taken_back_while_it_is_written_leaves_no_file(tmp_path):
    kept = spool(tmp_path, capacity_bytes=2**30)
    writing = asyncio.create_task(kept.put(bytes(2**24), name="1-1"))
    await asyncio.sleep(0)  # the thread has it
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert files(tmp_path) == []
    assert kept.num_bytes == 0


@in_a_loop
async def test_a_disk_that_takes_no_more_is_told_with_the_file(tmp_path):
    kept = spool(tmp_path, capacity_bytes=2**20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*/rollout-0/7-1-.*\.group"):
            await kept.put(bytes(5000), name="7-1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path) == []
    assert kept.num_bytes == 0


@in_a_loop
async def test_a_spool_that_is_closed_leaves_nothing(tmp_path):
    kept = spool(tmp_path)
    await kept.put(b"x", name="1-1")
    kept.close()
    assert list(tmp_path.iterdir()) == []


def test_each_run_has_its_own_folder_of_a_shared_directory(tmp_path):
    assert spool_root(None, tmp_path / "run") == tmp_path / "run" / "spool"
    one, other = (spool_root("/dev/shm", tmp_path / name) for name in ("one", "other"))
    assert one != other
    assert one.parent == other.parent


def test_what_runs_left_is_cleared(tmp_path):
    (tmp_path / "spool" / "rollout-0").mkdir(parents=True)
    (tmp_path / "spool" / "rollout-0" / "1-1-aa.group").write_bytes(b"x")
    clear_spools(tmp_path / "spool")
    clear_spools(tmp_path / "spool")
    assert list(tmp_path.iterdir()) == []


# -- reading on the same machine


@in_a_loop
async def test_a_file_that_is_there_is_mapped_and_its_arrays_are_views_of_it(tmp_path):
    rollout = Rollout(
        arrays={"clean": np.arange(6, dtype=np.float32).reshape(2, 3)},
        rollout_logprobs=np.zeros(1, np.float32),
        versions=np.zeros(1, np.int32),
        loss_mask=np.ones(1, np.bool_),
    )
    group = RolloutGroup(prompt=Prompt(sample_id=1, row={}), rollouts=(rollout,))
    kept = spool(tmp_path, capacity_bytes=10_000)
    found = await kept.put(encode_group(group), name="1-1")
    payload = await reader().read(found)
    kept.release([found.path])  # what is mapped outlives its name
    clean = decode_group(payload).rollouts[0].arrays["clean"]
    assert np.array_equal(clean, [[0, 1, 2], [3, 4, 5]])
    assert not clean.flags.writeable and not clean.flags.owndata


@pytest.mark.parametrize("damage", [b"abcX", b"abc", b""])
@in_a_loop
async def test_a_damaged_file_is_not_taken(damage, tmp_path):
    found = await spool(tmp_path).put(b"abcd", name="1-1")
    (tmp_path / "rollout-0" / files(tmp_path)[0]).write_bytes(damage)
    with pytest.raises(PayloadGone, match="is not readable here, and the replica that wrote it is gone"):
        await reader().read(found)


# -- pulling from a replica


class Shelf:
    """A spool of another machine: its paths mean nothing here."""

    def __init__(self, files):
        self.files = files
        self.asked = []

    def read(self, path, *, offset, num_bytes):
        self.asked.append(offset)
        return self.files[path][offset : offset + num_bytes] if path in self.files else None


async def serving(shelf, *, token=TOKEN):
    return await serve_spool(shelf, bind="127.0.0.1", token=token, name="rollout-0", allow_remote=False)


@in_a_loop
async def test_what_lies_on_another_machine_comes_in_pieces():
    data = np.random.default_rng(0).bytes(2 * PIECE_BYTES + 5)
    shelf = Shelf({"/far": data})
    server = await serving(shelf)
    payload = await reader().read(reference(data, path="/far", address=server.address))
    assert payload == data
    assert payload.readonly
    assert shelf.asked == [0, PIECE_BYTES, 2 * PIECE_BYTES]
    await server.close()


@in_a_loop
async def test_a_replica_that_no_longer_has_the_file_is_asked_once():
    shelf = Shelf({})
    server = await serving(shelf)
    with pytest.raises(PayloadGone, match="no longer has /far"):
        await reader().read(reference(b"data", path="/far", address=server.address))
    assert shelf.asked == [0]
    await server.close()


@pytest.mark.parametrize(
    ("there", "why"), [(b"dat!", "is damaged"), (b"da", "no longer has"), (b"data and more", "received")]
)
@in_a_loop
async def test_other_bytes_than_were_written_are_not_taken(there, why):
    server = await serving(Shelf({"/far": there}))
    with pytest.raises(PayloadGone, match=why):
        await reader().read(reference(b"data", path="/far", address=server.address))
    await server.close()


@in_a_loop
async def test_a_replica_that_nobody_reaches_is_given_up():
    server = await serving(Shelf({}))
    await server.close()
    with pytest.raises(PayloadGone, match="is not readable here, and "):
        await reader(timeout_s=0.2).read(reference(b"data", address=server.address))


@in_a_loop
async def test_another_run_at_the_same_address_is_given_up(tmp_path):
    server = await serving(Shelf({}), token=make_token(tmp_path / "token"))
    with pytest.raises(PayloadGone, match="is not readable here, and "):
        await reader(timeout_s=0.2).read(reference(b"data", address=server.address))
    await server.close()


async def wire_server(on_connect):
    return await serve("tcp://127.0.0.1:0", token=TOKEN, decode=Pull, on_connect=on_connect)


@in_a_loop
async def test_a_silent_replica_is_given_up():
    async def silent(connection):
        await connection.closed.wait()

    server = await wire_server(silent)
    with pytest.raises(PayloadGone, match=r"sent nothing for 0.1 s"):
        await reader(timeout_s=0.1).read(reference(b"data", address=server.address))
    await server.close()


@in_a_loop
async def test_a_pull_goes_on_where_its_connection_broke():
    offsets = []

    async def one_byte_each(connection):
        pull = await connection.receive()
        offsets.append(pull.offset)
        message: Answer = SpoolPiece(memoryview(b"data"[pull.offset : pull.offset + 1]))
        await connection.send(message)

    server = await wire_server(one_byte_each)
    assert await reader().read(reference(b"dat", address=server.address)) == b"dat"
    assert offsets == [0, 1, 2]
    await server.close()
