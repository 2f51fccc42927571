"""The command line as a user meets it: messages, streams and exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace

import msgspec
import pytest

from cosmos_rl_core.cli.app import error_text, main
from cosmos_rl_core.control.address_file import ControllerFile
from cosmos_rl_core.control.status import live_controller, read_status, render
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.record import RecordedOutcome, record_outcome
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.testing.tiny_task import TinyData, TinyModel

RECIPE = """
[run]
domain = "cosmos_rl_core.testing.tiny:TINY"
max_steps = 10

[data]
rows = 12

[policy]
prompts_per_step = 4

[sync]
backend = "cosmos_rl_core.testing.file_sync:FileSync"

[rollout]
group_size = 3

[rollout.sampling]
max_tokens = 5

[[reward.functions]]
name = "hits"
"""


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def cosmos_rl(tmp_path, monkeypatch, capsys):
    """Run a command line in this process, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        code = ended.value.code
        return Done(code if isinstance(code, int) else 0, *capsys.readouterr())

    return call


@pytest.fixture
def recipe(tmp_path):
    """A directory `demo` with a recipe in it; commands run outside of it."""
    path = tmp_path / "demo" / "run.toml"
    path.parent.mkdir()
    path.write_text(RECIPE)
    return path


def refused(done) -> str:
    """The message of a user's error: exit code 2, on stderr, without a traceback."""
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


def test_help_lists_the_commands(cosmos_rl):
    done = cosmos_rl("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("run", "check", "plan", "init", "plugins", "status"):
        assert f"\n  {command} " in done.stdout


def test_a_package_adds_a_command_and_a_broken_one_hides_no_other(tmp_path, monkeypatch, cosmos_rl):
    (tmp_path / "extra.py").write_text('def greet(name: str) -> None:\n    """Greet."""\n    print(f"hello {name}")\n')
    info = tmp_path / "extra-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cosmos_rl.commands]\ngreet = extra:greet\nlost = extra:nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = cosmos_rl("greet", "world")
    assert (done.returncode, done.stdout) == (0, "hello world\n")
    assert "command 'lost': extra" in done.stderr
    assert "greet" in cosmos_rl("--help").stdout


def test_version_is_that_of_the_installed_packages(cosmos_rl):
    done = cosmos_rl("--version")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"cosmos-rl-core {version('cosmos-rl-core')}")


def test_keys_shows_type_default_and_meaning(cosmos_rl):
    done = cosmos_rl("keys", "rollout", "--domain", "cosmos_rl_core.testing.tiny:TINY")
    assert (done.returncode, done.stderr) == (0, "")
    assert "group_size  integer  (default 8)\n    Number of rollouts generated for each prompt." in done.stdout
    model = cosmos_rl("keys", "[model]", "--domain", "cosmos_rl_core.testing.tiny:TINY").stdout
    assert "actions  integer  (default 5)\n    V: actions to choose from." in model


def test_keys_of_a_misspelt_section_suggests_one(cosmos_rl):
    tiny = ("--domain", "cosmos_rl_core.testing.tiny:TINY")
    assert "no section is called 'rollot'; did you mean 'rollout'?" in refused(cosmos_rl("keys", "rollot", *tiny))
    assert "[rollout] has no 'samplin'; did you mean 'sampling'?" in refused(
        cosmos_rl("keys", "rollout.samplin", *tiny)
    )


def test_the_schema_has_the_keys_of_core_and_domain_and_no_others(cosmos_rl):
    schema = json.loads(cosmos_rl("schema", "cosmos_rl_core.testing.tiny:TINY").stdout)

    def table(at):
        found = schema["properties"][at]
        return schema["$defs"][found["$ref"].rpartition("/")[2]] if "$ref" in found else found

    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert (set(table("model")["properties"]), table("model")["additionalProperties"]) == (
        set(TinyModel.model_fields),
        False,
    )
    assert set(table("data")["properties"]) == set(TinyData.model_fields)
    assert table("rollout")["additionalProperties"] is False
    assert '"null"' not in json.dumps(schema)


