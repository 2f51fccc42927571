"""`cosmos-rl generate` and `eval` with the tiny domain: real processes, one and two of them."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest

from cosmos_rl_core import run
from cosmos_rl_core.cli.app import main
from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.inference.evaluate import evaluate
from cosmos_rl_core.inference.generate import generate
from cosmos_rl_core.inference.request import Instances, Request
from cosmos_rl_core.recipe.load import load_config

pytestmark = pytest.mark.xdist_group("core_generate")  # one process makes what they share

RECIPE = """
[run]
domain = "cosmos_rl_core.testing.tiny:TINY"
placement = "inline"
max_steps = 3

[data]
rows = 10

[policy]
prompts_per_step = 5

[policy.optimizer]
learning_rate = 0.1

[rollout]
group_size = 4
threads = 1

[rollout.sampling]
max_tokens = 4

[[reward.functions]]
name = "hits"

[sync]
backend = "cosmos_rl_core.testing.file_sync:FileSync"

[eval.data]
rows = 7

[checkpoint]
every_steps = 1
keep = 3

[logging]
sinks = ["jsonl"]
"""
TWO = Instances(num_gpus=2)
DRAWN = ["eval.temperature=1.0"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A recipe, and the run of it beside."""
    folder = tmp_path_factory.mktemp("generate")
    recipe = folder / "run.toml"
    recipe.write_text(RECIPE)
    run(load_config(recipe, [f'run.output_dir="{folder / "run"}"']))
    return recipe, folder / "run"


@pytest.fixture
def recipe(finished):
    return finished[0]


@pytest.fixture(scope="module")
def base(finished, tmp_path_factory):
    """A folder with the rollouts of the recipe's own model, which is copied by tests that go on from them."""
    out = tmp_path_factory.mktemp("base") / "out"
    generate(finished[0], request=Request(out=out))
    return out


def drawn(recipe, overrides=(), **keys):
    return generate(recipe, overrides, request=Request(**keys))


def content(result):
    return (result.directory / "rollouts.jsonl").read_text()


@pytest.mark.ci
def test_one_and_two_processes_draw_the_same(finished, tmp_path):
    recipe, run_dir = finished
    keys = {"checkpoint": str(run_dir), "num_samples": 3}
    one = drawn(recipe, DRAWN, out=tmp_path / "1", **keys)
    two = drawn(recipe, DRAWN, out=tmp_path / "2", instances=TWO, **keys)
    assert content(one) == content(two)
    assert (one.num_done, one.num_rows, one.failed) == (7, 7, {})
    assert len(one.lines) == 21
    assert one.lines[4] == {
        "sample": 1,
        "rollout": 1,
        "prompt": "context 1",
        "response": one.lines[4]["response"],
        "finish_reason": "stop",
        "num_terms": 4,
        "policy_version": 3,
    }
    assert len({line["response"] for line in one.lines}) > 7
    assert len(list((two.directory / "logs").iterdir())) == 2


def test_figures_are_those_of_the_runs_own_evaluation(finished, tmp_path):
    recipe, run_dir = finished
    in_run = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]
    means = {line["policy_version"]: line["eval/reward_mean"] for line in in_run}
    last = Request(checkpoint=str(run_dir), out=tmp_path / "last", instances=TWO)
    measured = evaluate(recipe, request=last)
    assert (measured.rows, measured.failed, measured.interrupted) == (7, {}, False)
    assert measured.metrics["reward"].mean == pytest.approx(means[3], rel=1e-12)
    untrained = evaluate(recipe, request=Request(out=tmp_path / "untrained"))
    assert (untrained.rows, untrained.failed, untrained.interrupted) == (7, {}, False)
    assert untrained.metrics["reward"].mean == pytest.approx(means[0], rel=1e-12)
    assert measured.metrics["reward"].mean > untrained.metrics["reward"].mean
    written = json.loads((tmp_path / "last" / "eval.json").read_text())
    assert (written["step"], written["rows"], written["failed"]) == (3, 7, 0)
    assert written["metrics"]["reward/hits"]["low"] < means[3] < written["metrics"]["reward/hits"]["high"]


def test_a_process_that_ends_before_its_rows_are_done_is_an_error(recipe, tmp_path):
    """Also if it ends as one that is done: here a reward ends it."""
    (tmp_path / "quits.py").write_text("import os\n\n\ndef quits(group):\n    os._exit(0)\n")
    reward = 'reward.functions=[{name="quits:quits"}]'
    with pytest.raises(WorkerFailed, match=r"instance-0 died .*, 7 rows are left"):
        evaluate(recipe, [reward], request=Request(out=tmp_path / "out"), python_path=[str(tmp_path)])


