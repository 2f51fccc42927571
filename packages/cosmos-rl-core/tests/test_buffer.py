"""The staleness window against brute force and in random play."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_rl_core.rollout.staleness import StalenessWindow


def is_feasible(deadlines: list[int], *, next_step: int, per_step: int) -> bool:
    """Whether every group can be consumed by its deadline: if any order does it, earliest first does."""
    return all(next_step + place // per_step <= deadline for place, deadline in enumerate(sorted(deadlines)))


windows = st.builds(StalenessWindow, st.integers(0, 3), st.integers(1, 3))


@given(windows, st.lists(st.integers(5, 9), max_size=8), st.integers(3, 9))
def test_admits_exactly_when_every_group_can_still_be_consumed_in_time(window, deadlines, new):
    play = {"next_step": 5, "per_step": window.groups_per_step}
    if is_feasible(deadlines, **play):
        admitted = window.admits(Counter(deadlines), new, next_step=5)
        assert admitted == is_feasible([*deadlines, new], **play)


@given(windows, st.lists(st.integers(5, 9), max_size=8), st.integers(3, 9))
def test_room_is_the_number_of_leases_admits_would_grant_one_by_one(window, deadlines, new):
    if not is_feasible(deadlines, next_step=5, per_step=window.groups_per_step):
        return
    outstanding, granted = Counter(deadlines), 0
    while window.admits(outstanding, new, next_step=5):
        outstanding[new] += 1
        granted += 1
    assert window.room(Counter(deadlines), new, next_step=5) == granted


@given(windows, st.lists(st.tuples(st.integers(5, 8), st.booleans()), max_size=7))
def test_select_succeeds_exactly_when_some_choice_leaves_the_rest_feasible(window, groups):
    b = window.groups_per_step
    if not is_feasible([d for d, _ in groups], next_step=5, per_step=b):
        return
    ready: dict[int, set[int]] = {}
    for sample, (deadline, is_ready) in enumerate(groups):
        if is_ready:
            ready.setdefault(deadline, set()).add(sample)

    def leaves_feasible(taken):
        rest = [d for sample, (d, _) in enumerate(groups) if sample not in taken]
        return is_feasible(rest, next_step=6, per_step=b)

    ids = [sample for sample, (_, is_ready) in enumerate(groups) if is_ready]
    chosen = window.select(ready, Counter(d for d, _ in groups), next_step=5)
    possible = [taken for taken in combinations(ids, b) if leaves_feasible(taken)]
    assert (chosen is not None) == bool(possible)
    if chosen is not None:
        assert chosen in possible


def test_select_takes_the_earliest_deadlines_and_sorts_by_id():
    window = StalenessWindow(2, 2)
    assert window.select({6: {4, 1}, 5: {9}}, {5: 1, 6: 2}, next_step=5) == (1, 9)


def test_select_waits_for_a_leased_group_that_is_due():
    window = StalenessWindow(1, 2)
    assert window.select({6: {1, 2}}, {5: 1, 6: 2}, next_step=5) is None


def test_select_skips_a_leased_group_that_can_wait():
    window = StalenessWindow(1, 2)
    assert window.select({6: {1, 2}}, {6: 3}, next_step=5) == (1, 2)


def test_no_staleness_gives_the_synchronous_loop():
    window = StalenessWindow(0, 4)
    assert window.capacity == 4
    assert window.room({}, window.deadline(3), next_step=3) == 4
    assert window.room({3: 4}, 3, next_step=3) == 0
    assert window.room({}, window.deadline(2), next_step=3) == 0


def test_staleness_allows_that_many_more_batches_in_flight():
    assert StalenessWindow(3, 4).room({}, 3, next_step=0) == 16


@given(windows, st.integers(0, 2**32))
def test_random_play_keeps_the_bound_and_never_stalls(window, seed):
    """Rollouts hold any version and finish in any order; training goes on whenever `select` allows."""
    random = Random(seed)
    step, next_sample = 0, 0
    leased: dict[int, int] = {}
    ready: dict[int, set[int]] = {}
    born: dict[int, int] = {}
    while step < 12:
        outstanding = Counter(leased.values()) + Counter({d: len(ids) for d, ids in ready.items()})
        moved = False
        for version in random.sample(range(step + 1), step + 1):  # the current version is always among them
            if random.random() < 0.5 or version == step:
                for _ in range(min(window.room(outstanding, window.deadline(version), next_step=step), 3)):
                    leased[next_sample] = window.deadline(version)
                    outstanding[window.deadline(version)] += 1
                    born[next_sample] = version
                    next_sample, moved = next_sample + 1, True
        for sample in random.sample(sorted(leased), random.randint(0, len(leased))):
            ready.setdefault(leased.pop(sample), set()).add(sample)
            moved = True
        batch = window.select(ready, outstanding, next_step=step)
        if batch is not None:
            for sample in batch:
                assert 0 <= step - born[sample] <= window.max_staleness
                ready[window.deadline(born[sample])].remove(sample)
            step, moved = step + 1, True
        assert moved or leased, "nobody can move although nothing is being generated"


@pytest.mark.parametrize(("staleness", "groups"), [(-1, 1), (0, 0)])
def test_a_window_that_admits_nothing_is_refused(staleness, groups):
    with pytest.raises(ValueError, match=r"max_staleness|groups_per_step"):
        StalenessWindow(staleness, groups)
