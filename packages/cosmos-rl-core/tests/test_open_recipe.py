"""Rewards and rows that a program gives as objects: in the caller's process, and in processes that import them."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial

import pytest

from cosmos_rl_core import Request, UserError, evaluate, generate, run
from cosmos_rl_core.launch.interrupts import on_interrupt, run_to_end
from cosmos_rl_core.launch.open_recipe import open_recipe
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.testing.tiny import TINY
from cosmos_rl_core.testing.tiny_task import hits

ROWED = '''
import json
from pathlib import Path

from cosmos_rl_core import Options
from cosmos_rl_core.testing.tiny import Tiny


class Data(Options):
    path: str
    split: str = ""


class Rowed(Tiny):
    """Contexts out of a .jsonl file."""

    Data = Data
    row_keys = ("path", "split")

    def load_rows(self, data):
        path = Path(data.path)
        return [json.loads(line) for line in path.read_text().splitlines()], path.name
'''
CONTEXTS = [{"context": i} for i in range(10)]


def zeros(group):
    """A reward at the top level of a module."""
    return [0.0] * len(group.rollouts)


class Constant:
    def __init__(self, value=1.0):
        self.value = value

    def __call__(self, group):
        return [self.value] * len(group.rollouts)


def recipe(tmp_path, *, domain="cosmos_rl_core.testing.tiny:TINY", placement="inline", max_steps=2):
    return {
        "run": {"domain": domain, "output_dir": str(tmp_path / "run"), "placement": placement, "max_steps": max_steps},
        "policy": {"prompts_per_step": 10, "threads": 1, "optimizer": {"learning_rate": 0.1}},
        "rollout": {"group_size": 8, "threads": 1, "sampling": {"max_tokens": 3}},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
        "logging": {"sinks": ["jsonl"]},
    }


@pytest.fixture
def rowed(tmp_path, monkeypatch):
    """The folder of a domain that reads rows from files."""
    (tmp_path / "rowed_domain.py").write_text(ROWED)
    monkeypatch.syspath_prepend(tmp_path)
    return str(tmp_path)


# Rewards


def test_a_closure_is_learned_from_in_one_process(tmp_path):
    seen = []

    def watched(group):
        seen.append(group.prompt.sample_id)
        return hits(group)

    result = run(recipe(tmp_path, max_steps=30), rewards=[watched, (lambda group: [1.0] * len(group.rollouts), 0.0)])
    assert seen
    assert result.metrics[-1]["reward_mean"] > 0.9 > 0.5 > result.metrics[0]["reward_mean"]
    assert {"reward/watched", "reward/lambda"} <= result.metrics[0].keys()


def test_rewards_stand_for_those_of_the_recipe_by_label_and_weight(tmp_path):
    tables = recipe(tmp_path) | {"reward": {"functions": [{"name": "nan"}], "timeout_s": 7.0}}
    rewards = {"right": ("hits", 2.0), "none": zeros, "one": Constant, "half": (Constant(0.5), 1.0)}
    given = open_recipe(tables, rewards=rewards)
    sections = given.config.reward.functions
    assert [(one.title, one.weight) for one in sections] == [("right", 2.0), ("none", 1.0), ("one", 1.0), ("half", 1.0)]
    assert given.config.reward.timeout_s == 7.0
    line = run(tables, rewards=rewards).metrics[0]
    assert line["reward_mean"] == pytest.approx(2 * line["reward/right"] + 1.5)


def test_a_config_takes_rewards_and_overrides_too(tmp_path):
    config = load_config(recipe(tmp_path) | {"reward": {"functions": [{"name": "hits"}]}})
    given = open_recipe(config, ["run.max_steps=7"], rewards="hits")
    assert (given.config.run.max_steps, given.config.reward.functions[0].name) == (7, "hits")
    assert open_recipe(config).config is config


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        (lambda group: [], "'lambda' is a lambda"),
        (Constant(), "'Constant' is an object of the class Constant"),
        (partial(zeros), "'partial' is an object of the class partial"),
        (TINY.load_rows, "'load_rows' is not what cosmos_rl_core.testing.tiny has by the name Tiny.load_rows"),
    ],
    ids=["lambda", "object", "partial", "method"],
)
def test_what_other_processes_cannot_import_is_refused_with_the_way_out(tmp_path, reward, why):
    with pytest.raises(UserError, match=rf'reward {why}.*\[run\] placement = "inline"'):
        run(recipe(tmp_path, placement="local"), rewards=[reward])
    with pytest.raises(UserError, match="has one process"):
        evaluate(recipe(tmp_path), rewards=[reward], request=Request(out=tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_cell_of_a_notebook_is_refused_with_the_way_out(tmp_path):
    code = f"""