def test_the_shell_completes_commands():
    code = "import sys; from cosmos_rl_core.cli.app import main; sys.argv = ['cosmos-rl']; main()"
    typed = {"_COSMOS_RL_COMPLETE": "complete_bash", "COMP_WORDS": "cosmos-rl in", "COMP_CWORD": "1"}
    environment = {**os.environ, **typed}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["init"], done.stderr


def test_an_unknown_command_is_a_users_error(cosmos_rl):
    assert "No such command 'trian'" in refused(cosmos_rl("trian", "x.toml"))


def test_check_tells_what_a_good_recipe_will_do(recipe, cosmos_rl):
    done = cosmos_rl("check", recipe)
    assert (done.returncode, done.stderr) == (0, "")
    first, *summary = done.stdout.splitlines()
    assert first == f"{recipe}: ok"
    assert [line.split()[0] for line in summary] == ["run", "data", "eval", "step", "rewards"]
    assert "10 steps, local, into runs/demo" in done.stdout
    assert "12 rows of tiny (context)" in done.stdout
    assert "4 prompts x 3 rollouts x up to 5 tokens" in done.stdout


def test_check_tells_every_config_error_at_once(recipe, cosmos_rl):
    done = cosmos_rl("check", recipe, "rollout.group_sze=4", "sync.max_staleness=-1")
    message = refused(done)
    assert f"error: {recipe}: 2 problems" in message
    assert 'rollout.group_sze = 4: unknown key; did you mean "group_size"?' in message
    assert "sync.max_staleness = -1: must be greater than or equal to 0" in message


def test_check_tells_of_missing_rows_and_rewards_at_once(recipe, cosmos_rl):
    message = refused(cosmos_rl("check", recipe, "data.rows=0", "reward.functions.0.name=hit"))
    assert "data: tiny has no rows" in message
    assert "reward.functions.0.name = \"hit\": no reward is called 'hit'" in message


def test_check_tells_errors_of_keys_data_and_rewards_in_one_message(recipe, cosmos_rl):
    text = recipe.read_text().replace("max_steps = 10", 'max_steps = "10"').replace("rows = 12", "rows = 0")
    recipe.write_text(text.replace('"hits"', '"hit"'))
    message = refused(cosmos_rl("check", recipe, "sync.max_staleness=-1"))
    assert f"error: {recipe}: 4 problems" in message
    assert f'{recipe}:4:13: run.max_steps = "10": must be an integer' in message
    assert f"{recipe}:6:1: data: tiny has no rows" in message
    assert f"{recipe}:22:8: reward.functions.0.name = \"hit\": no reward is called 'hit'" in message
    assert "sync.max_staleness = -1" in message


def test_check_names_the_reward_whose_file_is_missing(recipe, cosmos_rl):
    (recipe.parent / "judging.py").write_text(
        "class Judge:\n"
        "    def __init__(self):\n"
        "        open('judge.safetensors')\n"
        "    def __call__(self, group):\n"
        "        return []\n"
    )
    message = refused(cosmos_rl("check", recipe, "reward.functions.0.name=judging:Judge"))
    assert "[reward] judging:Judge cannot be built: [Errno 2] No such file or directory: 'judge.safetensors'" in message


def test_a_missing_recipe_is_a_users_error(cosmos_rl):
    assert "nothing.toml: no such file" in refused(cosmos_rl("check", "nothing.toml"))


def test_a_recipe_finds_the_module_beside_it(recipe, cosmos_rl):
    (recipe.parent / "beside.py").write_text("def brevity(group):\n    return [0.0 for _ in group.rollouts]\n")
    override = "reward.functions.0.name=beside:brevity"
    done = cosmos_rl("check", recipe, override)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_bug_keeps_its_traceback(recipe, cosmos_rl):
    (recipe.parent / "faulty.py").write_text(
        "from cosmos_rl_core.testing.tiny import Tiny\n"
        "class Faulty(Tiny):\n"
        "    def load_rows(self, data):\n"
        "        raise ZeroDivisionError('a bug')\n"
    )
    with pytest.raises(ZeroDivisionError):
        main(["check", str(recipe), "run.domain=faulty:Faulty"])


