"""Turns of the policy's ranks and of the rollouts on the same GPUs: never both, no deadlock, deaths release."""

import asyncio
import random
import signal
import subprocess
import sys

import pytest

from cosmos_rl_core.gpu_time import RankGpuTime, RolloutGpuTime

LIMIT_S = 60.0
"""Bound of each wait: a deadlock fails the test instead of hanging it."""


def within(work):
    return asyncio.run(asyncio.wait_for(work, LIMIT_S))


async def settled():
    """Give threads that could take a lock by now the time to do so."""
    await asyncio.sleep(0.05)


def test_a_rank_waits_for_all_rollouts_and_they_for_all_ranks(tmp_path):
    async def work():
        ranks = [RankGpuTime(tmp_path, rank) for rank in range(2)]
        rollouts = [RolloutGpuTime(tmp_path, ranks=2) for _ in range(2)]
        for rollout in rollouts:
            await rollout.take()
        waiting = [asyncio.create_task(rank.take()) for rank in ranks]
        await settled()
        assert not any(task.done() for task in waiting)
        assert all(rank.is_waiting for rank in ranks)
        rollouts[0].give()
        await settled()
        assert not any(task.done() for task in waiting)
        rollouts[1].give()
        await asyncio.gather(*waiting)
        again = asyncio.create_task(rollouts[0].take())
        ranks[0].give()
        await settled()
        assert not again.done(), "rank 1 has its turn"
        ranks[1].give()
        await again

    within(work())


def test_a_rollout_learns_that_all_ranks_want_their_turn(tmp_path):
    async def work():
        ranks = [RankGpuTime(tmp_path, rank) for rank in range(2)]
        rollout = RolloutGpuTime(tmp_path, ranks=2)
        await asyncio.gather(*(rank.take() for rank in ranks))
        for rank in ranks:
            rank.give()
        await rollout.take()
        wanted = asyncio.create_task(rollout.wanted())
        taking = [asyncio.create_task(ranks[0].take())]
        await settled()
        assert not wanted.done(), "rank 1 is idle"
        taking.append(asyncio.create_task(ranks[1].take()))
        await wanted
        rollout.give()
        await asyncio.gather(*taking)

    within(work())


def test_a_cancelled_wait_leaves_no_lock(tmp_path):
    async def work():
        rank, rollout = RankGpuTime(tmp_path, 0), RolloutGpuTime(tmp_path, ranks=1)
        await rollout.take()
        waiting = asyncio.create_task(rank.take())
        await settled()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not rank.is_waiting
        rollout.give()
        await RolloutGpuTime(tmp_path, ranks=1).take()

    within(work())


HOLDER = """
import asyncio, sys
from pathlib import Path
from cosmos_rl_core.gpu_time import RankGpuTime, RolloutGpuTime

async def hold():
    turn = RankGpuTime(Path(sys.argv[2]), 0) if sys.argv[1] == "rank" else RolloutGpuTime(Path(sys.argv[2]), ranks=1)
    await turn.take()
    print("held", flush=True)
    await asyncio.sleep(600)

asyncio.run(hold())
"""


@pytest.mark.parametrize("side", ["rank", "rollout"])
def test_the_death_of_a_process_ends_its_turn(tmp_path, side):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, side, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"

    async def work():
        other = RolloutGpuTime(tmp_path, ranks=1) if side == "rank" else RankGpuTime(tmp_path, 0)
        taking = asyncio.create_task(other.take())
        await settled()
        assert not taking.done()
        process.send_signal(signal.SIGKILL)
        await taking
        if isinstance(other, RolloutGpuTime):
            await other.wanted()  # a policy that is gone is not idle: another one may want to start

    try:
        within(work())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_turns_never_overlap_and_never_lock_up(tmp_path, seed):
    ranks, rollouts, rounds = 3, 3, 40
    rng = random.Random(seed)
    using = {"policy": 0, "rollout": 0}

    async def use(role, other):
        using[role] += 1
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
            assert not using[other]
        using[role] -= 1

    async def rank_loop(rank, together):
        turn = RankGpuTime(tmp_path, rank)
        for _ in range(rounds):
            await turn.take()
            await together.wait()  # a collective: no rank goes on without the others
            await use("policy", "rollout")
            await together.wait()
            turn.give()
            await asyncio.sleep(rng.random() * 1e-3)
        turn.close()

    async def rollout_loop():
        turn = RolloutGpuTime(tmp_path, ranks=ranks)
        for _ in range(rounds):
            await turn.take()
            await use("rollout", "policy")
            turn.give()
            await asyncio.sleep(rng.random() * 1e-3)

    async def work():
        together = asyncio.Barrier(ranks)
        loops = [rank_loop(rank, together) for rank in range(ranks)] + [rollout_loop() for _ in range(rollouts)]
        await asyncio.gather(*loops)

    within(work())
