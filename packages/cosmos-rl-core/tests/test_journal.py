"""The journal: what was flushed comes back, damage is found, a full disk is said so."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import threading
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import pytest

from cosmos_rl_core.control import durable as durable_module
from cosmos_rl_core.control.durable import DurableLedger, Pace
from cosmos_rl_core.control.journal import DiskFile, Journal, JournalError
from cosmos_rl_core.control.ledger import records
from cosmos_rl_core.control.ledger.events import Join, Tick
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.state import LedgerConfig
from cosmos_rl_core.errors import TakenOver, UserError

WRITTEN = [records.Leased(sample, f"rollout-{sample % 2}", 1, 7) for sample in range(5)]


def write(directory: Path, written=WRITTEN, **options) -> None:
    journal = Journal(directory, **options)
    for record in written:
        journal.append(record)
        journal.sync()
    journal.close()


def read(directory: Path) -> list[records.Record]:
    journal = Journal(directory)
    try:
        return list(journal.replay())
    finally:
        journal.close()


def test_what_was_written_comes_back_in_order(tmp_path):
    write(tmp_path)
    assert read(tmp_path) == WRITTEN


def test_a_journal_goes_on_where_it_ended(tmp_path):
    write(tmp_path, WRITTEN[:2])
    write(tmp_path, WRITTEN[2:])
    assert read(tmp_path) == WRITTEN


def test_append_returns_the_number_of_the_record(tmp_path):
    journal = Journal(tmp_path)
    assert [journal.append(record) for record in WRITTEN] == [0, 1, 2, 3, 4]
    journal.close()


def test_segments_roll_over_and_read_as_one(tmp_path):
    write(tmp_path, segment_bytes=60)
    assert len(list(tmp_path.glob("*.journal"))) > 2
    assert read(tmp_path) == WRITTEN


def test_what_was_not_flushed_is_not_replayed(tmp_path):
    journal = Journal(tmp_path)
    journal.append(WRITTEN[0])
    assert list(journal.replay()) == []
    journal.close()


class CountingFile(DiskFile):
    """A real segment that counts how often it is synced, and waits while it may not."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.syncs = 0
        self.may_sync = threading.Event()
        self.may_sync.set()

    def sync(self) -> None:
        self.may_sync.wait()
        self.syncs += 1
        super().sync()


def test_one_sync_serves_all_that_wait(tmp_path):
    files: list[CountingFile] = []

    def open_file(path: Path) -> CountingFile:
        files.append(CountingFile(path))
        files[-1].may_sync.clear()
        return files[-1]

    async def many() -> None:
        async def append_and_wait(sample: int) -> None:
            number = journal.append(records.Dropped(sample, "boom"))
            if sample == 199:
                files[0].may_sync.set()
            await journal.flush()
            assert journal.num_durable > number

        await asyncio.gather(*(append_and_wait(sample) for sample in range(200)))

    journal = Journal(tmp_path, open_file=open_file)
    asyncio.run(many())
    journal.close()
    assert files[0].syncs == 2  # the first record's, and one for all that were appended meanwhile
    assert len(read(tmp_path)) == 200


def test_a_torn_end_is_cut_off_at_every_length(tmp_path):
    write(tmp_path / "whole")
    (segment,) = (tmp_path / "whole").glob("*.journal")
    whole, seen = segment.read_bytes(), set()
    for length in range(len(whole)):
        torn = tmp_path / f"torn-{length}"
        torn.mkdir()
        (torn / segment.name).write_bytes(whole[:length])
        found = read(torn)
        assert found == WRITTEN[: len(found)]
        seen.add(len(found))
        write(torn, [records.Halted("after")])
        assert read(torn) == [*found, records.Halted("after")]
    assert seen == {0, 1, 2, 3, 4}


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path):
    """In the last record it looks like a torn write and is left out; before that it is an error."""
    write(tmp_path / "whole", WRITTEN[:4])
    (segment,) = (tmp_path / "whole").glob("*.journal")
    start_of_last = segment.stat().st_size
    write(tmp_path / "whole", WRITTEN[4:])
    whole = segment.read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        directory = tmp_path / f"flip-{place}"
        directory.mkdir()
        (directory / segment.name).write_bytes(flipped)
        if place < start_of_last:
            with pytest.raises(JournalError, match="damaged"):
                Journal(directory)
        else:
            assert read(directory) == WRITTEN[:4]


