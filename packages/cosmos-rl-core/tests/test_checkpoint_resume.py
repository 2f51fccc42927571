"""What a run goes on from: the newest whole checkpoint, and a recipe that keeps what was promised."""

import re
import shutil
import sys
import types
from dataclasses import asdict

import pytest

from cosmos_rl_core import run
from cosmos_rl_core.checkpoint.changes import EFFECTS, changes
from cosmos_rl_core.checkpoint.manifest import MANIFEST, STATE, Origin, list_steps, verify, write_json, write_manifest
from cosmos_rl_core.checkpoint.resume import claim_root, find_resumption, recipe_of, resume_problems
from cosmos_rl_core.checkpoint.retention import read_scores, surplus
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.settings.problems import known_tables
from cosmos_rl_core.storage.folder import Folder

RECIPE = {
    "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "name": "bandit", "max_steps": 4, "placement": "inline"},
    "model": {"actions": 3, "contexts": 6},
    "data": {"rows": 6},
    "rollout": {"engine": "tiny", "group_size": 4, "sampling": {"max_tokens": 3}},
    "reward": {"functions": [{"name": "hits"}]},
    "policy": {"prompts_per_step": 2, "optimizer": {"learning_rate": 0.05}},
    "sync": {"max_staleness": 0, "backend": "cosmos_rl_core.testing.file_sync:FileSync"},
    "logging": {"sinks": ["jsonl"]},
}


def recipe(**changes):
    """The recipe with changes: `policy__optimizer__learning_rate=1.0`."""
    return load_config(RECIPE, [f"{key.replace('__', '.')}={value}" for key, value in changes.items()])


def write_checkpoint(root, step, *, config=None):
    folder = Folder.at(root / f"step_{step}")
    origin = Origin(recipe=recipe_of(config or recipe()))
    write_json(folder, STATE, {"step": step, "next_sample": 0, "unfinished": [], "origin": asdict(origin)})
    folder.write("policy/model.safetensors", [b"weights"])
    write_manifest(folder)
    return folder.path


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


def found(tmp_path, resume="auto", **changes):
    return find_resumption(recipe(**changes), tmp_path, resume)


def test_auto_means_the_newest_checkpoint_or_none(tmp_path, root):
    assert found(tmp_path) is None
    for step in (9, 10):
        write_checkpoint(root, step)
    (root / "step_11").mkdir()
    assert found(tmp_path).folder.path == root / "step_10"
    assert found(tmp_path).state.step == 10


def test_auto_names_a_damaged_checkpoint_and_takes_the_one_before(tmp_path, root):
    for step in (2, 4, 6):
        write_checkpoint(root, step)
    for step in (4, 6):
        (root / f"step_{step}" / STATE).write_text("{}")
    resumption = found(tmp_path)
    assert resumption.state.step == 2
    assert [
        f"step_{step}/{STATE} is damaged or missing; going on" in note
        for step, note in zip((6, 4), resumption.notes, strict=True)
    ] == [True, True]


@pytest.mark.parametrize(
    "manifest",
    [
        *("[]", "7", "{}", '{"files": [1]}', '{"files": {}}', '{"files": {"state.json": 1}}', "[" * 5000, "\xff"),
        '{"files": {"state.json": "%s"}}' % ("0" * 64),
        '{"files": {"policy/model.safetensors": "%s"}}' % ("0" * 64),
    ],
    ids=lambda text: text[:40],
)
def test_auto_passes_over_a_manifest_of_another_form(tmp_path, root, manifest):
    for step in (2, 4):
        write_checkpoint(root, step)
    (root / "step_4" / MANIFEST).write_text(manifest, encoding="latin-1")
    resumption = found(tmp_path)
    assert resumption.state.step == 2
    assert f"step_4 is not a complete checkpoint: its {MANIFEST}" in resumption.notes[0]
    with pytest.raises(UserError, match=rf"step_4 is not a complete checkpoint: its {MANIFEST}"):
        found(tmp_path, str(root / "step_4"))


@pytest.mark.parametrize(
    "state",
    ["[]", "{}", '{"step": "4", "next_sample": 0, "unfinished": []}', "[" * 5000, "no"],
    ids=lambda value: str(value)[:40],
)
def test_auto_passes_over_a_state_of_another_form(tmp_path, root, state):
    for step in (2, 4):
        write_checkpoint(root, step)
    (root / "step_4" / STATE).write_text(state)
    write_manifest(root / "step_4")
    assert found(tmp_path).state.step == 2


