"""Rows of medium difficulty are selected most often, and a controller that takes over selects the same ones."""

from dataclasses import replace

import pytest
from ledger_play import Play, granted

from cosmos_rl_core.control import protocol as m
from cosmos_rl_core.control.ledger import events, records
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.data.curriculum import UNSEEN, Curriculum
from cosmos_rl_core.data.source import PromptSource

ROWS = 4


def curriculum(*, visits: int = 2, min_chance: float = 0.25, seed: int = 0, rows: int = ROWS, **changes) -> Curriculum:
    source = PromptSource([{"row": row} for row in range(rows)], origin="test", seed=seed)
    rule = Curriculum(
        num_rows=rows,
        row_of=source.row_of,
        visits=visits,
        min_chance=min_chance,
        failed_reward=0.0,
        solved_reward=1.0,
        seed=seed,
    )
    return replace(rule, **changes)


def in_order(sample: int) -> int:
    return sample % ROWS


def test_chances_by_hand():
    rule = curriculum(visits=2, min_chance=0.25, row_of=in_order)
    memory = rule.memory()
    assert [rule.chance(memory, sample) for sample in range(ROWS)] == [1.0] * ROWS  # nothing is known
    rule.remember(memory, 0, 0.5)  # 4 * 0.5 * 0.5
    rule.remember(memory, 1, 0.75)  # 4 * 0.75 * 0.25
    rule.remember(memory, 2, 1.0)  # 0, less than the least chance
    assert [rule.chance(memory, sample) for sample in range(ROWS)] == [1.0, 0.75, 0.25, 1.0]
    rule.remember(memory, 4, 1.0)  # row 0 again: p = 0.75
    assert rule.chance(memory, 0) == 0.75
    rule.remember(memory, 8, 1.0)  # the first visit is forgotten: solved twice
    assert rule.chance(memory, 0) == 0.25
    assert list(memory) == [100, 100, UNSEEN, 75, UNSEEN, 100, UNSEEN, UNSEEN]


def test_rewards_of_another_scale_are_shares_of_the_way_to_solved():
    rule = curriculum(failed_reward=-1.0, solved_reward=3.0, min_chance=0.01, row_of=in_order, visits=1)
    memory = rule.memory()
    for sample, reward in enumerate([0.0, 1.0, -5.0, 9.0]):
        rule.remember(memory, sample, reward)
    assert list(memory) == [25, 50, 0, 100]


def test_rows_are_drawn_with_their_chance():
    rule = curriculum(visits=1, min_chance=0.1, row_of=in_order)
    memory = rule.memory()
    for sample, reward in enumerate([0.5, 0.75, 1.0, 0.0]):
        rule.remember(memory, sample, reward)
    selected = [0] * ROWS
    for sample in range(ROWS * 1000):
        selected[in_order(sample)] += rule.selects(memory, sample)
    assert selected[0] == 1000
    # three standard deviations of 1000
    assert selected[1] == pytest.approx(750, abs=42)
    assert selected[2] == pytest.approx(100, abs=29)
    assert selected[3] == pytest.approx(100, abs=29)


def rewarded(sample: int) -> float:
    """Rows 0 and 1 are solved and failed always; the others half of the time."""
    return (1.0, 0.0, 0.5, 0.5)[in_order(sample)]


def play(*, ledger: Ledger | None = None, epochs: int | None = None, **config) -> Play:
    rule = curriculum(row_of=in_order)
    total = None if epochs is None else epochs * ROWS
    started = Play(ledger=ledger, curriculum=rule, total_samples=total, groups_per_step=2, **config)
    if ledger is None:
        started.join("policy-0")
        started.join("rollout-0")
    return started


def train(run: Play, steps: int, *, reward: float | None = None) -> list[int]:
    """Train some steps; return the samples that were leased, in order."""
    leased = []
    for _ in range(steps):
        version = run.ledger.version
        for lease in granted(run.ask("rollout-0", version=version)):
            leased.append(lease.sample)
            mean = rewarded(lease.sample) if reward is None else reward
            run.send("rollout-0", m.Deliver(lease.sample, lease.attempt, version, version, 10, mean_reward=mean))
        run.batch()
        run.vote()
    return leased


