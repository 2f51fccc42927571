"""The conformance checks accept a good environment, and find each of the faults that they look for."""

import asyncio
import random

import numpy as np
import pytest

from cosmos_rl_core import Environment, Observation
from cosmos_rl_core.testing.environments import ENVIRONMENT_CHECKS, check_environment

ROWS = [{"top": 7}, {"top": 9}]


class Game(Environment):
    tools = ({"type": "function", "function": {"name": "peek"}},)

    async def reset(self, row):
        chance = random.Random(row["seed"])
        self.secret = chance.randint(0, row["top"])
        return Observation(f"0 to {row['top']}")

    async def step(self, said, turn):
        if not said.isdecimal():
            return Observation("a number")
        right = int(said) == self.secret
        return Observation("right" if right else "wrong", reward=float(right), done=right)


class Silent(Game):
    async def reset(self, row):
        await super().reset(row)
        return Observation(())


class Writes(Game):
    """Its row is its own, but not what is in it."""

    async def reset(self, row):
        row["moves"].append(1)
        return await super().reset({**row, "top": 3})


class Lucky(Game):
    async def reset(self, row):
        self.secret = random.SystemRandom().randrange(10**9)
        return Observation(f"{self.secret} or more")


class Shared(Game):
    secret = 3
    plays = 0

    async def reset(self, row):
        type(self).plays += 1
        return Observation(f"{self.plays} are playing")

    async def close(self):
        type(self).plays -= 1


class Fragile(Game):
    async def step(self, said, turn):
        return Observation(str(int(said)))


class Arrays(Game):
    async def step(self, said, turn):
        return Observation([{"role": "user", "content": np.int64(3)}])


class Leaves(Game):
    async def close(self):
        del self.secret


class Mute(Game):
    async def step(self, said, turn):
        return Observation(())


def names_of_failing(make, rows=ROWS):
    failing = []
    for check in ENVIRONMENT_CHECKS:
        try:
            asyncio.run(check(make, rows, ["3", "x", "5"]))
        except Exception:
            failing.append(check.__name__)
    return failing


def test_a_good_environment_passes():
    asyncio.run(check_environment(Game, ROWS, said=["3", "x", "5"]))


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (Silent, "begins_with_a_message"),
        (Writes, "begins_with_a_message"),
        (Lucky, "repeats_with_a_seed"),
        (Shared, "shares_nothing"),
        (Fragile, "answers_anything"),
        (Arrays, "plays_to_an_end"),
        (Mute, "plays_to_an_end"),
        (Leaves, "closes_at_any_time"),
    ],
)
def test_a_fault_is_found(make, check):
    rows = [{"top": 7, "moves": []}, {"top": 9, "moves": []}]
    assert check in names_of_failing(make, rows)
