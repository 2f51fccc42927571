"""Processes of simulators: what they give, and what becomes of episodes when they hang, die or talk nonsense."""

import gc
import os
import select
import signal
import subprocess
import sys

import numpy as np
import pytest
from vla_faulty import Faulty
from vla_fixtures import run_chunk

from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_vla.config import SimulatorLimits
from cosmos_rl_vla.sims.pool.group import Lost, SlotReady
from cosmos_rl_vla.sims.pool.pool import SimulatorPool
from cosmos_rl_vla.sims.reach import Reach

REACH = "cosmos_rl_vla.sims.reach:Reach"
FAULTY = "vla_faulty:Faulty"


def events(pool, number):
    """Return that many events by slot."""
    seen = {}
    while len(seen) < number:
        new = pool.wait(30.0)
        assert new, f"only {seen}"
        seen.update((event.slot, event) for event in new)
    return seen


def begin(pool, inits, task="red"):
    for slot, init in inits.items():
        pool.start(slot, task=task, init=init)
    return events(pool, len(inits))


def chunk(slots, horizon=3, value=0.1):
    return np.full((len(slots), horizon, 2), value, np.float32)


def play(pool, slot, init, actions):
    """Play chunks of one episode, and return everything that was seen of it."""
    begin(pool, {slot: init})
    seen = [(pool.states[slot].copy(), pool.images["board"][slot].copy())]
    for part in actions:
        pool.submit([slot], part[None])
        result = events(pool, 1)[slot].result
        seen.append((np.array(result.rewards), pool.states[slot].copy(), pool.images["board"][slot].copy()))
    return [array.tobytes() for part in seen for array in part]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def two_groups():
    with SimulatorPool(REACH, groups=2, slots_per_group=2) as pool:
        yield pool


def test_a_slot_shows_what_the_simulator_shows_in_this_process(two_groups):
    begin(two_groups, {3: 11}, task="blue")
    reach = Reach()
    reach.reset("blue", 11)
    assert np.array_equal(two_groups.states[3], reach.observe().state)
    assert np.array_equal(two_groups.images["board"][3], reach.observe().images["board"])
    two_groups.submit([3], chunk([3]))
    result = events(two_groups, 1)[3].result
    alone = run_chunk(reach.step, chunk([3])[0])
    assert result.rewards == alone.rewards
    assert np.array_equal(two_groups.images["board"][3], reach.observe().images["board"])


def test_an_episode_is_the_same_in_every_slot_whatever_ran_before(two_groups):
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 3, 2)).astype(np.float32)
    first = play(two_groups, 0, 5, actions)
    play(two_groups, 3, 6, actions)
    assert play(two_groups, 3, 5, actions) == first
    assert play(two_groups, 1, -5, actions) != first


def test_slots_of_both_groups_run_together(two_groups):
    begin(two_groups, {slot: slot for slot in range(4)})
    two_groups.submit(range(4), chunk(range(4)))
    assert [event.result.steps for event in events(two_groups, 4).values()] == [3, 3, 3, 3]


def test_a_chunk_may_be_submitted_while_another_slot_of_the_group_starts(two_groups):
    begin(two_groups, {0: 1})
    two_groups.start(1, task="red", init=2)
    two_groups.submit([0], chunk([0]))
    seen = events(two_groups, 2)
    assert seen[1].result is None and seen[0].result.steps == 3


def test_nothing_is_waited_for_when_nothing_was_asked(two_groups):
    assert two_groups.wait() == []


def test_a_task_that_does_not_exist_is_lost_for_good(two_groups):
    lost = begin(two_groups, {2: 1}, task="mauve")[2]
    assert lost.final and "no task 'mauve'; tasks: red, green, blue" in lost.reason
    assert isinstance(begin(two_groups, {2: 1})[2], SlotReady)


def test_actions_that_are_not_finite_are_refused(two_groups):
    begin(two_groups, {0: 1, 1: 1})
    actions = chunk([0, 1])
    actions[1, 2, 0] = np.nan
    with pytest.raises(ValueError, match=r"not finite for slots \[1\]"):
        two_groups.submit([0, 1], actions)
    with pytest.raises(ValueError, match="2 action dimensions"):
        two_groups.submit([0, 1], np.zeros((2, 3, 5), np.float32))


