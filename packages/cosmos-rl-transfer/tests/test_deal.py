from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cosmos_rl_transfer.planning.sharing import deal, deal_near, interleave

ROOM = st.lists(st.integers(-50, 2000), min_size=1, max_size=6)


def one_by_one(count, size, room):
    left = list(room)
    for _ in range(count):
        left[left.index(max(left))] -= size
    return left


@given(st.integers(0, 60), st.integers(1, 99), ROOM, st.integers(0, 9))
def test_dealing_is_giving_one_by_one_to_who_has_most_room(count, size, room, turn):
    counts = deal(count, size, room, turn=turn)
    assert sum(counts) == count
    assert sorted(r - n * size for r, n in zip(room, counts)) == sorted(one_by_one(count, size, room))


def test_equal_owners_take_turns():
    assert [deal(1, 8, [8, 8, 8], turn=turn).index(1) for turn in range(4)] == [0, 1, 2, 0]


@given(st.integers(0, 60), st.integers(1, 99), st.lists(st.integers(0, 2000), min_size=3, max_size=3))
def test_near_owners_never_take_more_than_fits_while_others_have_room(count, size, room):
    counts = deal_near(count, size, room, [0, 3, 3], turn=0)
    assert sum(counts) == count
    fits = sum(free // size for free in room)
    assert counts[0] <= room[0] // size or count > fits


def test_near_owners_come_first():
    assert deal_near(4, 10, [40, 40], [3, 0], turn=0) == [0, 4]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(sum), st.integers(0, 9))
def test_owners_are_spread_evenly_over_every_window(counts, turn):
    owners = interleave(counts, turn)
    share, others = np.array(counts) / sum(counts), np.count_nonzero(counts) - 1
    assert Counter(owners.tolist()) == {i: n for i, n in enumerate(counts) if n}
    for start in range(0, len(owners), 3):
        window = owners[start : start + 8]
        found = np.bincount(window, minlength=len(counts))
        assert (abs(found - len(window) * share) <= 1 - share + share * others + 1e-9).all()