def test_damage_over_several_records_is_no_torn_end(tmp_path):
    write(tmp_path)
    (segment,) = tmp_path.glob("*.journal")
    size = segment.stat().st_size // len(WRITTEN)
    whole = bytearray(segment.read_bytes())
    whole[size : 4 * size] = bytes(3 * size)
    segment.write_bytes(whole)
    with pytest.raises(JournalError, match="record 1 at byte"):
        Journal(tmp_path)


def test_a_torn_end_of_an_earlier_segment_is_damage(tmp_path):
    write(tmp_path, segment_bytes=60)
    first = min(tmp_path.glob("*.journal"))
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(JournalError, match="damaged"):
        Journal(tmp_path)


def test_a_missing_segment_is_found(tmp_path):
    write(tmp_path, segment_bytes=60)
    sorted(tmp_path.glob("*.journal"))[1].unlink()
    with pytest.raises(JournalError, match="comes next"):
        Journal(tmp_path)


def test_a_missing_beginning_is_found(tmp_path):
    write(tmp_path, segment_bytes=60)
    min(tmp_path.glob("*.journal")).unlink()
    with pytest.raises(JournalError, match="missing"):
        Journal(tmp_path)


class SmallDisk(DiskFile):
    """A segment on a disk with room for `room` more bytes; then it has room again, which must not matter."""

    room = 100

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)
        if self.written > self.room:
            self.room = 10**9
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(data)


def test_a_full_disk_is_told_and_never_tried_again(tmp_path):
    journal = Journal(tmp_path, open_file=SmallDisk)
    journal.append(WRITTEN[0])
    journal.sync()
    journal.append(records.Halted("x" * 100))
    for _ in range(2):
        with pytest.raises(UserError, match="no space left for the journal"):
            journal.sync()
    with pytest.raises(UserError):
        asyncio.run(journal.flush())
    with pytest.raises(UserError):
        journal.close()
    assert read(tmp_path) == WRITTEN[:1]


class BrokenDisk(DiskFile):
    """A segment whose first sync fails; the second would report success falsely."""

    failed = False

    def sync(self) -> None:
        if not self.failed:
            self.failed = True
            raise OSError(errno.EIO, "Input/output error")
        super().sync()


def test_a_failed_sync_is_final(tmp_path):
    journal = Journal(tmp_path, open_file=BrokenDisk)
    journal.append(WRITTEN[0])
    for _ in range(2):
        with pytest.raises(JournalError, match="cannot be written"):
            asyncio.run(journal.flush())
    assert journal.num_durable == 0
    with pytest.raises(JournalError):
        journal.close()


def test_a_snapshot_replaces_the_records_before_it(tmp_path):
    journal = Journal(tmp_path)
    for count, record in enumerate(WRITTEN[:3]):
        journal.append(record)
        journal.take_snapshot(b"state %d" % (count + 1))
    journal.append(WRITTEN[3])
    journal.close()
    again = Journal(tmp_path)
    assert (again.snapshot, list(again.replay())) == (b"state 3", WRITTEN[3:4])
    again.close()
    assert len(list(tmp_path.glob("*.snapshot"))) == 2
    assert len(list(tmp_path.glob("*.journal"))) == 2


def test_a_long_run_replays_its_last_records_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(durable_module, "SNAPSHOT_RECORDS", 10)
    config, dispatched = LedgerConfig(groups_per_step=1), []

    async def run(ledger, journal):
        durable = DurableLedger(ledger, journal=journal, clock=lambda: 0.0)
        task = asyncio.create_task(collect(durable, dispatched))
        for number in range(35):
            durable.feed(Join(replica=f"rollout-{number}", role="rollout"))
            while len(dispatched) <= number:
                await asyncio.sleep(0.001)
        task.cancel()

    ledger = Ledger(config)
    with closing(Journal(tmp_path)) as journal:
        asyncio.run(run(ledger, journal))
    with closing(Journal(tmp_path)) as again:
        tail = list(again.replay())
        assert (len(tail), again.num_since_snapshot) == (5, 5)
        assert Ledger.restore(config, again.snapshot, tail) == ledger