@pytest.mark.parametrize("fault", ["nan_reward", "nan_state", "diverge"])
def test_an_episode_that_breaks_is_lost_alone(fault):
    with SimulatorPool(FAULTY, options={"faults": {"13": fault}}, slots_per_group=2) as pool:
        begin(pool, {0: 13, 1: 14})
        pool.submit([0, 1], chunk([0, 1]))
        seen = events(pool, 2)
        assert isinstance(seen[0], Lost) and not seen[0].final
        assert seen[1].result.steps == 3
        assert isinstance(begin(pool, {0: 15})[0], SlotReady)
        assert pool.restarts == 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("exit", "exit code 3"),
        ("raise", "out of order"),
        ("hang", "took longer than step_timeout_s = 2 and was killed"),
    ],
)
def test_a_process_that_fails_is_replaced_and_its_episodes_are_lost(fault, reason, tmp_path):
    options = {"faults": {"13": fault}, "once": str(tmp_path / "failed")}
    with SimulatorPool(
        FAULTY, options=options, groups=2, slots_per_group=2, limits=SimulatorLimits(step_timeout_s=2.0)
    ) as pool:
        begin(pool, {0: 12, 1: 13, 2: 12, 3: 13})
        pool.submit([1], chunk([1]))
        pool.submit([2], chunk([2]))
        seen = events(pool, 3)
        assert isinstance(seen[0], Lost) and isinstance(seen[1], Lost) and reason in seen[1].reason
        assert seen[2].result.steps == 3
        assert pool.restarts == 1
        again = play(pool, 1, 13, [chunk([1])[0]])
        assert again == play(pool, 3, 13, [chunk([3])[0]])


def test_a_process_that_is_killed_while_nobody_asks_is_noticed():
    with SimulatorPool(REACH, slots_per_group=2) as pool:
        begin(pool, {0: 1, 1: 2})
        victim = pool.process_ids[0]
        os.kill(victim, signal.SIGKILL)
        os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT)
        reason = "the process of the simulators died (signal SIGKILL)"
        assert pool.wait() == [Lost(slot=0, reason=reason), Lost(slot=1, reason=reason)]
        assert isinstance(begin(pool, {0: 1})[0], SlotReady)


def test_a_reset_that_hangs_is_lost(tmp_path):
    options = {"faults": {"13": "hang"}, "when": "reset", "once": str(tmp_path / "failed")}
    with SimulatorPool(FAULTY, options=options, limits=SimulatorLimits(reset_timeout_s=1.0)) as pool:
        assert "reset_timeout_s = 1" in begin(pool, {0: 13})[0].reason
        assert isinstance(begin(pool, {0: 13})[0], SlotReady)


def test_a_simulator_that_always_fails_is_given_up_with_its_last_words():
    words = pytest.raises(WorkerFailed, match=r"(?s)2 times in a row.*out of order.*about to raise")
    with (
        words,
        SimulatorPool(FAULTY, options={"faults": {"13": "raise"}}, limits=SimulatorLimits(max_faults=1)) as pool,
    ):
        for _ in range(3):
            begin(pool, {0: 13})
            pool.submit([0], chunk([0]))
            events(pool, 1)


def test_success_forgives_faults():
    options = {"faults": {"13": "diverge"}}
    with SimulatorPool(FAULTY, options=options, limits=SimulatorLimits(max_faults=1)) as pool:
        for init in (13, 12, 13, 12, 13):
            begin(pool, {0: init})
            pool.submit([0], chunk([0]))
            events(pool, 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"at_start": "user"}, UserError, "needs another machine"),
        ({"colour": 3}, UserError, "unexpected keyword argument 'colour'"),
        ({"at_start": "exit"}, WorkerFailed, r"exit code 3[\s\S]*about to exit"),
        ({"at_start": "raise"}, WorkerFailed, "out of order"),
    ],
)
def test_a_simulator_that_cannot_be_built_says_why(options, error, message):
    with pytest.raises(error, match=message):
        SimulatorPool(FAULTY, options=options, limits=SimulatorLimits(max_faults=0))


