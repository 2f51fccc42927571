"""Preference training through whole runs: over ranks, over policy replicas and after a stop it is what one run does."""

import json

import pytest
from safetensors.numpy import load_file

from cosmos_rl_core import run
from cosmos_rl_core.cli.app import main
from cosmos_rl_llm import write_tiny_model

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("one_thread")]

COLUMNS = {
    "dpo": {"chosen_column": "chosen", "rejected_column": "rejected"},
    "kto": {"response_column": "response", "label_column": "good"},
}
MEASURED = ("loss", "grad_norm", "reward_margin", "reward_accuracy", "chosen_logprob", "rejected_logprob", "baseline")


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Sums with their answer and a wrong one, of other lengths: a pair, or one of them."""
    rows = []
    for number in range(20):
        right, wrong = str(number * 7 % 23), "9" * (1 + number % 4)
        row = {"prompt": f"{number % 9}+{number % 5}=", "chosen": right, "rejected": wrong}
        rows.append({**row, "response": right if number % 3 else wrong, "good": number % 3 > 0})
    file = tmp_path_factory.mktemp("answers") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two heads of keys and values, for two ranks."""
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2, hidden_size=32, initializer_range=0.2)


@pytest.fixture(scope="module")
def preferences(sums, answers, model):
    """The recipe of sums without what only reinforcement learning has: two passes over 15 rows, 6 a step."""

    def recipe(directory, *, algorithm="dpo", held_out=5, **changes):
        tables = sums(directory, algorithm__name=algorithm, policy__prompts_per_step=6, **changes)
        del tables["rollout"], tables["reward"], tables["run"]["max_steps"]
        tables["run"].setdefault("placement", "inline")
        tables["model"]["path"] = str(model)
        tables["data"] = {"path": str(answers), "chat_template": "none", **COLUMNS[algorithm]}
        tables["prompts"] = {"epochs": 2}
        tables["eval"] = {"every_steps": 2, "held_out": held_out}
        tables["policy"]["microbatch_terms"] = 64
        return tables

    return recipe


@pytest.fixture(scope="module")
def measured(rows_of):
    """Every number of a run that time does not change. At step 0, where the policy is the reference, the rewards are
    rounding errors, and the accuracy, which counts their signs, is left out.
    """

    def read(directory):
        lines = [*rows_of(directory / "metrics.jsonl"), *rows_of(directory / "eval.jsonl")]
        return [
            {name: line[name] for name in line if name.rpartition("/")[2] in MEASURED and _has_sign(line, name)}
            for line in lines
        ]

    return read


def _has_sign(line, name):
    return line["step"] > 0 or not name.endswith("reward_accuracy")


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory, preferences, measured):
    """What an undisturbed run of one process has measured, by algorithm; its folder is kept beside."""
    folders = {}

    def read(algorithm):
        if algorithm not in folders:
            folders[algorithm] = tmp_path_factory.mktemp(algorithm) / "run"
            run(preferences(folders[algorithm], algorithm=algorithm))
        return measured(folders[algorithm])

    read.folders = folders
    return read


def weights(directory):
    return load_file(directory / "checkpoints" / "step_5" / "policy" / "model.safetensors")


SPREAD = [
    ("dpo", {"policy__parallel__dp_shard": 2}),
    ("dpo", {"policy__parallel__tp": 2}),
    ("dpo", {"policy__replicas": 2}),
    ("kto", {"policy__parallel__dp_shard": 2}),
    ("kto", {"policy__replicas": 2}),
]


@pytest.mark.parametrize(("algorithm", "layout"), SPREAD, ids=str)
def test_ranks_and_replicas_train_and_measure_what_one_process_does(
    tmp_path, preferences, measured, of_one_process, algorithm, layout
):
    run(preferences(tmp_path / "run", algorithm=algorithm, run__placement="local", **layout))
    expected, found = of_one_process(algorithm), measured(tmp_path / "run")
    assert len(found) == len(expected) == 5 + 4
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, abs=1e-5)
    assert expected[0]["loss"] != pytest.approx(expected[4]["loss"], abs=1e-3)


@pytest.mark.parametrize("algorithm", COLUMNS)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path, preferences, measured, of_one_process, algorithm):
    """The sums of the reference that the whole run has kept for its second pass are computed again."""
    stopped = preferences(tmp_path / "stopped", algorithm=algorithm, checkpoint__every_steps=1)
    run(stopped, ["run.max_steps=2"])
    run(stopped, resume="auto")
    assert measured(tmp_path / "stopped") == of_one_process(algorithm)
    whole, resumed = (weights(folder) for folder in (of_one_process.folders[algorithm], tmp_path / "stopped"))
    assert all((whole[name] == resumed[name]).all() for name in whole)


def checked(tables, rows, *flags, write_recipe, folder, capfd):
    """Exit code and text of `cosmos-rl check` with these rows."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables["data"]["path"] = str(file)
    recipe = write_recipe(folder / "recipe.toml", tables)
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["check", str(recipe), *flags])
    told = capfd.readouterr()
    return ended.value.code or 0, told.out + told.err


PAIRS = [{"prompt": f"{number}=", "chosen": "1", "rejected": "2"} for number in range(8)]
EQUAL = {"prompt": "9=", "chosen": "3", "rejected": "3"}
NEVER_DIFFERS = "rows.jsonl:1: the chosen and the rejected answer are equal, str '3' (data.chosen_column = 'chosen'"
LONG = "data: row 6 with its chosen answer has 82 tokens, more than the context of 64"


@pytest.mark.parametrize(
    ("rows", "flags", "code", "said"),
    [
        ([EQUAL] * 4, [], 2, NEVER_DIFFERS),
        ([EQUAL] * 4, ["--deep"], 2, NEVER_DIFFERS),
        ([*PAIRS[:2], EQUAL, *PAIRS[2:]], ["--deep"], 0, "rows.jsonl:3: the chosen and the rejected answer are equal"),
        # The equal pair is no row of the run, and counts as a line of the file.
        ([EQUAL, *PAIRS[:4], {**PAIRS[4], "chosen": "1" * 80}], ["--deep"], 2, LONG),
    ],
    ids=["all equal", "all equal, deep", "one equal", "a long one"],
)
def test_wrong_pairs_are_named_before_the_start(rows, flags, code, said, tmp_path, preferences, write_recipe, capfd):
    tables = preferences(tmp_path / "run", held_out=1)
    found = checked(tables, rows, *flags, write_recipe=write_recipe, folder=tmp_path, capfd=capfd)
    assert found[0] == code and said in " ".join(found[1].split()), found
