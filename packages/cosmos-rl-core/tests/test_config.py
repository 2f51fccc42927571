"""Recipes: every error at once with a way out, overrides, and a resolved dump that loads again."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from pydantic import Field

from cosmos_rl_core.algorithms.table import TABLE
from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.recipe.load import dump_resolved, load_config
from cosmos_rl_core.settings.base import ConfigError, Problem, Strict, descriptions
from cosmos_rl_core.settings.source import RecipeSource
from cosmos_rl_core.testing.tiny import Tiny


class NeedyModel(Strict):
    path: str
    layers: int = 2


class Needy(Tiny):
    """The tiny domain with a [model] that has a required key."""

    Model = NeedyModel


NEEDY = f"{__name__}:Needy"


def recipe(**sections):
    """A recipe that is in order, with some sections replaced (None removes one)."""
    base = {
        "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 10},
        "reward": {"functions": [{"name": "hits"}]},
    }
    return {name: section for name, section in {**base, **sections}.items() if section is not None}


def problems_of(source, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return caught.value.problems


def only_problem(source, overrides=()) -> Problem:
    (problem,) = problems_of(source, overrides)
    return problem


def test_the_domain_validates_model_data_and_eval_data():
    config = load_config(recipe(model={"actions": 7}, data={"rows": 3}, eval={"data": {"start": 4}}))
    assert (config.model.actions, config.data.rows, config.eval.data.start) == (7, 3, 4)


def test_errors_of_core_and_domain_are_told_together_in_file_order():
    source = recipe(
        rollout={"group_sze": 4, "replicas": "2"},
        model={"acts": 3},
        eval={"data": {"rowz": 1}},
        policy={"optimizer": {"learning_rate": -1.0}},
    )
    assert [problem.key for problem in problems_of(source)] == [
        "rollout.group_sze",
        "rollout.replicas",
        "model.acts",
        "eval.data.rowz",
        "policy.optimizer.learning_rate",
    ]


def test_the_message_names_file_count_key_value_and_remedy(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text('[run]\ndomain = "cosmos_rl_core.testing.tiny:TINY"\nmax_step = 5\n')
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).splitlines()[:5] == [
        f"{path}: 2 problems",
        f"{path}:3:1: run.max_step = 5: unknown key",
        "    3 | max_step = 5",
        "      | ^^^^^^^^",
        '      = help: did you mean "max_steps"?',
    ]


def test_carets_are_under_the_value_where_the_value_is_wrong_and_an_override_has_no_line(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(
        'run = { domain = "cosmos_rl_core.testing.tiny:TINY", max_steps = "5" }\n[sync]\nmax_staleness = 1\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["sync.max_staleness=-1"])
    lines = str(caught.value).splitlines()
    assert lines[1] == f'{path}:1:66: run.max_steps = "5": must be an integer, and is a string'
    assert lines[2][lines[3].index("^") :] == '"5" }' and lines[3].count("^") == 3
    assert lines[4] == "      = help: write it without quotes: 5"
    assert lines[5] == "  sync.max_staleness = -1: must be greater than or equal to 0"


def test_every_key_of_a_file_has_its_line():
    text = """