def test_a_simulator_that_does_not_start_in_time_says_so():
    with pytest.raises(WorkerFailed, match="took longer than start_timeout_s = 2"):
        SimulatorPool(FAULTY, options={"at_start": "hang"}, limits=SimulatorLimits(start_timeout_s=2.0, max_faults=0))


def test_an_unknown_simulator_is_one_message():
    with pytest.raises(UserError, match="no simulator is called 'mujokko'"):
        SimulatorPool("mujokko")


def test_a_python_that_is_not_there_is_one_message():
    with pytest.raises(UserError, match="cannot run /no/python"):
        SimulatorPool(REACH, python="/no/python")


def test_closing_leaves_neither_processes_nor_descriptors():
    before = set(os.listdir("/proc/self/fd"))
    with SimulatorPool(
        FAULTY, options={"faults": {"13": "hang"}}, groups=2, limits=SimulatorLimits(step_timeout_s=60.0)
    ) as pool:
        begin(pool, {0: 13, 1: 1})
        pool.submit([0], chunk([0]))  # it hangs while the pool is closed
        alive = pool.process_ids
    assert not any(is_alive(pid) for pid in alive)
    pool.close()  # again, without effect
    del pool
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


TOGETHER = """
from pathlib import Path

import numpy as np
from cosmos_rl_vla.sims.base import BatchSimulator, SimObservation, SimSpec, Stepped


class Counters(BatchSimulator):

    def __init__(self, *, slots, limit):
        self.values, self.limit = np.zeros(slots, np.float32), limit
        self.spec = SimSpec(
            cameras={}, state_dim=2, action_dim=1, action_low=(-1.0,), action_high=(1.0,), max_steps=9, control_hz=1.0
        )

    def reset(self, slot, *, task, init):
        self.values[slot] = init

    def step(self, slots, actions):
        self.values[slots] += actions[:, 0]
        return [
            Stepped(reward=float(self.values[slot]), terminated=bool(self.values[slot] > self.limit), truncated=False,
                    success=False)
            for slot in slots
        ]

    def observe(self, slot):
        return SimObservation(images={}, state=np.array([self.values[slot], len(self.values)], np.float32))

    def close(self):
        Path("closed").touch()
"""


def test_a_simulator_of_many_slots_steps_them_at_once(tmp_path, monkeypatch):
    (tmp_path / "together_of_a_test.py").write_text(TOGETHER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with SimulatorPool("together_of_a_test:Counters", options={"limit": 3}, groups=2, slots_per_group=3) as pool:
        for slot in range(6):
            pool.start(slot, task="count", init=slot)
        events(pool, 6)
        assert pool.states.tolist() == [[slot, 3.0] for slot in range(6)]
        pool.submit([0, 2, 5], np.ones((3, 2, 1), np.float32))
        seen = events(pool, 3)
        assert {slot: event.result.rewards for slot, event in seen.items()} == {
            0: [1.0, 2.0],
            2: [3.0, 4.0],
            5: [6.0, 0.0],
        }
        assert [seen[slot].result.done for slot in (0, 2, 5)] == [False, True, True]
        assert pool.states[:, 0].tolist() == [2.0, 1.0, 4.0, 3.0, 4.0, 6.0]
    assert (tmp_path / "closed").exists()


ORPHAN = """
import sys
from cosmos_rl_vla.sims.pool.pool import SimulatorPool
pool = SimulatorPool("vla_faulty:Faulty", options={"faults": {"13": "hang"}, "when": "reset"})
pool.start(0, task="red", init=13)
print(pool.process_ids[0], flush=True)
sys.stdin.read()
"""


def test_processes_end_with_the_process_that_started_them():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ORPHAN]
    with subprocess.Popen(command, stdin=-1, stdout=-1, env=environment) as parent:
        orphan = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    ended, _, _ = select.select([orphan], [], [], 30.0)
    os.close(orphan)
    assert ended


def test_faulty_is_a_simulator_of_this_process_too():
    faulty = Faulty()
    faulty.reset("red", 1)
    assert run_chunk(faulty.step, chunk([0])[0]).steps == 3