def test_the_step_can_be_chosen(finished, tmp_path):
    recipe, run_dir = finished
    first = drawn(recipe, checkpoint=str(run_dir), step=1, out=tmp_path / "1")
    assert first.weights.version == first.lines[0]["policy_version"] == 1
    with pytest.raises(UserError, match="has no checkpoint of step 9; it has 1, 2, 3"):
        drawn(recipe, checkpoint=str(run_dir), step=9, out=tmp_path / "9")


def test_a_bad_prompt_is_a_line_and_not_the_end(recipe, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"context": 1}\n{"context": 99}\nnonsense\n{"context": 2}\n')
    made = drawn(recipe, prompts=str(rows), out=tmp_path / "out", instances=TWO)
    assert [line.get("error", "")[:12] for line in made.lines] == ["", "rows.jsonl:2", "rows.jsonl:3", ""]
    assert made.failed.keys() == {1, 2}
    assert made.num_done == 2


def test_a_second_call_draws_only_what_is_missing(recipe, base, tmp_path):
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    whole = (base / "rollouts.jsonl").read_text()
    kept = [line for line in whole.splitlines() if json.loads(line)["sample"] != 4]
    marked = [line.replace('"response": "', '"response": "kept ') for line in kept]
    (tmp_path / "rollouts.jsonl").write_text("\n".join([*marked, '{"sample": 4, "error": "x"}']) + "\n")
    told = []
    again = generate(recipe, request=Request(out=tmp_path), say=told.append)
    assert told[:2] == ["6 of 7 rows are already done", "rows: 1, processes: 1"]
    assert [line["response"].startswith("kept") for line in again.lines] == [sample != 4 for sample in range(7)]
    assert content(again).replace("kept ", "") == whole


def test_another_checkpoint_is_another_request(finished, base, tmp_path):
    recipe, run_dir = finished
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"another request \(other checkpoint\)"):
        drawn(recipe, out=tmp_path, checkpoint=str(run_dir))


def test_the_checkpoint_of_another_model_is_a_users_error(finished, tmp_path):
    recipe, run_dir = finished
    with pytest.raises(UserError, match=r"instance-0: .*in this model: is it of another"):
        drawn(recipe, ["model.hidden=8"], checkpoint=str(run_dir), out=tmp_path)


@pytest.mark.parametrize(
    ("overrides", "keys", "message"),
    [
        ((), {"instances": Instances(num_gpus=2, tp_size=2)}, "--tp-size 2: the engine 'torch' of the tiny domain"),
        ((), {"num_samples": 2}, "all samples are equal with .* add eval.temperature=1.0"),
        ((), {"num_samples": 0}, "--num-samples 0: must be at least 1"),
        (("rollout.engine=fast",), {}, r"\[rollout\] engine = 'fast': no engine is called 'fast'; known: tiny"),
        ((), {"step": 3}, "--step 3 needs the directory of a run"),
    ],
)
def test_what_cannot_be_is_told_before_anything_starts(recipe, tmp_path, overrides, keys, message):
    with pytest.raises(UserError, match=message):
        drawn(recipe, overrides, out=tmp_path, **keys)
    assert not (tmp_path / "logs").exists()