def owned(check):
    """Return the class of journals whose owner is checked by a function."""

    class Owned(Journal):
        def check_owner(self):
            check()

    return Owned


def test_another_owner_s_journal_gets_no_snapshot(tmp_path):
    def taken_over():
        raise JournalError("another controller has taken over")

    with closing(owned(taken_over)(tmp_path)) as journal:
        with pytest.raises(JournalError, match="taken over"):
            journal.take_snapshot(b"state")
        assert not list(tmp_path.glob("*.snapshot"))


def test_records_that_were_written_during_a_takeover_are_not_acknowledged(tmp_path):
    is_taken_over = iter((False, True))

    def check():
        if next(is_taken_over):
            raise TakenOver("another controller has taken over")

    with pytest.raises(TakenOver), closing(owned(check)(tmp_path)) as journal:
        journal.append(WRITTEN[0])
        with pytest.raises(TakenOver):
            journal.sync()
        assert journal.num_durable == 0


def test_an_error_of_a_write_whose_flush_was_cancelled_is_raised_by_close_and_not_logged(tmp_path):
    """A controller that was replaced cancels its running flush when the next message arrives."""
    entered, released, logged = threading.Event(), threading.Event(), []

    def check():
        entered.set()
        assert released.wait(10.0)
        raise TakenOver("another controller has taken over")

    async def flush_and_cancel(journal):
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context["message"]))
        journal.append(WRITTEN[0])
        flush = asyncio.create_task(journal.flush())
        while not entered.is_set():
            await asyncio.sleep(0)
        flush.cancel()
        await asyncio.wait([flush])
        released.set()
        with pytest.raises(TakenOver):
            await journal.flush()

    journal = owned(check)(tmp_path)
    asyncio.run(flush_and_cancel(journal))
    with pytest.raises(TakenOver):
        journal.close()
    del journal
    gc.collect()
    assert not logged


@pytest.mark.parametrize("written", [0, 2])
def test_what_a_stopped_process_writes_after_a_takeover_is_in_a_file_of_its_own(tmp_path, written):
    """It was stopped between its look at the owner and its write."""
    earlier = Journal(tmp_path)
    for record in WRITTEN[:written]:
        earlier.append(record)
    earlier.sync()
    with closing(Journal(tmp_path, takes_over=True)) as later:
        later.append(WRITTEN[2])
        later.sync()
        earlier.append(WRITTEN[3])
        earlier.sync()
        later.append(WRITTEN[4])
    earlier.close()
    with closing(Journal(tmp_path)) as again:
        assert list(again.replay()) == [*WRITTEN[:written], WRITTEN[2], WRITTEN[4]]


def test_an_owner_that_was_replaced_finds_out_at_every_look(tmp_path):
    looks = []

    def check():
        looks.append(1)
        raise TakenOver("another controller has taken over")

    with closing(owned(check)(tmp_path)) as journal:
        durable = DurableLedger(Ledger(LedgerConfig(groups_per_step=1)), journal=journal, clock=lambda: 0.0)
        for _ in range(3):
            with pytest.raises(TakenOver):
                durable.check_owner()
        with pytest.raises(TakenOver):
            asyncio.run(durable.outputs())
    assert len(looks) == 1


