"""What a controller that continues a run awaits, and when it no longer does."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from cosmos_rl_core.control.inflight import Batches
from cosmos_rl_core.control.ledger import events
from cosmos_rl_core.control.ledger.samples import ASSIGNED, READY, Sample, Samples
from cosmos_rl_core.control.lifecycle import Recovery
from cosmos_rl_core.control.peers import Peers
from cosmos_rl_core.control.settings import ControllerSettings

STEP, IN_WORK = 8, (30, 31)


@pytest.fixture
def restarted():
    """Samples 30 and 31 are in the batch in work; 32 and 33 are ready. Those of odd number are rollout-1's."""
    active = {s: Sample(ASSIGNED if s in IN_WORK else READY, replica=f"rollout-{s % 2}") for s in range(30, 34)}
    samples = Samples()
    samples.active, samples.ready = active, {STEP + 1: {32, 33}}
    batches = Batches(source=None, supervised=False, peers=Peers())
    fed, requested = [], []
    job = ControllerSettings(
        config_toml="",
        run_dir=Path(),
        resume_from="",
        supervised=False,
        max_steps=None,
        eval_every_steps=0,
        eval_by=(),
        group_size=1,
    )
    recovery = Recovery(
        job=job,
        durable=SimpleNamespace(ledger=SimpleNamespace(samples=samples), feed=fed.append),
        peers=batches.peers,
        batches=batches,
        reports=SimpleNamespace(observer=SimpleNamespace(note=lambda text: None)),
        scheduler=SimpleNamespace(request_batches=lambda: requested.append(1)),
        outcome=None,
    )
    batches.restarted({32, 33}, step=STEP, assigned=IN_WORK)
    assert batches.awaited == {30, 31, 32, 33}
    return recovery, batches, fed, requested


def test_a_replica_that_returns_without_its_groups_is_not_awaited(restarted):
    recovery, batches, fed, requested = restarted
    recovery.returned("rollout-1", holding=(31,))
    assert batches.awaited == {30, 31, 32}
    assert fed == [events.GroupsUnheld((33,))]
    assert not requested
    recovery.returned("rollout-0", holding=())
    recovery.returned("rollout-1", holding=())
    assert not batches.awaited
    assert fed[1:] == [events.GroupsUnheld((32,))], "the batch in work is with its policy"
    assert len(requested) == 1


def test_the_groups_of_a_step_that_is_committed_are_not_awaited(restarted):
    _, batches, _, _ = restarted
    assert not batches.committed(STEP)
    assert batches.awaited == {32, 33}
    assert not batches.committed(STEP), "a repeated commit"


def test_the_last_awaited_groups_may_be_those_of_the_batch(restarted):
    recovery, batches, _, requested = restarted
    recovery.returned("rollout-0", holding=(30,))
    recovery.returned("rollout-1", holding=(31,))
    assert batches.awaited == {30, 31} and not requested
    assert batches.committed(STEP)
    assert not batches.awaited