from cosmos_rl_core import run
def reward(group):
    return [1.0 for _ in group.rollouts]
try:
    run({recipe(tmp_path, placement="local")!r}, rewards=[reward])
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "reward 'reward' is defined in a notebook or at a prompt" in done.stdout, done.stderr


@pytest.mark.parametrize(("rewards", "why"), [([0.5], "rewards: 0.5 is neither"), ([], "at least one reward")])
def test_what_is_no_reward_is_refused(tmp_path, rewards, why):
    with pytest.raises(UserError, match=why):
        run(recipe(tmp_path) | {"reward": {"functions": [{"name": "hits"}]}}, rewards=rewards)


SCRIPT = """
from cosmos_rl_core import run

def brevity(group):
    return [1.0 / len(rollout.versions) for rollout in group.rollouts]

{guard}run({recipe!r}, rewards=[brevity])
"""


def script(folder, name, text):
    """Run a script as a user does, from another folder; return its exit code and what it printed."""
    path = folder / name
    path.write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=folder.parent, env=environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.ci
def test_workers_import_the_function_of_a_script(tmp_path):
    code, printed = script(
        tmp_path,
        "my-script.py",
        SCRIPT.format(recipe=recipe(tmp_path, placement="local"), guard='if __name__ == "__main__":\n    '),
    )
    assert code == 0, printed
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["reward/brevity"] for line in lines] == [pytest.approx(1 / 3)] * 2
    assert 'name = "my-script:brevity"' in (tmp_path / "run/resolved.toml").read_text()


@pytest.mark.parametrize(
    ("name", "guard", "why"),
    [
        ("unguarded.py", "", "starts a run when it is imported"),
        ("unguarded_too.py", "for _ in range(1):\n    ", "starts a run when it is imported"),
        ("this.py", 'if __name__ == "__main__":\n    ', "while workers import this from"),
    ],
)
def test_a_script_that_workers_cannot_import_is_refused_before_the_run(tmp_path, name, guard, why):
    text = SCRIPT.format(recipe=recipe(tmp_path, placement="local"), guard=guard)
    code, printed = script(tmp_path, name, text)
    assert code == 1 and why in printed
    assert not (tmp_path / "run").exists()


def test_a_module_that_starts_a_run_when_a_worker_imports_it_is_named(tmp_path):
    (tmp_path / "starts_a_run.py").write_text("from cosmos_rl_core import run\nrun({})\ndef reward(group): ...\n")
    tables = recipe(tmp_path) | {"reward": {"functions": [{"name": "starts_a_run:reward"}]}}
    with pytest.raises(UserError, match="starts_a_run starts a run when it is imported"):
        run(tables, python_path=[str(tmp_path)])


# A notebook


def test_a_run_goes_on_inside_a_running_loop(tmp_path):
    async def cell():
        return run(recipe(tmp_path), rewards=[lambda group: hits(group)])

    assert asyncio.run(cell()).steps == 2


def test_an_interrupt_after_a_run_is_pythons_own():
    async def main():
        on_interrupt(lambda: None)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL

    run_to_end(main())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_interrupt_of_the_kernel_stops_the_run_in_good_order(tmp_path):
    def interrupting(group):
        if group.prompt.sample_id == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return hits(group)

    async def cell():
        return run(recipe(tmp_path, max_steps=1000), rewards=[interrupting])

    with contextlib.closing(asyncio.new_event_loop()) as loop:  # without asyncio.run, which has a handler of its own
        result = loop.run_until_complete(cell())
    assert result.interrupted
    assert result.steps < 1000
    assert result.checkpoint is not None


# Rows