def test_an_event_after_an_error_changes_nothing(tmp_path):
    """The ledger may be ahead of its journal."""

    class Broken(Ledger):
        rules: ClassVar = {**Ledger.rules, Tick: lambda ledger, event: ledger.decide(None)}

    config = LedgerConfig(groups_per_step=1)

    async def run(journal):
        ledger = Broken(config)
        durable = DurableLedger(ledger, journal=journal, clock=lambda: 0.0)
        durable.feed(Join(replica="rollout-0", role="rollout"))
        with pytest.raises(Exception) as raised:
            durable.feed(Tick())
        with pytest.raises(type(raised.value)) as ended:
            await durable.outputs()
        assert ended.value is raised.value
        assert durable.feed(Join(replica="rollout-1", role="rollout")) == []

    with closing(Journal(tmp_path)) as journal:
        asyncio.run(run(journal))
    with closing(Journal(tmp_path)) as again:
        assert Ledger.restore(config, None, again.replay()).members.live() == ["rollout-0"]


def test_a_damaged_snapshot_falls_back_to_the_one_before(tmp_path):
    journal = Journal(tmp_path)
    for count, record in enumerate(WRITTEN[:3]):
        journal.append(record)
        journal.take_snapshot(b"state %d" % (count + 1))
    journal.append(WRITTEN[3])
    journal.close()
    newest = max(tmp_path.glob("*.snapshot"))
    newest.write_bytes(newest.read_bytes()[:-1])
    again = Journal(tmp_path)
    assert (again.snapshot, list(again.replay())) == (b"state 2", WRITTEN[2:4])
    again.close()


async def collect(durable, outputs):
    while True:
        outputs += await durable.outputs()


class Sleeps:
    """In place of `asyncio.sleep` in the journal's module: counts, and does something meanwhile."""

    def __init__(self, monkeypatch, meanwhile=lambda: None):
        self.seconds, self._meanwhile, self._sleep = [], meanwhile, asyncio.sleep
        monkeypatch.setattr("cosmos_rl_core.control.durable.asyncio.sleep", self)

    async def __call__(self, seconds):
        self.seconds.append(seconds)
        self._meanwhile()
        await self._sleep(0)


def test_a_pace_allows_a_burst_and_then_its_rate(monkeypatch):
    sleeps = Sleeps(monkeypatch)

    async def waits():
        pace = Pace(0.001, burst=2)
        found = [await pace.wait() for _ in range(4)]
        pace.refill()
        return [*found, await pace.wait()]

    assert asyncio.run(waits()) == [False, False, True, True, False]
    assert sleeps.seconds == [pytest.approx(1000.0, rel=0.1), pytest.approx(2000.0, rel=0.1)]


def paced(tmp_path, monkeypatch, *, events, meanwhile=0):
    """Return the flushes and waits of a ledger whose pace allows one at once, for `events` joins in turn.

    meanwhile: further joins that come during each wait.
    """
    monkeypatch.setattr(durable_module, "FLUSHES_PER_S", 0.001)
    monkeypatch.setattr(durable_module, "FLUSH_BURST", 1)
    names = (f"rollout-{number}" for number in itertools.count())
    dispatched = []

    async def run():
        def feed():
            durable.feed(Join(replica=next(names), role="rollout"))

        sleeps = Sleeps(monkeypatch, meanwhile=lambda: [feed() for _ in range(meanwhile)])
        files = []

        def open_file(path):
            files.append(CountingFile(path))
            return files[-1]

        with closing(Journal(tmp_path, open_file=open_file)) as journal:
            ledger = Ledger(LedgerConfig(groups_per_step=1))
            durable = DurableLedger(ledger, journal=journal, clock=lambda: 0.0)
            task = asyncio.create_task(collect(durable, dispatched))
            for _ in range(events):
                expected = len(dispatched) + 1
                feed()
                while len(dispatched) < expected:
                    await sleeps._sleep(0.001)
            task.cancel()
            return files[0].syncs, len(sleeps.seconds)

    return (*asyncio.run(run()), len(dispatched))


def test_events_that_come_during_a_wait_share_its_flush(tmp_path, monkeypatch):
    assert paced(tmp_path, monkeypatch, events=3, meanwhile=4) == (3, 2, 3 + 2 * 4)


def test_a_wait_in_which_nothing_came_is_followed_by_a_burst_without_waits(tmp_path, monkeypatch):
    assert paced(tmp_path, monkeypatch, events=6) == (6, 3, 6)