@pytest.mark.parametrize(
    "name", ["step_\u0661\u0662", "step_\u00b2", "step_012", "step_", "step_4_best", "step_-4", "step_4 "]
)
def test_a_folder_that_is_called_otherwise_is_no_checkpoint(tmp_path, root, name):
    write_checkpoint(root, 4)
    write_checkpoint(root, 12).rename(root / name)
    assert list_steps(root) == [4]
    assert found(tmp_path).state.step == 4


def test_auto_starts_nothing_anew_when_no_checkpoint_is_whole(tmp_path, root):
    write_checkpoint(root, 2)
    (root / "step_2" / STATE).write_text("{}")
    with pytest.raises(UserError, match=rf"none of the checkpoints .* is whole: .*{STATE} is damaged"):
        found(tmp_path)


def test_a_path_means_that_checkpoint_wherever_it_lies(tmp_path, root):
    for place in (tmp_path / "elsewhere", root):
        path = write_checkpoint(place, 5)
        assert found(tmp_path, str(path)).folder.path == path


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--resume .*nothing: no checkpoint there"):
        found(tmp_path, str(tmp_path / "nothing"))


def test_a_path_older_than_what_the_directory_holds_is_refused(tmp_path, root):
    older = write_checkpoint(root, 2)
    write_checkpoint(root, 4)
    with pytest.raises(UserError, match=r"holds later checkpoints, .*\(step_4\)"):
        found(tmp_path, str(older))


def test_a_damaged_checkpoint_that_was_asked_for_is_named(tmp_path, root):
    path = write_checkpoint(root, 2)
    (path / STATE).write_text("{}")
    with pytest.raises(UserError, match=rf"step_2/{STATE} is damaged"):
        found(tmp_path, str(path))


@pytest.mark.parametrize(
    ("key", "value", "change"),
    [
        ("run__seed", 1, "run.seed was 0 and is 1"),
        ("model__hidden", 8, "model.hidden was 16 and is 8"),
        ("data__rows", 4, "data.rows was 6 and is 4"),
        ("prompts__shuffle", "false", "prompts.shuffle was true and is false"),
        ("policy__prompts_per_step", 3, "policy.prompts_per_step was 2 and is 3"),
        ("rollout__group_size", 5, "rollout.group_size was 4 and is 5"),
        ("policy__optimizer__name", "sgd", 'policy.optimizer.name was "adamw" and is "sgd"'),
    ],
)
def test_a_recipe_that_breaks_what_was_promised_is_refused(tmp_path, root, key, value, change):
    write_checkpoint(root, 2)
    with pytest.raises(UserError, match="written with another recipe") as refused:
        found(tmp_path, **{key: value})
    assert change in str(refused.value)
    assert "Restore that" in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "effect"),
    [
        ("sync__max_staleness", 1, "training differs from here on"),
        ("algorithm__name", "rloo", "training differs from here on"),
        ("rollout__sampling__temperature", 0.5, "training differs from here on"),
        ("policy__optimizer__learning_rate", 0.5, "training differs from here on"),
        ("run__max_steps", 99, "the run ends at another step"),
        ("rollout__replicas", 3, "another layout"),
        ("policy__replicas", 2, "another layout"),
        ("policy__parallel__dp_shard", 4, "another layout"),
        ("policy__threads", 1, "another layout"),
        ("eval__temperature", 0.5, "metrics before and after may not be comparable"),
        ("logging__media_every", 3, "no effect on the training"),
        ("checkpoint__every_steps", 3, "no effect on the training"),
    ],
)
def test_every_changed_key_is_reported_with_its_effect(tmp_path, root, key, value, effect):
    write_checkpoint(root, 2)
    (note,) = (note for note in found(tmp_path, **{key: value}).notes if effect in note)
    assert note.startswith("changed since the checkpoint: ")
    assert f"{key.replace('__', '.')} was " in note


def test_an_unchanged_recipe_is_not_reported(tmp_path, root):
    write_checkpoint(root, 2)
    assert found(tmp_path).notes == ()


@pytest.mark.parametrize(
    ("saved", "now", "expected"),
    [
        ({"teacher": None}, {"teacher": {"path": "big"}}, ['teacher was not set and is {path = "big"}']),
        ({"teacher": {"path": "big"}}, {"teacher": None}, ['teacher was {path = "big"} and is not set']),
        ({"rollout": {"options": {}}}, {"rollout": {"options": {"a": 1}}}, ["rollout.options.a was not set and is 1"]),
        ({"run": {}}, {"run": {"tf32": True}}, []),  # a key of another release
        (
            {"logging": {"a": 1, "b": 2}},
            {"logging": {"a": 2, "b": 3}},
            ["logging.a was 1 and is 2", "logging.b was 2 and is 3"],
        ),
    ],
)
def test_sections_and_free_keys_that_one_recipe_lacks(saved, now, expected):
    assert [str(change) for change in changes(saved, now)] == expected