def test_ctrl_c_ends_with_130(recipe, cosmos_rl):
    (recipe.parent / "interrupted.py").write_text(
        "from cosmos_rl_core.testing.tiny import Tiny\n"
        "class Interrupted(Tiny):\n"
        "    def load_rows(self, data):\n"
        "        raise KeyboardInterrupt\n"
    )
    done = cosmos_rl("check", recipe, "run.domain=interrupted:Interrupted")
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_ctrl_c_while_the_command_line_is_imported_is_one_line(tmp_path):
    """The first command of a process imports for half a second, in which a user may think again."""
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from cosmos_rl_core.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "plugins"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("given", "meant"), [("rnu", "run"), ("train", "run"), ("trian", "run"), ("validate", "check"), ("evalute", "eval")]
)
def test_an_unknown_command_suggests_the_one_that_is_meant(cosmos_rl, given, meant):
    done = cosmos_rl(given)
    assert done.returncode == 2 and f"No such command '{given}'. Did you mean '{meant}'?" in done.stderr


def test_help_shows_examples(cosmos_rl):
    shown = cosmos_rl("run", "--help").stdout
    assert "  Examples:\n  cosmos-rl run run.toml\n" in shown


def test_a_script_that_does_not_catch_a_user_error_ends_with_its_message_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from cosmos_rl_core import run\n"
        "if __name__ == '__main__':\n"
        "    run({'run': {'domain': 'cosmos_rl_core.testing.tiny:TINY', 'max_steps': 1},\n"
        "         'reward': {'functions': [{'name': lambda group: [0.0]}]}})\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("error: <function <lambda> at ")
    assert "is a function" in done.stderr and "rewards=[function]" in done.stderr and "Traceback" not in done.stderr