def test_more_gpus_than_there_are_is_told(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(UserError, match=r"--num-gpus 2: this machine has 1 \(3\)"):
        drawn(recipe, out=tmp_path, instances=TWO)


def test_an_instance_that_dies_is_told_with_the_end_of_its_log(recipe, tmp_path):
    (recipe.parent / "dying.py").write_text(
        "import os, sys\n"
        "from cosmos_rl_core.testing.tiny import Tiny\n"
        "class Dying(Tiny):\n"
        "    def build_engine(self, *_, **__):\n"
        "        print('out of memory', file=sys.stderr, flush=True)\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    request = Request(out=tmp_path)
    with pytest.raises(WorkerFailed, match=r"instance-0 died \(signal SIGKILL\)(.|\n)*out of memory"):
        generate(recipe, ["run.domain=dying:Dying"], request=request, python_path=[str(recipe.parent)])


def test_rewards_that_fail_leave_their_rows_out(recipe, tmp_path):
    measured = evaluate(recipe, ['reward.functions.0.name="nan"'], request=Request(out=tmp_path))
    assert (measured.rows, len(measured.failed), measured.metrics) == (0, 7, {})


# Supervised recipes


@pytest.fixture(scope="module")
def supervised(tmp_path_factory):
    """A supervised recipe, and the run of it."""
    folder = tmp_path_factory.mktemp("supervised")
    recipe = folder / "run.toml"
    sections = RECIPE.split("\n\n")
    kept = [s for s in sections if not s.strip().startswith(("[rollout", "[[reward", "[sync"))]
    recipe.write_text("\n\n".join(kept).replace("[data]", '[algorithm]\nname = "sft"\n\n[data]', 1))
    run(load_config(recipe, [f'run.output_dir="{folder / "run"}"']))
    return recipe, folder / "run"


def test_the_loss_of_a_supervised_checkpoint_is_that_of_its_run(supervised, tmp_path):
    recipe, run_dir = supervised
    in_run = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]
    losses = {line["policy_version"]: line["eval/loss"] for line in in_run}
    measured = evaluate(recipe, request=Request(checkpoint=str(run_dir), out=tmp_path))
    assert measured.metrics["loss"].mean == pytest.approx(losses[3], rel=1e-6)
    assert measured.metrics["loss"].mean < losses[0]
    assert json.loads((tmp_path / "eval.json").read_text())["metrics"]["loss"]["standard_error"] is None
    with pytest.raises(UserError, match="by one process: leave out"):
        evaluate(recipe, request=Request(out=tmp_path, instances=TWO))


def test_a_supervised_model_can_be_sampled_as_the_command_says(supervised, tmp_path):
    recipe, run_dir = supervised
    made = drawn(recipe, ["rollout.sampling.max_tokens=2"], checkpoint=str(run_dir), out=tmp_path)
    assert {line["num_terms"] for line in made.lines} == {2}


# The command line


def command(capsys, *arguments):
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code, *capsys.readouterr()


@pytest.fixture
def _path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("_path")
def test_generate_says_where_the_rollouts_are(recipe, base, tmp_path, capsys):
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    code, out, err = command(capsys, "generate", recipe, "--num-gpus", 2, "--out", tmp_path)
    assert (code, out) == (0, f"7 of 7 prompts: {tmp_path / 'rollouts.jsonl'}\n")
    assert err == "7 of 7 rows are already done\n"


@pytest.mark.usefixtures("_path")
def test_generate_prints_the_answer_to_a_single_prompt(recipe, base, tmp_path, capsys):
    lines = [json.loads(line) for line in (base / "rollouts.jsonl").read_text().splitlines()]
    code, out, _ = command(capsys, "generate", recipe, "eval.limit=1", "--out", tmp_path)
    assert code == 0
    assert out.splitlines() == [lines[0]["response"], f"1 of 1 prompts: {tmp_path / 'rollouts.jsonl'}"]


@pytest.mark.usefixtures("_path")
def test_eval_prints_a_table(finished, tmp_path, capsys):
    recipe, run_dir = finished
    code, out, _ = command(capsys, "eval", recipe, "--checkpoint", run_dir, "--out", tmp_path)
    assert code == 0
    assert out.splitlines()[0] == "step_3 on 7 rows"
    assert out.splitlines()[1].split("  ")[0] == "METRIC"
    assert "reward/hits" in out


@pytest.mark.usefixtures("_path")
def test_a_users_error_has_exit_code_2(recipe, tmp_path, capsys):
    code, out, err = command(capsys, "generate", recipe, "--num-gpus", 3, "--tp-size", 2, "--out", tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("error: --num-gpus 3 cannot be divided")


@pytest.mark.usefixtures("_path")
def test_nothing_but_failures_has_exit_code_1(recipe, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"context": {99 + place}}}\n' for place in range(5)))
    code, out, err = command(capsys, "generate", recipe, "--prompts", rows, "--out", tmp_path / "out")
    assert code == 1
    assert out.startswith("0 of 5 prompts")
    assert "row 0: rows.jsonl:1: context 99 is not below" in err
    assert "and 2 more rows without rollouts" in err


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(recipe, tmp_path):
    options = ["rollout.options.delay_s=0.05", "--prompts-at-once", "1", "--out", str(tmp_path), "--num-gpus", "2"]
    code = "from cosmos_rl_core.cli.main import main; main()"
    line = [sys.executable, "-c", code, "generate", str(recipe), *options]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    file = tmp_path / "rollouts.jsonl"
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "the same command continues from there" in err
    assert "of 7 prompts" in out
    before = file.read_text()
    assert 2 <= before.count("\n") < 7
    finished = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert finished.returncode == 0
    assert f"{before.count(chr(10))} of 7 rows are already done" in finished.stderr
    assert set(before.splitlines()) < set(file.read_text().splitlines())
    assert file.read_text().count("\n") == 7