def test_every_section_has_an_effect():
    assert {key.partition(".")[0] for key in EFFECTS} == set(RunConfig.model_fields)
    known = {
        "",
        *(f"{table}.{key}" if table else key for table, keys in known_tables(RunConfig).items() for key in keys),
    }
    assert set(EFFECTS) - known <= {"model.dtype", "model.lora.serve"}  # keys of domains


def problems_of(tmp_path, resume="auto", **changes):
    return [str(problem) for problem in resume_problems(recipe(**changes), tmp_path, resume)]


def test_the_checks_before_a_run_find_what_a_resumption_would(tmp_path, root):
    assert problems_of(tmp_path) == []
    write_checkpoint(root, 4)
    assert problems_of(tmp_path) == []
    seed, steps = problems_of(tmp_path, run__seed=1, run__max_steps=3)
    assert seed.startswith(f"run.seed = 1: was 0 in {root / 'step_4'}; restore that; for a new run from its weights")
    assert steps.startswith(f"run.max_steps = 3: is below the step of {root / 'step_4'}: there is nothing to do")
    older = write_checkpoint(tmp_path / "older", 3)
    assert "holds later checkpoints" in problems_of(tmp_path, str(older))[0]


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step_7"])
def test_a_path_without_a_checkpoint_names_those_that_are_there(tmp_path, root, place):
    write_checkpoint(root, 5)
    assert f"; there are {root / 'step_5'}" in problems_of(tmp_path, str(tmp_path / place))[0]


def test_a_new_run_does_not_mix_with_the_checkpoints_of_another(tmp_path):
    place = tmp_path / "elsewhere"
    write_checkpoint(place, 3)
    config = recipe(checkpoint__path=f'"{place}"')
    with pytest.raises(UserError, match=r"\[checkpoint\] path = .* holds checkpoints of an earlier run \(step_3\)"):
        claim_root(config, tmp_path, overwrite=False)
    claim_root(config, tmp_path, overwrite=True)
    assert list_steps(place) == []


def test_a_run_goes_on_past_a_damaged_checkpoint_and_replaces_it(tmp_path):
    """From step 2, for step 4 is damaged; nothing of the damaged one is left at the end."""
    changes = {"run__output_dir": f'"{tmp_path}"', "checkpoint__every_steps": 2, "checkpoint__keep": 5}
    run(recipe(**changes))
    state = tmp_path / "checkpoints" / "step_4" / STATE
    state.write_text(state.read_text().replace('"step": 4', '"step": 3'))
    result = run(recipe(**changes), resume="auto")
    assert [row["step"] for row in result.metrics] == [2, 3]
    assert list_steps(tmp_path / "checkpoints") == [2, 4]
    verify(result.checkpoint)


def test_retention_keeps_the_newest_and_the_best():
    steps = [1, 2, 3, 4, 5]
    assert surplus(steps, newest=5, keep=2) == [1, 2, 3]
    assert surplus(steps, newest=5, keep=2, keep_best=1, scores={1: 0.5, 2: 0.9, 5: 0.1}) == [1, 3]
    assert surplus(steps, newest=5, keep=1, keep_best=2, scores={2: 0.5, 3: 0.5, 4: float("nan")}) == [1, 4]
    assert surplus([3], newest=3, keep=1) == []


def test_retention_drops_what_an_abandoned_life_of_the_run_left_behind():
    assert surplus([3, 4, 9], newest=4, keep=2) == [9]


def test_scores_are_read_from_the_runs_files(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"policy_version": 1, "loss": 2.5}\n{"policy_version": 2, "lo')
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(
            b'\n7\n[]\n{"policy_version": "x", "loss": 1}\n{"policy_version": 3, "loss": null}\n\xff\n' + b"[" * 5000
        )
    (tmp_path / "eval.jsonl").write_text('{"policy_version": 0, "eval/reward_mean": 0.25}\n')
    assert read_scores(tmp_path, "eval/reward_mean") == {0: 0.25}
    assert read_scores(tmp_path, "-loss") == {1: -2.5}
    assert read_scores(tmp_path / "nowhere", "loss") == {}


def test_a_save_that_fails_on_the_way_is_told_where_the_run_is_watched(tmp_path, capsys):
    """Something of the user's is in the way of the first checkpoint; the second and last is written."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / ".step_1.partial").write_text("mine")
    changes = {"run__max_steps": 2, "checkpoint__every_steps": 1, "checkpoint__path": f'"{place}"'}
    config = recipe(**changes, run__output_dir=f'"{tmp_path / "run"}"', logging__sinks='["console"]')
    result = run(config)
    assert "policy-0: step 1 could not be saved: Not a directory; training goes on" in capsys.readouterr().out
    assert list_steps(place) == [2]
    assert result.checkpoint == place / "step_2"


class Interfering:
    """A reward that does something to the run's directory once, when a checkpoint is there."""

    def __init__(self, directory, act):
        self.directory, self.act, self.calls, self.acted = directory, act, 0, False

    def __call__(self, group):
        self.calls += 1
        if self.calls >= 6 and not self.acted and list_steps(self.directory / "checkpoints"):
            self.acted = True
            self.act(self.directory)
        return [float(rollout.num_terms) for rollout in group.rollouts]


@pytest.fixture
def interfered(tmp_path, monkeypatch):
    """Runs in which `act` meets the run's directory in the middle."""

    def start(act, **changes):
        module = types.ModuleType("interfering_reward")
        module.reward = Interfering(tmp_path / "run", act)
        monkeypatch.setitem(sys.modules, "interfering_reward", module)
        changes = {"checkpoint__every_steps": 1, "logging__sinks": '["console", "jsonl"]', **changes}
        changes |= {"reward__functions__0__name": "interfering_reward:reward"}
        changes = {"run__max_steps": 8, **changes}
        return run(recipe(run__output_dir=f'"{tmp_path / "run"}"', **changes))

    return start


def test_a_run_whose_directory_is_removed_stops_saves_and_says_how_to_go_on(tmp_path, interfered, monkeypatch):
    monkeypatch.setattr("cosmos_rl_core.observe.reporting.STATUS_S", 0.01)
    with pytest.raises(
        UserError, match=r"run was removed or renamed during .*continue from there with --resume auto"
    ) as said:
        interfered(
            lambda directory: directory.rename(tmp_path / "elsewhere"), run__max_steps=500
        )  # no half removal, as beside a save
    (step,) = list_steps(tmp_path / "run" / "checkpoints")[-1:]
    assert step < 500
    assert f"step {step} are in {tmp_path}/run/checkpoints/step_{step};" in str(said.value)
    verify(tmp_path / "run" / "checkpoints" / f"step_{step}")
    again = recipe(run__max_steps=step + 1, run__output_dir=f'"{tmp_path / "run"}"')
    assert find_resumption(again, tmp_path / "run", "auto").state.step == step


def test_a_removed_journal_and_checkpoint_are_told_and_the_run_goes_on(tmp_path, interfered, capsys, monkeypatch):
    monkeypatch.setattr("cosmos_rl_core.observe.reporting.STATUS_S", 0.01)

    def act(directory):
        shutil.rmtree(directory / "journal")
        shutil.rmtree(next((directory / "checkpoints").glob("step_*")))

    result = interfered(act, checkpoint__keep=9)
    told = " ".join(capsys.readouterr().out.split())
    assert result.steps == 8
    assert "run/journal was removed during the run; the run continues" in told
    assert re.search(r"policy-0: somebody has removed step_\d from .*checkpoints", told)


def test_a_checkpoint_beyond_the_last_step_is_nothing_to_do(tmp_path):
    changes = {"run__output_dir": f'"{tmp_path / "run"}"', "run__placement": '"inline"'}
    run(recipe(**changes))
    with pytest.raises(UserError, match=r"run.max_steps = 2: is below the step of .*step_4: there is nothing to do"):
        run(recipe(**changes, run__max_steps=2), resume="auto")
    with pytest.raises(UserError, match="nothing to do: the checkpoint is of step 4, and the run has 3 steps"):
        run(recipe(**changes, prompts__epochs=1), resume="auto")


def test_what_there_is_to_resume_is_noted(tmp_path, capsys):
    changes = {"run__output_dir": f'"{tmp_path / "run"}"', "run__placement": '"inline"', "logging__sinks": ["console"]}
    run(recipe(**changes, run__max_steps=2), resume="auto")
    assert f"{tmp_path / 'run'} has nothing to resume from: a new run starts" in capsys.readouterr().out
    run(recipe(**changes, run__max_steps=2), resume="auto")
    assert "nothing is left to train: the checkpoint is of step 2, the last" in capsys.readouterr().out
