import threading
import time

import numpy as np
import pytest

from cosmos_rl_transfer.errors import Superseded
from cosmos_rl_transfer.publish.supply import Slots
from cosmos_rl_transfer.publish.versions import Versions


def copy(bucket):
    return np.full(4, bucket, np.uint8)


def lend(versions, version, *, keep=False):
    return versions.lend(version, buckets=range(3), keep=keep, copy=copy)


def test_only_the_open_version_is_lent():
    versions = Versions()
    assert lend(versions, 0) is None
    versions.publish(0)
    assert lend(versions, 0) is not None
    assert lend(versions, 1) is None
    versions.fence(patience_s=0)
    assert lend(versions, 0) is None


def test_a_fence_without_readers_returns_at_once():
    versions = Versions()
    versions.publish(0)
    assert versions.fence(patience_s=60).copied_bytes == 0


def test_a_fence_waits_for_a_reader_that_is_nearly_done():
    versions = Versions()
    versions.publish(0)
    lease = lend(versions, 0)
    fenced = []
    thread = threading.Thread(target=lambda: fenced.append(versions.fence(patience_s=30)))
    thread.start()
    for bucket in range(3):
        with versions.reading(lease, bucket) as copied:
            assert copied is None
        versions.read(lease, bucket)
    thread.join(10)
    assert fenced and fenced[0].copied_bytes == 0


def test_what_is_unread_after_the_patience_is_copied_and_nothing_else():
    versions = Versions()
    versions.publish(0)
    lease = lend(versions, 0)
    versions.read(lease, 1)
    assert versions.fence(patience_s=0.01).copied_bytes == 8
    for bucket in (0, 2):
        with versions.reading(lease, bucket) as copied:
            assert copied is not None and copied.tolist() == [bucket] * 4
    with pytest.raises(Superseded), versions.reading(lease, 1):
        pass
    assert versions.give_back(lease)


def test_a_fence_waits_for_who_reads_live_memory_whatever_its_patience():
    versions = Versions()
    versions.publish(0)
    lease = lend(versions, 0)
    inside, leave, fenced = threading.Event(), threading.Event(), threading.Event()

    def read():
        with versions.reading(lease, 0):
            inside.set()
            leave.wait(10)

    def fence():
        versions.fence(patience_s=0)
        fenced.set()

    reader, owner = threading.Thread(target=read), threading.Thread(target=fence)
    reader.start()
    assert inside.wait(10)
    owner.start()
    assert not fenced.wait(0.1)
    leave.set()
    assert fenced.wait(10)
    reader.join()
    owner.join()


def test_a_fence_waits_for_who_sends_out_of_live_memory_no_longer_than_its_patience():
    versions = Versions()
    versions.publish(0)
    lease = lend(versions, 0)
    with versions.reading(lease, 0, sending=True):
        started = time.monotonic()
        versions.fence(patience_s=0.05)
        assert 0.05 <= time.monotonic() - started < 5
    with versions.reading(lease, 0) as copied:  # what was sent may be of two versions: it can be had again
        assert copied is not None


def test_copies_are_dropped_for_the_next_version_unless_they_are_to_be_kept():
    versions = Versions()
    versions.publish(0)
    dropped, kept = lend(versions, 0), lend(versions, 0, keep=True)
    versions.fence(patience_s=0)
    versions.publish(1)
    with pytest.raises(Superseded), versions.reading(dropped, 0):
        pass
    with versions.reading(kept, 0) as copied:
        assert copied is not None
    assert not versions.give_back(dropped)
    assert versions.give_back(kept)


def test_a_version_written_without_a_fence_revokes_its_leases():
    versions = Versions()
    versions.publish(0)
    lease = lend(versions, 0, keep=True)
    versions.publish(1)
    with pytest.raises(Superseded), versions.reading(lease, 0):
        pass
    assert not versions.give_back(lease)


def test_who_waits_for_a_version_is_woken_by_it_and_by_the_end():
    versions = Versions()
    assert versions.wait_newer(-1, timeout_s=0.01) is None
    threading.Timer(0.05, versions.publish, [3]).start()
    assert versions.wait_newer(-1, timeout_s=10) == 3
    threading.Timer(0.05, versions.close).start()
    assert versions.wait_newer(3, timeout_s=10) is None


def test_a_fenced_version_is_not_announced():
    versions = Versions()
    versions.publish(0)
    versions.fence(patience_s=0)
    assert versions.wait_newer(-1, timeout_s=0.01) is None


def take(slots, owner):
    hold = slots.take(owner, wait=True)
    assert hold is not None
    return hold


def test_a_ring_hands_out_its_slots_and_waits_for_one():
    slots, one, other = Slots(2, patience_s=60), object(), object()
    first, second = take(slots, one), take(slots, one)
    assert {first.slot, second.slot} == {0, 1}
    assert slots.take(other, wait=False) is None
    threading.Timer(0.05, slots.free, [second]).start()
    assert take(slots, other).slot == second.slot
    assert (slots.holds(one), slots.holds(other)) == (1, 1)
    slots.leave(one)
    assert take(slots, other).slot == first.slot


def test_a_slot_that_is_kept_too_long_goes_to_the_next_and_stays_there():
    slots, slow, other = Slots(1, patience_s=0.05), object(), object()
    kept = take(slots, slow)
    slots.start_reading(kept)
    assert take(slots, other).slot == 0
    slots.free(kept)
    assert slots.holds(other) == 1


def test_a_late_slot_does_not_go_to_its_own_reader_who_may_still_give_it_back():
    slots, slow = Slots(1, patience_s=0.0), object()
    slots.start_reading(take(slots, slow))
    assert slots.take(slow, wait=False) is None
    assert slots.take(object(), wait=False) is not None


def test_giving_back_a_slot_that_was_lost_does_not_free_a_later_use_by_the_same_owner():
    slots, one, other = Slots(1, patience_s=0.0), object(), object()
    lost = take(slots, one)
    slots.start_reading(lost)
    slots.free(take(slots, other))
    take(slots, one)
    slots.free(lost)
    assert slots.holds(one) == 1


def test_a_slot_that_is_being_filled_is_nobody_elses_however_long_it_takes():
    slots, slow, other = Slots(1, patience_s=0.01), object(), object()
    filled = take(slots, slow)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(take(slots, other).slot))
    thread.start()
    thread.join(0.2)
    assert taken == []
    slots.start_reading(filled)
    thread.join(10)
    assert taken == [0]


def test_a_fence_without_copies_drops_who_is_not_through():
    versions = Versions()
    versions.publish(0)
    slow = lend(versions, 0)
    versions.read(slow, 0)
    assert versions.fence(patience_s=0.01, copy=False).copied_bytes == 0
    with pytest.raises(Superseded), versions.reading(slow, 1):
        pass
    assert not versions.give_back(slow)


def test_a_lease_that_was_read_to_its_end_gives_nothing_more_after_a_fence():
    versions = Versions()
    versions.publish(0)
    lease = lend(versions, 0)
    for bucket in range(3):
        versions.read(lease, bucket)
    versions.fence(patience_s=10)
    with pytest.raises(Superseded), versions.reading(lease, 0):
        pass
    assert versions.give_back(lease)
