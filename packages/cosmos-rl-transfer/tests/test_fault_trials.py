"""One process of a sync is killed at a random moment. `-m slow` runs 200 trials, the default suite six of them."""

import pytest
from transfer_faults.nursery import nursery
from transfer_faults.trials import MOST_WAIT_S, Outcome, Trial, run_trial, summarize

pytestmark = pytest.mark.ci

SEEDS = range(200)
FEW = (0, 1, 3, 4, 17, 21)


@pytest.fixture(scope="module")
def forks():
    with nursery() as made:
        yield made


def check(trial, forks):
    outcome = run_trial(trial, forks)
    assert not outcome.faults, "\n".join([str(trial), *outcome.faults])
    assert outcome.slowest_s <= MOST_WAIT_S, trial


@pytest.mark.parametrize("seed", FEW)
def test_nobody_waits_long_or_mixes_versions_when_one_dies(forks, seed):
    check(Trial.draw(seed), forks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed not in FEW])
def test_nobody_waits_long_or_mixes_versions_whoever_dies(forks, seed):
    check(Trial.draw(seed), forks)


def test_every_victim_dies_among_the_few():
    drawn = [Trial.draw(seed) for seed in FEW]
    assert {trial.victim for trial in drawn} == {"engine", "rank", "coordinator", "trainer"}
    assert {trial.layout for trial in drawn if trial.victim == "trainer"} == {"one", "copies", "cut"}
    assert {trial.transport for trial in drawn} == {"shm", "tcp"}


def test_a_summary_counts_victims_and_what_survivors_hold():
    first, second = Trial.draw(0), Trial.draw(1)
    outcomes = [
        Outcome(first, slowest_s=0.5, served={"engine": 1, "rank 0": 0, "rank 1": 0}),
        Outcome(second, slowest_s=0.1, served={"rank 0": -1}, faults=["rank 0 holds no version at all"]),
    ]
    summary = summarize(outcomes)
    assert summary.killed == {"trainer": 1, "engine": 1}
    assert (summary.trials, summary.slowest_wait_s) == (2, 0.5)
    assert (summary.committed, summary.kept, summary.mixed) == (1, 2, 1)
    assert summary.faults == (f"{second}: rank 0 holds no version at all",)
