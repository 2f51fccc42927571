"""Simulators that are known where their packages are not."""

import subprocess
import sys
import types

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.data.rows import describe
from cosmos_rl_vla.sims.base import Worded
from cosmos_rl_vla.sims.pool.pool import SimulatorPool


class Elsewhere(Worded):
    """A simulator that cannot be built here."""

    def __init__(self):
        raise UserError("its package is in another interpreter")

    @classmethod
    def instruction(cls, task):
        return f"do {task}"


def test_words_are_asked_of_the_class(monkeypatch):
    monkeypatch.setitem(sys.modules, "elsewhere", types.SimpleNamespace(Elsewhere=Elsewhere))
    assert describe("elsewhere:Elsewhere", ["this", "that"], options={}) == {"this": "do this", "that": "do that"}


def test_an_unknown_simulator_is_told_before_a_process_starts():
    with pytest.raises(UserError, match="no simulator is called 'rech'; did you mean 'reach'"):
        SimulatorPool("rech", python="no such interpreter")


def test_adapters_load_without_what_they_adapt():
    names = ("behavior", "libero", "maniskill", "robotwin")
    code = "import sys\n" + "".join(f"import cosmos_rl_vla.sims.{name}\n" for name in names)
    code += "print(*sorted({'torch', 'mujoco', 'gymnasium', 'yaml', 'typer', 'pydantic'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []
