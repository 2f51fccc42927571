"""Every domain in every placement, by the command line in a process that has imported nothing before.

In a process of its own a run imports transformers, diffusers and the simulators itself, in the order in which its
roles ask for them. In `inline` both roles are built in one process, so that their imports could meet.
"""

from __future__ import annotations

import json
from itertools import product

import pytest

pytestmark = pytest.mark.ci

QUICK = {("llm", "inline", "rl"), ("vla", "inline", "rl"), ("wfm", "inline", "rl")}
"""Where two roles of a domain with large libraries are built in one process."""
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in product(("tiny", "llm", "vla", "wfm"), ("inline", "local"), ("rl", "sft"))
]


@pytest.mark.parametrize(("domain", "placement", "algorithm"), CASES)
def test_two_steps_from_a_fresh_process(tmp_path, domain, placement, algorithm, recipe_of, start, write_recipe):
    tables = recipe_of(domain, algorithm)
    tables["run"] = {**tables["run"], "placement": placement, "max_steps": 2, "output_dir": str(tmp_path / "run")}
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    printed, errors = process.communicate(timeout=150)
    assert process.returncode == 0, printed + errors
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]


FAILING = '''
import threading

from cosmos_rl_core.testing.tiny import Tiny


class Failing(Tiny):
    """Its policy cannot be built, its engine is; neither is begun while the other is in work."""

    at_work = 0

    def build_policy(self, *given, **keys):
        self._alone()
        raise RuntimeError("no policy today")

    def build_engine(self, *given, **keys):
        self._alone()
        return super().build_engine(*given, **keys)

    def _alone(self):
        Failing.at_work += 1
        assert Failing.at_work == 1, "two roles are built at once"
        threading.Event().wait(0.5)
        Failing.at_work -= 1
'''


def test_roles_in_one_process_are_built_one_after_the_other_and_an_error_of_one_ends_the_run(
    tmp_path, bandit, write_recipe, start
):
    (tmp_path / "failing.py").write_text(FAILING)
    tables = bandit(tmp_path / "run", run__placement="inline", run__domain="failing:Failing")
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "error: policy-0: RuntimeError: no policy today"