def test_rows_are_kept_and_resumed_from(tmp_path, rowed):
    tables = recipe(tmp_path, domain="rowed_domain:Rowed") | {"data": {"path": "elsewhere", "split": "test"}}
    run(tables, rewards="hits", rows=CONTEXTS, eval_rows=CONTEXTS[:3])
    assert [json.loads(line) for line in (tmp_path / "run/rows.jsonl").read_text().splitlines()] == CONTEXTS
    evaluations = (tmp_path / "run/eval.jsonl").read_text().splitlines()
    assert json.loads(evaluations[0])["eval/rows"] == 3
    resumed = run(
        tables, ["run.max_steps=3"], rewards="hits", rows=iter(CONTEXTS), eval_rows=CONTEXTS[:3], resume="auto"
    )
    assert resumed.steps == 3
    again = run(tmp_path / "run/resolved.toml", ["run.max_steps=4"], resume="auto")
    assert again.steps == 4
    with pytest.raises(UserError, match=r"rows\[1\] is not the row that the run began with .*rows.jsonl:2"):
        run(tables, ["run.max_steps=5"], rewards="hits", rows=CONTEXTS[:1] * 10, eval_rows=CONTEXTS[:3], resume="auto")
    with pytest.raises(UserError, match=r"rows\[9\] is not the row"):
        run(tables, ["run.max_steps=5"], rewards="hits", rows=CONTEXTS[:9], eval_rows=CONTEXTS[:3], resume="auto")


@pytest.mark.ci
def test_rows_are_read_by_processes_too(tmp_path, rowed):
    tables = recipe(tmp_path, domain="rowed_domain:Rowed", placement="local")
    result = run(tables, rewards=[hits], rows=CONTEXTS, python_path=[rowed])
    assert result.steps == 2


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"context": {1, 2}}, r"rows\[1\]: column 'context' holds set .* which is not JSON"),
        ({"context": float("nan")}, r"rows\[1\]: column 'context' holds float nan"),
        ({1: 2}, r"rows\[1\]: a row must be a mapping with named columns, not dict \{1: 2\}"),
        ("context", r"rows\[1\]: a row must be a mapping with named columns, not str 'context'"),
    ],
)
def test_a_row_that_is_no_json_is_named(tmp_path, rowed, row, why):
    tables = recipe(tmp_path, domain="rowed_domain:Rowed")
    with pytest.raises(UserError, match=why):
        run(tables, rewards="hits", rows=[CONTEXTS[0], row])


def test_a_domain_that_makes_its_own_rows_takes_none(tmp_path):
    with pytest.raises(UserError, match="rows: the tiny domain generates its own rows"):
        run(recipe(tmp_path), rewards="hits", rows=CONTEXTS)


# Checks before the run


def test_a_program_gets_every_problem_at_once_and_an_earlier_run_stays(tmp_path):
    kept = tmp_path / "run" / "kept"
    kept.parent.mkdir()
    kept.write_text("")
    tables = recipe(tmp_path) | {"logging": {"sinks": ["nowhere"]}, "sync": {"transport": "rdma"}}
    with pytest.raises(UserError) as refused:
        run(tables, rewards={"pairs": lambda prompt, response: 1.0}, overwrite=True)
    said = str(refused.value)
    assert "config: 3 problems" in said and "logging.sinks.0" in said and "no transport is called 'rdma'" in said
    assert re.search(r"test_open_recipe.py:\d+ takes \(prompt, response\)", said)
    assert kept.exists()


def test_given_rows_are_checked_before_the_run_and_named_by_their_file(tmp_path, rowed):
    tables = recipe(tmp_path, domain="rowed_domain:Rowed") | {"data": {"path": "unused"}}
    with pytest.raises(UserError, match=r"data.path: rows.jsonl has no rows"):
        run(tables, rewards=[hits], rows=[])
    assert not (tmp_path / "run").exists()
    result = run(tables, rewards=[hits], rows=iter(CONTEXTS))  # read by the checks and by the run
    assert result.metrics[0]["rollouts"] == 80


def test_generate_and_evaluate_take_rows_and_rewards(tmp_path, rowed):
    tables = recipe(tmp_path, domain="rowed_domain:Rowed")
    request = Request(out=tmp_path / "drawn")
    drawn = generate(tables, rows=CONTEXTS[:2], request=request, python_path=[rowed])
    assert [line["prompt"] for line in drawn.lines] == ["context 0", "context 1"]
    again = generate(tables, rows=CONTEXTS[:2], request=request, python_path=[rowed])
    assert again.lines == drawn.lines
    with pytest.raises(UserError, match=r"no .*reward.functions.* to evaluate with"):
        evaluate(tables, rows=CONTEXTS[:2], request=request, python_path=[rowed])
    request = Request(out=tmp_path / "measured")
    measured = evaluate(tables, rows=CONTEXTS[:4], rewards=[zeros, "hits"], request=request, python_path=[rowed])
    assert measured.rows == 4
    assert measured.metrics["reward/zeros"].mean == 0.0 < measured.metrics["reward/hits"].mean