def test_the_process_itself_exits_with_2_and_one_message(recipe):
    code = "from cosmos_rl_core.cli.main import main; main()"
    command = [sys.executable, "-c", code, "check", str(recipe), "run.max_steps=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    message = refused(Done(done.returncode, done.stdout, done.stderr)).splitlines()
    assert message[0] == f"error: {recipe}: 1 problem"
    assert message[1:] == ["  run.max_steps = 0: must be greater than or equal to 1"]


def test_plan_counts_processes_and_amounts(recipe, cosmos_rl):
    done = cosmos_rl("plan", recipe, "rollout.replicas=2", "sync.max_staleness=2", "--json")
    planned = json.loads(done.stdout)
    assert {r["role"]: r["processes"] for r in planned["roles"]} == {
        "controller": 1,
        "policy": 1,
        "rollout": 2,
    }
    assert planned["groups_in_flight"] == 3 * 4
    assert planned["generated_terms_per_step"] == 4 * 3 * 5


def test_plan_of_one_process_has_one_process(recipe, cosmos_rl):
    done = cosmos_rl("plan", recipe, "run.placement=inline", "--json")
    assert sum(role["processes"] for role in json.loads(done.stdout)["roles"]) == 1


def test_plan_is_a_table(recipe, cosmos_rl):
    done = cosmos_rl("plan", recipe)
    assert "ROLE        REPLICAS  PROCESSES  THREADS" in done.stdout


def test_a_dry_run_checks_and_plans_and_starts_nothing(recipe, cosmos_rl):
    done = cosmos_rl("run", recipe, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{recipe}: ok" in done.stdout
    assert "PROCESSES" in done.stdout
    assert not (recipe.parent.parent / "runs").exists()


def test_init_without_a_shipped_recipe_is_a_users_error(tmp_path, cosmos_rl):
    done = cosmos_rl("init", "cosmos_rl_core.testing.tiny:TINY", "there")
    assert "ships no recipe.toml" in refused(done)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def domain_package(tmp_path, monkeypatch):
    """A package in the working directory whose domain ships a recipe."""
    package = tmp_path / "robots"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "domain.py").write_text("from cosmos_rl_core.testing.tiny import TINY as ROBOTS\n")
    (package / "recipe.toml").write_text(RECIPE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("robots", "robots.domain"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_init_writes_the_recipe_of_the_domain(domain_package, cosmos_rl):
    done = cosmos_rl("init", "robots.domain:ROBOTS", "mine")
    assert (done.returncode, done.stderr) == (0, "")
    assert (domain_package / "mine" / "run.toml").read_text() == f"#:schema ./recipe.schema.json\n{RECIPE}"
    schema = json.loads((domain_package / "mine" / "recipe.schema.json").read_text())
    assert schema == json.loads(cosmos_rl("schema", "robots.domain:ROBOTS").stdout)


def test_init_never_overwrites(domain_package, cosmos_rl):
    cosmos_rl("init", "robots.domain:ROBOTS", "mine")
    (domain_package / "mine" / "run.toml").write_text("mine now")
    assert "exists already" in refused(cosmos_rl("init", "robots.domain:ROBOTS", "mine"))
    assert (domain_package / "mine" / "run.toml").read_text() == "mine now"


def test_plugins_is_a_table(cosmos_rl):
    done = cosmos_rl("plugins")
    assert (done.returncode, done.stdout.split()[:3]) == (0, ["GROUP", "NAME", "FROM"])


@pytest.fixture
def run_dir(tmp_path):
    """A run directory as a controller leaves it, its lock held by this process."""
    status = {
        "time": time.time(),
        "phase": "train",
        "step": 12,
        "version": 11,
        "generation": 1,
        "epoch": 5,
        "mesh": ["policy-0"],
        "wanted": {"policy": 1, "rollout": 3},
        "members": [
            {"name": "policy-0", "role": "policy", "state": "ready", "since_s": 4000, "age_s": 0.6, "version": 11},
            {"name": "rollout-0", "role": "rollout", "state": "ready", "since_s": 75, "age_s": 0.4, "version": 10},
            {"name": "rollout-1", "role": "rollout", "state": "joining", "since_s": 5, "age_s": 0.4},
        ],
        "samples": {"leased": 5, "committed": 96},
        "waits": ["policy waits for 3 groups"],
    }
    (tmp_path / "status.json").write_text(json.dumps(status))
    (tmp_path / "run.lock").write_text(f"{os.getpid()}\n")
    return tmp_path


def test_status_of_a_live_run(run_dir, cosmos_rl):
    done = cosmos_rl("status", run_dir)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"live (pid {os.getpid()})" in done.stdout
    assert "phase train, step 12, version 11" in done.stdout
    assert "mesh epoch 5: policy-0; controller generation 1" in done.stdout
    assert "workers ready: 1 of 1 policy, 1 of 3 rollout" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("policy-", "rollout-"))]
    assert rows == [
        ["policy-0", "policy", "ready", "1", "h", "06", "min", "11", "1", "s"],
        ["rollout-0", "rollout", "ready", "1", "min", "15", "s", "10", "0", "s"],
        ["rollout-1", "rollout", "joining", "5", "s", "-", "0", "s"],
    ]
    assert "samples: 5 leased, 96 committed" in done.stdout
    assert "  policy waits for 3 groups" in done.stdout


def test_status_says_when_the_controller_is_gone(run_dir, cosmos_rl):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (run_dir / "run.lock").write_text(str(gone.pid))
    assert "NOT LIVE" in cosmos_rl("status", run_dir).stdout


def test_status_of_a_finished_run_is_no_alarm(run_dir, cosmos_rl):
    written = json.loads((run_dir / "status.json").read_text()) | {"phase": "finished"}
    (run_dir / "status.json").write_text(json.dumps(written))
    shown = cosmos_rl("status", run_dir).stdout
    assert f"{run_dir}: finished 0 s ago" in shown and "waiting" not in shown


def test_status_of_a_run_that_failed_has_the_reason_and_the_command_that_continues(run_dir, cosmos_rl):
    outcome = RecordedOutcome(
        state="failed",
        message="policy-0: KeyError: 'x'",
        worker="policy-0",
        step=11,
        checkpoint=f"{run_dir}/checkpoints/step_10",
        resume="cosmos-rl run a.toml --resume auto",
        ended=time.time() - 900,
    )
    record_outcome(run_dir, outcome)
    (run_dir / "run.lock").unlink()
    assert f"{run_dir}: failed " in cosmos_rl("status", run_dir).stdout
    shown = render(run_dir, read_status(run_dir), controller="", now=outcome.ended + 900, outcome=outcome)
    assert f"{run_dir}: failed 15 min 00 s ago, after 11 steps" in shown
    assert "reason: policy-0: KeyError: 'x'" in shown
    assert f"log: {run_dir}/logs/policy-0.log" in shown
    assert "continue: cosmos-rl run a.toml --resume auto" in shown
    assert "waiting" not in shown


def test_status_of_a_killed_run_has_the_command_that_continues(run_dir, cosmos_rl):
    (run_dir / "run.lock").unlink()
    (run_dir / "checkpoints" / "step_5").mkdir(parents=True)
    (run_dir / "checkpoints" / "step_5" / "manifest.json").write_text("{}")
    shown = cosmos_rl("status", run_dir).stdout
    assert f"continue: cosmos-rl run {run_dir}/resolved.toml --resume auto" in shown


def test_status_says_when_the_controller_is_silent(run_dir, cosmos_rl):
    written = json.loads((run_dir / "status.json").read_text()) | {"time": time.time() - 60}
    (run_dir / "status.json").write_text(json.dumps(written))
    assert f"live (pid {os.getpid()}), but silent for 60 s" in cosmos_rl("status", run_dir).stdout


def test_status_without_a_lock_is_not_live(run_dir, cosmos_rl):
    (run_dir / "run.lock").unlink()
    assert "NOT LIVE" in cosmos_rl("status", run_dir).stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "of a started run"), ("{}", "not a status file"), ("{", "not a status")],
)
def test_status_of_something_else_is_a_users_error(tmp_path, text, message, cosmos_rl):
    if text is not None:
        (tmp_path / "status.json").write_text(text)
    assert message in refused(cosmos_rl("status", tmp_path))