def test_solved_and_failed_rows_are_skipped_by_chance_and_never_lost():
    run = play(max_steps=30)
    leased = train(run, 30)
    skipped = [record.sample for record in run.journal if isinstance(record, records.Skipped)]
    assert sorted(leased + skipped) == list(range(run.ledger.samples.next_sample))
    assert {in_order(sample) for sample in skipped} == {0, 1}
    assert skipped and any(in_order(sample) < 2 and sample >= ROWS for sample in leased)  # skipped, and tried again
    assert run.ledger.samples.drop_reasons == {"filtered:curriculum": len(skipped)}
    assert run.ledger.filtered_in_a_row == 0


def test_a_controller_that_takes_over_draws_the_same_rows():
    whole = train(play(max_steps=20), 20)
    run = play(max_steps=20)
    before = train(run, 7)
    run.ask("rollout-0", version=7)  # samples of the next step are leased as the controller dies
    restored = Ledger.restore(run.ledger.config, run.base, run.journal)
    assert restored.successes == run.ledger.successes
    again = play(ledger=restored, max_steps=20)
    again.on(events.Restart())
    for name, role in (("policy-0", "policy"), ("rollout-0", "rollout")):
        again.on(events.Join(name, role, 1))  # the processes live on, and connect again
    assert before + train(again, 13) == whole


def test_a_resumed_run_draws_the_same_rows():
    whole = train(play(max_steps=20), 20)
    run = play(max_steps=20)
    before = train(run, 7)
    ledger, _ = Ledger.resume(run.ledger.config, run.ledger.position())
    again = play(ledger=ledger, max_steps=20)
    for name in ("policy-0", "rollout-0"):
        again.join(name)
    assert before + train(again, 13) == whole


def test_a_rollback_returns_to_the_memory_of_the_checkpoint():
    run = play(max_steps=20)
    train(run, 4)
    run.checkpoint(4)
    memory = bytes(run.ledger.successes)
    train(run, 5, reward=0.25)
    assert bytes(run.ledger.successes) != memory
    run.roll_back(4)
    assert bytes(run.ledger.successes) == memory


def test_groups_that_are_left_out_for_their_rewards_are_remembered():
    run = play(max_steps=2)
    first, second = granted(run.ask("rollout-0"))
    run.send("rollout-0", m.Failed(first.sample, 1, "filtered:zero_variance", final=True, mean_reward=1.0))
    run.send("rollout-0", m.Failed(second.sample, 1, "the reward raised", final=True))
    assert set(run.ledger.successes) == {UNSEEN}, "remembered before the step is committed"
    train(run, 1)
    assert list(run.ledger.successes) == [UNSEEN, 100, UNSEEN, UNSEEN, UNSEEN, 50, UNSEEN, 50]


def test_a_group_that_is_generated_again_is_one_visit():
    run = play(max_steps=2, max_staleness=1)
    for lease in granted(run.ask("rollout-0", capacity=3)):
        run.send("rollout-0", m.Deliver(lease.sample, 1, 0, 0, 10, mean_reward=1.0))
    run.batch()
    run.lose(0)
    [lease] = granted(run.ask("rollout-0", capacity=1))
    assert (lease.sample, lease.attempt) == (0, 2)
    run.send("rollout-0", m.Deliver(0, 2, 0, 0, 10, mean_reward=0.5))
    run.batch()
    run.vote()
    assert list(run.ledger.successes) == [UNSEEN, 50, UNSEEN, 100, UNSEEN, 100, UNSEEN, UNSEEN]


def test_those_that_wait_are_told_the_end_when_the_rest_of_the_stream_is_skipped():
    """Without it they would wait for ever: nobody sends another message."""
    for seed in range(50):
        rule = curriculum(row_of=in_order, min_chance=0.01, seed=seed)
        run = Play(curriculum=rule, total_samples=2 * ROWS, groups_per_step=2)
        run.join("policy-0")
        run.join("rollout-0")
        for _ in range(2):  # the first epoch; all is solved
            version = run.ledger.version
            for lease in granted(run.ask("rollout-0", version=version)):
                run.send("rollout-0", m.Deliver(lease.sample, 1, version, version, 10, mean_reward=1.0))
            run.batch()
            run.vote()
        run.batch()
        outputs = run.ask("rollout-0", version=2)
        if run.ledger.samples.next_sample == 2 * ROWS and not granted(outputs):
            messages = [(output.replica, type(output.message)) for output in outputs if isinstance(output, events.To)]
            assert ("policy-0", m.NoMore) in messages and ("rollout-0", m.NoMore) in messages
            return
    raise AssertionError("in none of the streams all of the last rows were skipped")
