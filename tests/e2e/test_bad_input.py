"""What goes wrong by the user's hand: exit code 2, one message that names the place and what to do, no traceback."""

import contextlib
import json
import resource
import sys

import pytest

from cosmos_rl_core.checkpoint.manifest import list_steps, read_state
from cosmos_rl_core.cli.app import main
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.open_recipe import open_recipe
from cosmos_rl_core.launch.run import run_opened
from cosmos_rl_core.workers.directory import RunDirectory

REWARDS = """
def raises(group):
    raise KeyError("answer")

def nan(group):
    return [float("nan")] * len(group.rollouts)

def text(group):
    return "good"

def too_few(group):
    return [1.0]

number = 3
"""


def only_message(errors, *, has_run=False):
    """What follows "error: ", after checking that nothing else was said, but the choices of a run that has begun."""
    assert "Traceback" not in errors
    choices, found, message = errors.partition("error: ")
    assert found and (has_run or not choices), errors
    return message.strip()


@pytest.fixture
def refused(tmp_path, write_recipe, start):
    """Run a recipe as a user does, in a process of its own, and return the message it was refused with."""

    def refused(tables, *arguments, has_run=False, **options):
        recipe = write_recipe(tmp_path / "recipe.toml", tables)
        process = start("run", recipe, *arguments, **options)
        told, errors = process.communicate(timeout=120)
        assert process.returncode == 2, errors
        assert told == ""
        return only_message(errors, has_run=has_run)

    return refused