top."a b" = 1 # of = none
[x]  # [y]
y.z = {k = [1, {m = '''
]}'''}], n = "]}#"}
[[list]]
[list.inner]
[[list]]
v = [
  1, # one
  2,
]
"""
    source = RecipeSource(name="f.toml", text=text)
    keys = {"top.a b": 2, "x": 3, "x.y.z.k.1.m": 4, "x.y.z.n": 5, "list.0.inner": 7, "list.1.v.1": 11}
    assert {key: int(source.place(key, value=False).split(":")[1]) for key in keys} == keys
    assert source.place("x.y.z.n", value=True) == "f.toml:5:14"
    assert source.place("list.1.missing", value=False) == "f.toml:8:1"
    assert source.place("missing", value=False) == ""


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[3].glob("cookbook/*/*.toml")), ids=lambda path: path.parent.name + path.stem
)
def test_the_scanner_finds_the_keys_that_tomllib_finds(path):
    text = path.read_text()

    def keys(value, key):
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return {key}.union(*(keys(held, f"{key}.{name}" if key else str(name)) for name, held in inner))

    assert set(RecipeSource(name="", text=text).entries) == keys(tomllib.loads(text), "") - {""}


def test_a_key_in_the_wrong_section_is_pointed_to_the_right_one():
    problem = only_problem(recipe(policy={"group_size": 4}))
    assert problem.suggestion == "did you mean [rollout] group_size?"


def test_a_key_of_a_parent_section_is_pointed_into_the_subsection():
    problem = only_problem(recipe(policy={"learning_rate": 1e-3}))
    assert problem.suggestion == "did you mean [policy.optimizer] learning_rate?"


def test_a_key_in_an_array_of_tables_is_suggested_from_its_own_table():
    problem = only_problem(recipe(reward={"functions": [{"name": "hits", "wieght": 2.0}]}))
    assert (problem.key, problem.suggestion) == ("reward.functions.0.wieght", 'did you mean "weight"?')


def test_a_misspelt_section_is_told_without_complaints_about_what_it_should_have_held():
    problem = only_problem(recipe(reward=None, rewrad={"functions": [{"name": "hits"}]}))
    assert (problem.key, problem.suggestion) == ("rewrad", 'did you mean "reward"?')


def test_a_key_like_nothing_known_lists_what_is_known():
    problem = only_problem(recipe(checkpoint={"zzz": 1}))
    known = "every_steps, asynchronous, keep, keep_best, best_metric, max_failures, path"
    assert problem.suggestion == f"known here: {known}"


def test_a_choice_is_suggested():
    source = recipe()
    source["run"]["placement"] = "locl"
    problem = only_problem(source)
    assert (problem.wrong, problem.suggestion) == ('must be "local", "inline" or "external"', 'did you mean "local"?')


@pytest.mark.parametrize("value", ["8", True, 8.5])
def test_numbers_are_not_guessed_from_other_types(value):
    assert only_problem(recipe(rollout={"group_size": value})).key == "rollout.group_size"


def test_infinity_is_no_duration():
    assert only_problem(recipe(sync={"timeout_s": float("inf")})).key == "sync.timeout_s"


def test_a_section_that_is_no_table_is_told():
    assert only_problem(recipe(sync=3)).wrong == "must be a table: [sync]"


def test_a_missing_domain_is_required_once_with_what_is_installed():
    problem = only_problem(recipe(run={"max_steps": 1}))
    assert (problem.key, problem.wrong) == ("run.domain", "is required")
    assert problem.suggestion.startswith("installed:")


def test_an_unknown_domain_is_told_with_the_errors_of_the_other_sections():
    source = recipe(run={"domain": "lmm", "max_steps": 1}, sync={"max_stalenes": 1})
    domain, sync = problems_of(source)
    assert "no domain is called 'lmm'" in domain.wrong
    assert sync.suggestion == 'did you mean "max_staleness"?'


def test_something_else_than_a_domain_is_refused():
    assert (
        "is not a cosmos_rl_core.DomainBase" in only_problem(recipe(run={"domain": "json:dumps", "max_steps": 1})).wrong
    )


def test_a_required_key_of_the_domain_is_told():
    problem = only_problem(recipe(run={"domain": NEEDY, "max_steps": 1}))
    assert (problem.key, problem.wrong) == ("model.path", "is required")


# Keys that clash.


def test_sft_refuses_the_sections_of_reinforcement_learning():
    source = recipe(algorithm={"name": "sft"}, rollout={"group_sze": 3}, sync={})
    found = problems_of(source)
    assert {problem.key for problem in found} == {"reward", "rollout", "sync"}
    assert all(problem.wrong == 'does not apply with algorithm.name = "sft"' for problem in found)


def test_sft_needs_no_reward():
    assert load_config(recipe(algorithm={"name": "sft"}, reward=None)).is_sft


def test_reinforcement_learning_needs_a_reward():
    assert only_problem(recipe(reward=None)).key == "reward.functions"


def test_the_best_are_chosen_by_a_figure_that_is_measured():
    problem = only_problem(recipe(checkpoint={"keep_best": 1}))
    assert problem.key == "checkpoint.best_metric"
    assert problem.wrong == "is a metric that this run does not have, with eval.data (not set)"
    sft = {"algorithm": {"name": "sft"}, "reward": None, "eval": {"data": {"rows": 2}}}
    assert only_problem(recipe(**sft, checkpoint={"keep_best": 1})).key == "checkpoint.best_metric"
    assert load_config(recipe(**sft, checkpoint={"keep_best": 1, "best_metric": "-eval/loss"}))
    assert load_config(recipe(checkpoint={"keep_best": 1, "best_metric": "reward_mean"}))


def test_a_run_must_end():
    problem = only_problem(recipe(run={"domain": "cosmos_rl_core.testing.tiny:TINY"}))
    assert "run.max_steps: is required without prompts.epochs" in str(problem)


def test_epochs_end_a_run():
    config = load_config(recipe(run={"domain": "cosmos_rl_core.testing.tiny:TINY"}, prompts={"epochs": 2}))
    assert config.prompts.epochs == 2


def test_a_curriculum_needs_rewards_and_an_order_of_them():
    assert load_config(recipe(prompts={"curriculum": {}})).prompts.curriculum.visits == 2
    assert load_config(recipe()).prompts.curriculum is None
    sft = {"algorithm": {"name": "sft"}, "reward": None}
    problem = only_problem(recipe(**sft, prompts={"curriculum": {}}))
    assert problem.key == "prompts.curriculum"
    assert problem.wrong.endswith('there are none with algorithm.name = "sft"')
    problem = only_problem(recipe(prompts={"curriculum": {"failed_reward": 1.0}}))
    assert problem.key == "prompts.curriculum.solved_reward"
    assert problem.wrong == "must be above prompts.curriculum.failed_reward = 1.0"


def test_more_rollouts_are_started_than_a_group_has():
    rollout = {"group_size": 4, "started_rollouts": 6}
    assert load_config(recipe(rollout=rollout)).rollout.started_rollouts == 6
    problem = only_problem(recipe(rollout=rollout | {"started_rollouts": 4}))
    assert (problem.key, problem.wrong) == ("rollout.started_rollouts", "must be above rollout.group_size = 4")


def test_a_decaying_schedule_needs_max_steps():
    source = recipe(
        run={"domain": "cosmos_rl_core.testing.tiny:TINY"},
        prompts={"epochs": 1},
        policy={"schedule": {"name": "cosine"}},
    )
    assert only_problem(source).wrong == 'is required with policy.schedule.name = "cosine"'


@pytest.mark.parametrize(
    ("sections", "key", "now"),
    [
        ({"rollout": {"sampling": {"max_terms": 5}}}, "rollout.sampling.max_terms", "max_tokens"),
        ({"eval": {"max_terms": 5}}, "eval.max_terms", "max_length"),
        ({"anchor": {"coef": 0.1}}, "anchor", "data_regularization"),
    ],
)
def test_a_key_of_an_earlier_version_is_refused_with_its_name_of_today(sections, key, now):
    problem = only_problem(recipe(**sections))
    assert (problem.key, problem.suggestion) == (key, f'it is called "{now}" now')


@pytest.mark.parametrize(
    ("sections", "key", "other"),
    [
        (
            {"policy": {"schedule": {"warmup_steps": 11}}},
            "policy.schedule.warmup_steps",
            "run.max_steps = 10",
        ),
        (
            {"policy": {"microbatch_terms": 255}},
            "policy.microbatch_terms",
            "rollout.sampling.max_tokens = 256",
        ),
        ({"rollout": {"group_size": 1}}, "rollout.group_size", 'algorithm.advantage = "group_std"'),
        ({"eval": {"every_steps": 5}}, "eval.every_steps", "eval.data (not set)"),
        (
            {"algorithm": {"overlong_buffer_terms": 300}},
            "algorithm.overlong_buffer_terms",
            "rollout.sampling.max_tokens = 256",
        ),
    ],
)
def test_a_clash_names_both_keys_and_values(sections, key, other):
    problem = only_problem(recipe(**sections))
    assert problem.key == key
    assert problem.given
    assert problem.wrong.endswith(other)


def test_an_evaluation_samples_with_its_own_keys_or_those_of_rollouts():
    sampling = {"top_p": 0.9, "top_k": 4, "max_tokens": 5}
    config = load_config(recipe(rollout={"sampling": sampling}, eval={"data": {}, "temperature": 0.5, "top_k": 0}))
    evaluated = config.eval.sampling(config.rollout.sampling)
    assert (evaluated.temperature, evaluated.top_p, evaluated.top_k, evaluated.max_terms) == (0.5, 0.9, 0, 5)
    assert config.rollout.sampling.build().top_k == 4


@pytest.mark.parametrize(
    "sections",
    [{"sync": {"interval": 3}}, {"rollout": {"sampling": {"temperature": 0.0}}}],
)
def test_what_is_not_supported_is_an_error(sections):
    assert only_problem(recipe(**sections)).wrong


def test_two_rewards_of_one_name_are_refused():
    twice = {"functions": [{"name": "hits"}, {"name": "hits"}]}
    wrong = only_problem(recipe(reward=twice)).wrong
    assert wrong == "names a reward more than once: hits; give each a label of its own"


# Overrides.


def test_overrides_are_toml_values_or_plain_words():
    config = load_config(
        recipe(),
        [
            "rollout.group_size=4",
            "policy.optimizer.learning_rate=1e-3",
            "policy.optimizer.betas=[0.8, 0.95]",
            "prompts.shuffle=false",
            "run.name=my-run",
            'run.output_dir="out dir"',
            "reward.functions.0.weight=2",
        ],
    )
    assert config.rollout.group_size == 4
    assert config.policy.optimizer.learning_rate == 1e-3
    assert config.policy.optimizer.betas == (0.8, 0.95)
    assert config.prompts.shuffle is False
    assert (config.run.name, config.run.output_dir) == ("my-run", "out dir")
    assert config.reward.functions[0].weight == 2.0


def test_overrides_leave_the_recipe_alone():
    source = recipe()
    load_config(source, ["run.max_steps=3", "reward.functions.0.weight=2"])
    assert source == recipe()


def test_a_value_may_hold_an_equals_sign():
    assert load_config(recipe(), ["run.name=a=b"]).run.name == "a=b"


@pytest.mark.parametrize("override", ["group_size", "=3", "rollout..group_size=3"])
def test_what_is_no_override_is_told(override):
    assert only_problem(recipe(), [override]).wrong == "is not an override"


def test_an_override_through_a_value_is_told():
    assert only_problem(recipe(), ["run.max_steps.x=3"]).wrong == "run.max_steps is 10, not a table"


def test_an_override_behind_the_end_of_an_array_is_told():
    assert "has 1 entries" in only_problem(recipe(), ["reward.functions.1.weight=3"]).wrong


def test_a_number_for_a_text_says_how_to_quote_it():
    assert """'"7"' on a command line""" in only_problem(recipe(), ["run.name=7"]).suggestion


# Files.


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


MINIMAL = '[run]\ndomain = "cosmos_rl_core.testing.tiny:TINY"\nmax_steps = 1\n[[reward.functions]]\nname = "hits"\n'


@pytest.mark.parametrize(("file", "name"), [("gsm8k.toml", "gsm8k"), ("quickstart/run.toml", "quickstart")])
def test_a_run_is_called_after_its_recipe(tmp_path, file, name):
    config = load_config(write(tmp_path / file, MINIMAL))
    assert config.run.name == name
    assert config.run.directory == Path("runs") / name


def test_a_syntax_error_names_file_line_and_column(tmp_path):
    path = write(tmp_path / "bad.toml", "[run]\nname = = 3\n")
    with pytest.raises(UserError, match=r"bad\.toml:2:8: Invalid value"):
        load_config(path)


def test_a_missing_file_suggests_its_neighbour(tmp_path):
    write(tmp_path / "gsm8k.toml", MINIMAL)
    with pytest.raises(UserError, match=r"gsm8.toml: no such file; did you mean \".*gsm8k\.toml\"\?"):
        load_config(tmp_path / "gsm8.toml")


def test_a_directory_is_no_recipe(tmp_path):
    with pytest.raises(UserError, match=r"is a folder, and a recipe is a \.toml file"):
        load_config(tmp_path)


def test_a_file_that_is_no_text_is_told(tmp_path):
    path = tmp_path / "weights.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a text file"):
        load_config(path)


# The resolved dump.


def test_the_checkpoints_lie_in_one_place_for_all_machines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(recipe(checkpoint={"path": "kept"})).checkpoint.path == str(tmp_path / "kept")
    assert load_config(recipe(checkpoint={"path": "s3://bucket/run"})).checkpoint.path == "s3://bucket/run"


def test_resolved_loads_to_an_equal_config():
    config = load_config(
        recipe(
            model={"actions": 7},
            eval={"data": {"rows": 2}, "every_steps": 5},
            rollout={"options": {"delay_s": 0.1}, "sampling": {"stop": ["\n", 'a"b']}},
        )
    )
    assert load_config(tomllib.loads(dump_resolved(config))) == config


@pytest.mark.parametrize("name", sorted(TABLE))
def test_resolved_loads_again_for_every_algorithm(name):
    reward = None if TABLE[name].rows else recipe()["reward"]
    config = load_config(recipe(algorithm={"name": name}, reward=reward))
    assert load_config(tomllib.loads(dump_resolved(config))) == config


def test_resolved_holds_defaults_and_omits_what_is_not_set():
    resolved = tomllib.loads(dump_resolved(load_config(recipe())))
    assert resolved["policy"]["optimizer"]["name"] == "adamw"
    assert resolved["run"]["output_dir"] == "runs/run"
    assert "dtype" not in resolved["sync"]


def test_resolved_of_sft_omits_what_does_not_apply():
    resolved = tomllib.loads(dump_resolved(load_config(recipe(algorithm={"name": "sft"}, reward=None))))
    assert not resolved.keys() & {"rollout", "reward", "sync"}


# Sections.


def test_a_config_cannot_be_changed():
    config = load_config(recipe())
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 3


def test_a_string_under_a_field_is_its_description():
    class Section(Strict):
        count: int = 0
        """How many."""
        size: int = 0
        """How large."""
        name: str = ""

    class Inner(Section):
        size: int = Field(default=1, description="Not so large.")

    assert descriptions(Section) == {"count": "How many.", "size": "How large."}
    assert descriptions(Inner) == {"count": "How many.", "size": "Not so large."}
    assert Section.model_json_schema()["properties"]["count"]["description"] == "How many."


def test_a_field_with_an_alias_is_in_the_schema_too():
    class Section(Strict):
        start: int = Field(default=0, alias="from")
        """The first."""

    assert list(Section.model_json_schema()["properties"]) == ["from"]


def test_evaluation_sampling_replaces_length_and_temperature_only():
    config = load_config(recipe(eval={"max_length": 5}, rollout={"sampling": {"top_k": 3, "stop": ["x"]}}))
    sampling = config.rollout.sampling.evaluation(temperature=0.0, max_terms=config.eval.max_length)
    assert (sampling.max_terms, sampling.temperature, sampling.top_k, sampling.stop) == (5, 0.0, 3, ("x",))


@pytest.mark.parametrize(
    ("changes", "other"),
    [
        ({"run": {**recipe()["run"], "placement": "external"}}, "run.placement"),
        ({"elastic": {"autoscale": {"max_rollouts": 2, "min_rollouts": 3}}}, "elastic.autoscale.min_rollouts"),
        ({"rollout": {"replicas": 3}}, "rollout.replicas"),
    ],
)
def test_autoscaling_needs_workers_of_the_run_and_limits_around_their_number(changes, other):
    tables = recipe(**{"elastic": {"autoscale": {"max_rollouts": 2}}, **changes})
    problem = only_problem(tables)
    assert problem.key == "elastic.autoscale.max_rollouts"
    assert other in str(problem)


class Unfinished(DomainBase):
    """Lacks most methods of a domain."""

    name = "unfinished"

    def load_rows(self, data: object) -> tuple[list[dict[str, object]], str]:
        return [], "nowhere"


def test_a_domain_without_a_required_method_is_refused_by_its_name():
    wrong = only_problem(recipe(run={"domain": f"{__name__}:Unfinished", "max_steps": 1})).wrong
    assert "lacks build_engine, build_policy, collate, collate_sft" in wrong