def test_the_status_of_a_run_that_was_copied_from_another_machine_is_unknown(tmp_path, cosmos_rl):
    status = {"time": time.time() - 3 * 86400, "phase": "training", "step": 4, "version": 4}
    (tmp_path / "status.json").write_text(json.dumps(status))
    (tmp_path / "run.lock").write_text("999999999\n")
    here = ControllerFile.of_this_process("tcp://127.0.0.1:1", generation=0)
    msgspec.structs.replace(here, host="n7", pid=12).write(tmp_path)
    found = cosmos_rl("status", tmp_path)
    assert found.returncode == 0
    assert f"{tmp_path}: unknown: last seen 72 h" in found.stdout and "ago, on n7" in found.stdout
    assert "continue: cosmos-rl run" in found.stdout


def test_status_does_not_look_for_the_controller_of_another_machine_here(tmp_path):
    assert live_controller(tmp_path) == ""
    (tmp_path / "run.lock").write_text("999999999\n")
    here = ControllerFile.of_this_process("tcp://127.0.0.1:1", generation=0)
    here.write(tmp_path)
    assert live_controller(tmp_path) == ""
    msgspec.structs.replace(here, host="n7", pid=12).write(tmp_path)
    assert live_controller(tmp_path, seen_s=5.0) == "pid 12 on n7"
    assert live_controller(tmp_path, seen_s=300.0) == ""
    (tmp_path / "run.lock").write_text(f"{os.getpid()}\n")
    assert live_controller(tmp_path) == f"pid {os.getpid()}"


def test_errors_have_colours_on_a_terminal_unless_no_color_is_set(monkeypatch):
    error = UserError("r.toml: 1 problem\n  x = 1\n  ^^^\n      = help: remove it")
    assert error_text(error) == f"error: {error}"
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert re.sub(r"\x1b\[[0-9;]*m", "", error_text(error)) == f"error: {error}"
    assert error_text(error).count("\x1b[31m") == 2
    monkeypatch.setenv("NO_COLOR", "1")
    assert error_text(error) == f"error: {error}"