@pytest.fixture
def refused_here(tmp_path, write_recipe, capfd, monkeypatch, one_thread):
    """The same in this process, where torch is loaded already: for what is found in the middle of a run."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def refused(tables, *arguments, has_run=False):
        recipe = write_recipe(tmp_path / "recipe.toml", tables)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["run", str(recipe), *arguments])
        assert ended.value.code == 2
        return only_message(capfd.readouterr().err, has_run=has_run)

    return refused


def test_misspelt_keys_are_told_all_at_once_with_what_was_meant(tmp_path, bandit, refused):
    tables = bandit(tmp_path / "run", rollout__group_sze=3, polcy={"threads": 1}, policy__optimizer__lr=0.1)
    message = refused(tables)
    assert message.startswith(f"{tmp_path / 'recipe.toml'}: 3 problems\n")
    text = " ".join(message.split())
    assert "rollout.group_sze = 3: unknown key" in text and '= help: did you mean "group_size"?' in text
    assert "polcy = {threads = 1}: unknown key" in text and '[polcy] | ^^^^^^^ = help: did you mean "policy"?' in text
    assert "policy.optimizer.lr = 0.1: unknown key" in text and "= help: known here: name, learning_rate" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"run__domain": "lm"}, "no domain is called 'lm'; did you mean 'llm'?"),
        ({"run__domain": "nowhere:TINY"}, "No module named 'nowhere'"),
        ({"algorithm__name": "gpro"}, "no algorithm is called 'gpro'; did you mean 'grpo'?"),
        ({"reward__functions": [{"name": "hit"}]}, "no reward is called 'hit'"),
        ({"sync__backend": "trasfer"}, "no weight_sync is called 'trasfer'; did you mean 'transfer'?"),
        ({"data__rows": 0}, "data: tiny has no rows"),
        (
            {"policy__prompts_per_step": 11, "prompts__epochs": 1},
            "10 rows are fewer than [policy] prompts_per_step = 11",
        ),
    ],
)
def test_what_the_recipe_asks_for_is_not_there(change, said, tmp_path, bandit, refused):
    assert said in refused(bandit(tmp_path / "run", **change))


def test_the_dataset_is_not_there(tmp_path, sums, qwen, refused):
    message = refused(sums(tmp_path / "run", data__path=str(qwen / "tran.jsonl")))
    assert 'no such file or directory. Did you mean "train.jsonl"?' in message
    assert f'path = "{qwen / "tran.jsonl"}"\n' in message and "^" in message


def test_every_row_lacks_the_column(tmp_path, sums, refused):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    message = refused(sums(tmp_path / "run", data__path=str(rows)))
    assert f"{rows}:1: no column 'prompt' (data.prompt_column); there are: 'question', 'answer'" in message


def test_the_dataset_is_empty(tmp_path, sums, refused):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")
    assert "the dataset is empty; it needs at least one row" in refused(sums(tmp_path / "run", data__path=str(rows)))


def test_a_reward_has_no_such_option(tmp_path, sums, refused):
    functions = [{"name": "length", "options": {"max_token": 3}}]
    message = refused(sums(tmp_path / "run", reward__functions=functions))
    assert 'options.max_token = 3: unknown key; did you mean "max_tokens"?' in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model__path": "./nowhere"}, 'model.path = "./nowhere": is not a directory'),
        ({"rollout__engine": "vlm"}, "rollout.engine = \"vlm\": no engine is called 'vlm'"),
        (
            {"rollout__options": {"max_sequence": 3}},
            'rollout.options.max_sequence = 3: unknown key; did you mean "max_sequences"?',
        ),
        ({"sync__transport": "rdma"}, "no transport is called 'rdma'; known: auto"),
    ],
)
def test_what_only_the_workers_can_know(change, said, tmp_path, sums, refused_here):
    tables = sums(tmp_path / "run", run__placement="inline", **change)
    assert said in refused_here(tables, has_run="rollout__options" in change)  # the policy has begun before its engine


@pytest.mark.parametrize("length", [{"run__max_steps": 3}, {"prompts__epochs": 1}], ids=["endless", "one epoch"])
def test_every_prompt_is_longer_than_the_context(length, tmp_path, sums, refused_here):
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"prompt": "1+" * 40 + "1=", "answer": "41"}) + "\n") * 8)
    tables = sums(tmp_path / "run", run__placement="inline", data__path=str(rows), **length)
    early = refused_here(tables)
    assert "data: row 1 has 82 tokens and with up to 4 new ones exceeds the context of 32" in early
    assert "and so does the shortest row" in early
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError) as caught:  # the error of a run that was not checked
        run_opened(open_recipe(tables), resume=None, overwrite=False)
    message = str(caught.value)
    assert "the prompt has 82 tokens and with up to 4 new ones exceeds the context of 32" in message
    assert "shorten it, lower rollout.sampling.max_tokens or raise model.max_length" in message
    assert "rows.jsonl:" in message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "raised KeyError: 'answer'"),
        ("nan", "returned nan for rollout 0; it must be a finite number"),
        ("text", "returned str; it must return one number per rollout"),
        ("too_few", "returned 1 values for 4 rollouts"),
    ],
)
def test_a_reward_goes_wrong(name, said, tmp_path, bandit, refused_here):
    (tmp_path / "wrong_rewards.py").write_text(REWARDS)
    functions = [{"name": f"wrong_rewards:{name}"}]
    message = refused_here(bandit(tmp_path / "run", run__placement="inline", reward__functions=functions))
    assert said in message
    assert f"reward '{name}' on tiny:" in message


def test_a_reward_is_no_function(tmp_path, bandit, refused):
    (tmp_path / "wrong_rewards.py").write_text(REWARDS)
    message = refused(bandit(tmp_path / "run", reward__functions=[{"name": "wrong_rewards:number"}]))
    assert "[reward] wrong_rewards:number is 3, not a function" in message


def test_the_directory_is_in_use_by_a_live_run(tmp_path, bandit, refused):
    with contextlib.closing(RunDirectory.open(tmp_path / "run", resume=False, overwrite=False)):
        message = refused(bandit(tmp_path / "run"), "--overwrite")
    assert f"{tmp_path / 'run'} is in use by a live run (process " in message
    assert message.endswith("wait for it, stop it, or choose another folder")


def test_the_directory_holds_an_earlier_run(tmp_path, bandit, refused):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "resolved.toml").write_text("")
    message = refused(bandit(tmp_path / "run"))
    assert f"{tmp_path / 'run'} contains an earlier run" in message
    assert message.endswith("continue it with --resume auto, replace it with --overwrite, or choose another folder")


def test_the_directory_cannot_be_made(tmp_path, bandit, refused):
    (tmp_path / "file").write_text("")
    message = refused(bandit(tmp_path / "file" / "run"))
    assert f"cannot be used: {tmp_path / 'file'}: Not a directory" in message


def test_there_is_no_checkpoint_to_go_on_from(tmp_path, bandit, refused):
    message = refused(bandit(tmp_path / "run"), "--resume", str(tmp_path / "step_4"))
    assert f"--resume {tmp_path / 'step_4'}: no checkpoint there" in message


@pytest.mark.ci
def test_the_disk_fills_up_and_what_was_saved_stays(tmp_path, bandit, refused):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    run_dir = tmp_path / "run"
    tables = bandit(run_dir, run__placement="inline", run__max_steps=500, checkpoint__every_steps=1)
    message = refused(tables, has_run=True, preexec_fn=small_files)
    assert "what was written so far is kept. Free space there and continue with --resume auto" in message
    steps = list_steps(run_dir / "checkpoints")
    assert len(steps) == 2
    assert [read_state(run_dir / "checkpoints" / f"step_{step}").step for step in steps] == steps
