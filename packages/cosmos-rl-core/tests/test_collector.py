"""The garbage collector pauses, and finds afterwards what became garbage meanwhile."""

import gc
import weakref

import pytest

from cosmos_rl_core.workers.context import collector_paused


class Circle:
    def __init__(self):
        self.itself = self


@pytest.fixture
def thawed():
    """As in a process that was not forked: the tests' own freezes what it has imported."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_is_made_inside_is_old_afterwards_and_still_collected(thawed):
    with collector_paused():
        assert not gc.isenabled()
        kept, lost = Circle(), weakref.ref(Circle())
    assert gc.isenabled()
    assert any(found is kept for found in gc.get_objects(generation=2))
    assert not any(found is kept for found in gc.get_objects(generation=0))
    gc.collect(1)
    assert lost() is not None
    gc.collect()
    assert lost() is None


def test_in_a_fork_what_is_made_inside_stays_young():
    with collector_paused(forked=True):
        kept = Circle()
    assert any(found is kept for found in gc.get_objects(generation=0))


def test_one_inside_another_and_an_error_leave_it_running():
    with pytest.raises(ValueError, match="no"), collector_paused(), collector_paused():
        raise ValueError("no")
    assert gc.isenabled()


def test_one_that_is_off_stays_off():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
