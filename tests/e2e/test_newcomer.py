"""The mistakes of a first hour: exit code, text and time of the answer, before any model is loaded."""

from __future__ import annotations

import json
import resource
import socket
import sys
import time
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import numpy as np
import pytest
import tomli_w
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from cosmos_rl_core.cli.app import main
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.storage import hub
from cosmos_rl_core.weight_sync import NIXL_BUILDS

LATEST_S = 10.0
"""Maximum time until an error that needs no model, in seconds of a processor: other tests must not count."""
REWARDS = """
import time

def of_texts(prompt, response):
    return 1.0

def slow_import(group):
    return [undefined for _ in group.rollouts]

def one_number(group):
    return 1.0

def sometimes(group):
    raise ValueError("an unusual answer")

def searches(group):
    import re
    return [float(re.search("<answer>(.*)</answer>", rollout.text).group(1)) for rollout in group.rollouts]

def searches_for_ever(group):
    import re
    return [float(bool(re.search("(a+)+$", "a" * 60 + "b"))) for _ in group.rollouts]

def subscripts(group):
    import re
    return [float(re.search("<answer>(.*)</answer>", rollout.text)[1]) for rollout in group.rollouts]

def splits(group):
    return [float(rollout.text.split("=")[7]) for rollout in group.rollouts]

def parses(group):
    import json
    return [json.loads(rollout.text)["score"] for rollout in group.rollouts]

def looks_up(group):
    return [{}[rollout.text] for rollout in group.rollouts]

def of_rows(group):
    return [float(group.prompt.row["answr"]) for _ in group.rollouts]

def without_arguments():
    return [1.0]

def with_three(group, prompt, response):
    return [1.0]

def with_keywords(*, group):
    return [1.0]

def with_an_option(group, *, weight):
    return [1.0]

class Judge:
    def __call__(self, prompts, completions):
        return [1.0]

class NoJudge:
    pass

def misspells(group):
    return [float(len(rollout.txt)) for rollout in group.rollouts]

def nothing(group):
    return None

def nothings(group):
    return [None for _ in group.rollouts]

def words(group):
    return ["good" for _ in group.rollouts]

def not_a_number(group):
    return [float("nan") for _ in group.rollouts]

def exits(group):
    raise SystemExit(3)

def ends_the_process(group):
    import os
    os._exit(3)

def hangs(group):
    time.sleep(60)

class Odd:
    @property
    def __signature__(self):
        raise RuntimeError("breaks the check")

    def __call__(self, group):
        return [1.0 for _ in group.rollouts]

odd = Odd()
"""


def processor_s():
    """Seconds of a processor that this process and its children have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.fixture
def walk(tmp_path, monkeypatch, capfd):
    """Run a command line in this process; return its exit code and all that it printed, after a check of its time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "newcomers_rewards.py").write_text(REWARDS)
    (tmp_path / "of_bad_syntax.py").write_text("def reward(group:\n")
    monkeypatch.delitem(sys.modules, "newcomers_rewards", raising=False)

    def call(*arguments):
        capfd.readouterr()
        began = processor_s()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert processor_s() - began < LATEST_S
        printed = capfd.readouterr()
        assert "Traceback" not in printed.err
        return ended.value.code or 0, printed.out + printed.err

    return call


@pytest.fixture
def small(tmp_path, bandit):
    """A recipe of the tiny domain on disk, and one of a language model if asked for."""
    path = tmp_path / "recipe.toml"

    def write(**changes):
        path.write_text(tomli_w.dumps(bandit(tmp_path / "run", **changes)))
        return path

    return write


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "Usage:"),
        (("rn",), 2, "No such command 'rn'. Did you mean 'run'?"),
        (("check", "nofile.toml"), 2, "nofile.toml: no such file"),
        (("check", "."), 2, "is a folder, and a recipe is a .toml file"),
        (("--version",), 0, "cosmos-rl-core "),
        (("status",), 2, "Missing argument 'RUN_DIR'"),
        (("status", "nowhere"), 2, "nowhere: no such directory"),
        (("status", "."), 2, ".: not the directory of a started run"),
        (("doctor", "nowhere"), 2, "nowhere: no such directory"),
        (("doctor", "."), 2, ".: no run has started here"),
        (("dashboard", "nowhere"), 2, "nowhere: no such directory"),
        (("export", ".", "out"), 2, "no checkpoint there; give a run's directory, or a checkpoint's"),
        (("keys", "rolout"), 2, "no section is called 'rolout'; did you mean 'rollout'?"),
        (("migrate", "nofile.toml"), 2, "error: nofile.toml: no such file"),
    ],
)
def test_the_command_line(walk, arguments, code, text):
    assert (code, True) == ((found := walk(*arguments))[0], text in found[1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"run__max_steps": "6"}, "= help: write it without quotes: 6"),
        ({"rollout__group_sise": 4}, '= help: did you mean "group_size"?'),
        ({"rolout": {"group_size": 4}}, '= help: did you mean "rollout"?'),
        ({"algorithm__name": "grop"}, "did you mean 'grpo'?"),
        ({"run__domain": "lmm"}, "no domain is called 'lmm'; did you mean 'llm'?"),
        ({"data__rows": 0}, "tiny has no rows"),
        ({"rollout__group_size": -4}, "must be greater than or equal to 1"),
        ({"rollout__group_size": 4.5}, "must be a valid integer"),
        ({"reward__functions": [{"name": "hits", "wieght": 2.0}]}, '= help: did you mean "weight"?'),
        ({"policy__parallel": {"tp": 3}, "rollout__engine": "vlm"}, "no engine is called 'vlm'"),
        ({"reward__functions": [{"name": "hit"}]}, "no reward is called 'hit'"),
        ({"sync__transport": "rdma"}, 'sync.transport = "rdma": no transport is called'),
        ({"algorithm__mask_prefix_terms": 1}, "rollouts of the tiny domain have no tokens; remove it"),
        ({"sync__transport": "cuda_ipc"}, "sends from GPU to GPU, and this machine has none"),
        ({"logging__sinks": ["wandb"]}, pip_install("cosmos-rl-core[wandb]")),
        ({"run__bind": "203.0.113.9"}, "= help: set it to an address of this machine"),
        (
            {"reward__functions": [{"name": "newcomers_rewards:of_texts"}]},
            "newcomers_rewards.py:4 takes (prompt, response), and a reward is called with one argument, a RolloutGroup",
        ),
        (
            {"reward__functions": [{"name": "newcomers_rewards:slow_import"}]},
            "raised NameError: name 'undefined' is not defined",
        ),
        *(
            ({"reward__functions": [{"name": f"newcomers_rewards:{name}"}]}, text)
            for name, text in {
                "without_arguments": "takes (), and a reward is called with one argument, a RolloutGroup",
                "with_three": "takes (group, prompt, response), and",
                "with_keywords": "takes (*, group), and",
                "with_an_option": "takes (group, *, weight), and",
                "Judge": "takes (prompts, completions), and",
                "NoJudge": "is not a function",
                "of_rows": "raised KeyError: 'answr'",
            }.items()
        ),
        ({"reward__functions": [{"name": "of_bad_syntax:reward"}]}, "cannot be imported: SyntaxError"),
        ({"policy__microbatch_terms": 2}, "must be large enough for a whole rollout"),
        (
            {"reward__functions": [{"name": "newcomers_rewards:misspells"}]},
            "raised AttributeError: 'Rollout' object has no attribute 'txt'",
        ),
        (
            {"reward__functions": [{"name": "newcomers_rewards:one_number"}]},
            "returned float; it must return one number per rollout",
        ),
        (
            {"reward__functions": [{"name": "newcomers_rewards:nothing"}]},
            "returned NoneType; it must return one number",
        ),
        ({"reward__functions": [{"name": "newcomers_rewards:nothings"}]}, "returned None for rollout 0"),
        ({"reward__functions": [{"name": "newcomers_rewards:words"}]}, "returned 'good' for rollout 0"),
        ({"reward__functions": [{"name": "newcomers_rewards:exits"}]}, "raised SystemExit: 3"),
    ],
)
def test_a_recipe_is_refused_with_its_line(walk, small, change, text):
    recipe = small(**change)
    code, printed = walk("check", "--deep", recipe)
    assert (code, text in printed) == (2, True), printed
    assert f"{recipe}:" in printed and " | " in printed and "^" in printed


@pytest.mark.parametrize("installed", [*NIXL_BUILDS, None])
def test_nixl_is_found_in_the_build_for_either_cuda(walk, small, monkeypatch, installed):
    for name in NIXL_BUILDS:
        module = SimpleNamespace(__spec__=ModuleSpec(name, None)) if name == installed else None
        monkeypatch.setitem(sys.modules, name, module)
    code, printed = walk("check", "--deep", small(sync__transport="nixl"))
    wrong = "needs a package that is not installed"
    assert (code, wrong in printed) == ((0, False) if installed else (2, True)), printed
    assert installed or pip_install("cosmos-rl-transfer[nixl]") in printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("init", "lmm", "new"), "no domain is called 'lmm'; did you mean 'llm'?"),
        (("reward-server",), "rewards: is required"),
        (("reward-server", "--reward", "cosmos_rl_core.testing.tiny:hits"), "needs a token: set "),
        (("eval", "recipe.toml"), "the recipe has no [eval.data], the rows to evaluate on; add it"),
        (("generate", "recipe.toml", "--prompts", "missing.jsonl"), "missing.jsonl"),
        (("check", "unquoted.toml"), '= help: write text in quotes: "ok"'),
        (("check", "recipe.toml", "rollout.group_sise=4"), 'did you mean "group_size"?'),
        (("check", "recipe.toml", "rollout.group_size"), "is not an override; write section.key=value"),
        (("check", "recipe.toml", "rollout.group_size=many"), "must be a valid integer"),
        (("plan", "recipe.toml", "--memory", "lots"), "write a size such as 80GiB"),
        (("run", "recipe.toml", "--resume", "checkpoints/step_9"), "no checkpoint there"),
        (("init", "llm", "made"), "made/run.toml exists already; choose another directory"),
        (
            ("check", "recipe.toml", "rollout.sampling.max_tokens=1000000000"),
            "must be large enough for a whole rollout",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_a_command_says_what_it_lacks(walk, small, tmp_path, monkeypatch, arguments, text):
    monkeypatch.delenv("WFM_REWARD_TOKEN", raising=False)
    small()
    (tmp_path / "unquoted.toml").write_text("[run]\nname = ok\n")
    (tmp_path / "made").mkdir()
    (tmp_path / "made/run.toml").touch()
    code, printed = walk(*arguments)
    assert (code, text in printed) == (2, True), printed


def test_a_worker_refuses_a_token_that_others_can_read(tmp_path, start):
    token = tmp_path / "seen.token"
    token.write_text("a secret\n")
    token.chmod(0o644)
    process = start("worker", "--role", "policy", "--controller", "tcp://127.0.0.1:1", f"--token-file={token}")
    said = "".join(process.communicate(timeout=120))
    assert process.returncode == 2 and f"run chmod 600 {token}" in said, said


def test_too_many_ranks_for_the_processors_or_gpus_are_a_warning(walk, small, monkeypatch):
    recipe = small(policy__parallel={"dp_shard": 64})
    code, printed = walk("check", "--deep", recipe)
    assert (code, "65 worker processes share" in printed) == (0, True), printed
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    code, printed = walk("check", recipe)
    assert (code, "on this machine the run could not start: " in printed) == (0, True), printed


def test_a_disk_without_room_for_a_checkpoint_is_named(walk, words, monkeypatch):
    usage = SimpleNamespace(total=10**12, used=10**12, free=100)
    monkeypatch.setattr("cosmos_rl_core.launch.preflight.checks.shutil.disk_usage", lambda place: usage)
    code, printed = walk("check", "--deep", words())
    assert (code, "and the weights of one checkpoint have" in printed) == (2, True), printed
    usage.free = 300
    code, printed = walk("check", "--deep", words())
    assert (code, "checkpoints have" in printed) == (0, True), printed


def test_the_command_answers_within_seconds_with_its_imports(small, start):
    began = processor_s()
    process = start("check", small(), "rollout.group_sise=4")
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, "= help" in errors or "did you mean" in errors) == (2, True), errors
    assert processor_s() - began < LATEST_S


def test_an_unknown_domain_is_the_only_problem_of_a_recipe_with_an_evaluation(walk, small):
    code, printed = walk("check", small(run__domain="lmm", eval__every_steps=2, eval__data={"rows": 3}))
    assert (code, "1 problem" in printed) == (2, True), printed


def test_errors_of_all_checks_are_in_one_message(walk, small):
    recipe = small(data__rows=0, logging__sinks=["wandb"], sync__transport="rdma", reward__functions=[{"name": "hit"}])
    code, printed = walk("check", "--deep", recipe)
    assert (code, f"error: {recipe}: 4 problems" in printed) == (2, True), printed


def test_a_port_in_use_is_named(walk, small):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, printed = walk("check", "--deep", small(run__port=port))
    assert (code, f"port {port} on 127.0.0.1 is in use" in printed) == (2, True), printed


def test_notes_do_not_refuse_a_recipe(walk, small):
    functions = [{"name": "newcomers_rewards:sometimes"}]
    code, printed = walk("check", "--deep", small(reward__functions=functions, policy__prompts_per_step=40))
    assert code == 0
    assert "raised ValueError: an unusual answer (called once, with a made-up response)" in printed
    assert "a step uses each of 10 rows 4 times" in printed


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("not_a_number", "returned nan for rollout 0; it must be a finite number (called once, with a made-up"),
        ("searches", "raised AttributeError: 'NoneType' object has no attribute 'group' (called once, with a made-up"),
        ("subscripts", "raised TypeError: 'NoneType' object is not subscriptable"),
        ("splits", "raised IndexError"),
        ("parses", "raised JSONDecodeError"),
        ("looks_up", "raised KeyError"),
        ("hangs", "was not called, as it took longer than 0.5 s"),
    ],
)
def test_a_reward_that_may_do_better_in_the_run_is_a_note(walk, small, monkeypatch, name, text):
    monkeypatch.setattr("cosmos_rl_core.launch.preflight.rewards.CALL_S", 0.5)
    code, printed = walk("check", "--deep", small(reward__functions=[{"name": f"newcomers_rewards:{name}"}]))
    assert (code, text in printed) == (0, True), printed


def test_a_run_is_refused_before_anything_starts(walk, small, tmp_path):
    code, printed = walk("run", small(reward__functions=[{"name": "newcomers_rewards:of_texts"}]))
    assert (code, "takes (prompt, response)" in printed) == (2, True), printed
    assert not (tmp_path / "run").exists()


def test_the_command_checks_in_a_child_process(small, tmp_path, start):
    (tmp_path / "newcomers_rewards.py").write_text(REWARDS)
    process = start("run", small(), "reward.functions.0.name=newcomers_rewards:of_texts")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and "takes (prompt, response)" in errors, errors
    assert not (tmp_path / "run").exists()


def test_a_check_that_fails_itself_is_not_ok(small, tmp_path, start):
    (tmp_path / "newcomers_rewards.py").write_text(REWARDS)
    process = start("check", "--deep", small(reward__functions=[{"name": "newcomers_rewards:odd"}]))
    told, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert "RuntimeError: breaks the check" in errors
    assert "a check failed itself, with the error above" in errors
    assert "ok" not in told


def test_a_reward_that_ends_the_process_of_the_checks_is_refused(small, tmp_path, start):
    (tmp_path / "newcomers_rewards.py").write_text(REWARDS)
    process = start("check", "--deep", small(), "reward.functions.0.name=newcomers_rewards:ends_the_process")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and "has ended the process of the checks with status 3" in errors, errors
    assert 'reward.functions.0.name = "newcomers_rewards:ends_the_process"' in errors


def test_a_reward_that_keeps_the_lock_of_python_ends_no_check(small, tmp_path, start):
    (tmp_path / "newcomers_rewards.py").write_text(REWARDS)
    process = start("check", "--deep", small(), "reward.functions.0.name=newcomers_rewards:searches_for_ever")
    told, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert 'searches_for_ever": was not called, as it took longer than 8 s' in told


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """The files of a language model with a tokenizer of single characters and one weight, and rows."""
    directory = tmp_path_factory.mktemp("model")
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(directory / "tokenizer.json"))
    shape = {"model_type": "qwen3", "max_position_embeddings": 32, "hidden_size": 4, "num_hidden_layers": 1}
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 14, "intermediate_size": 4}
    (directory / "config.json").write_text(json.dumps(shape | sizes))
    save_file({"model.embed_tokens.weight": np.zeros((14, 4), np.float32)}, directory / "model.safetensors")
    (directory / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
    return directory


@pytest.fixture
def words(tmp_path, language_model):
    """A recipe of that model: `words(section__key=value)`; None removes a key."""

    def write(**changes):
        tables = {
            "run": {"domain": "llm", "max_steps": 2, "output_dir": str(tmp_path / "run")},
            "model": {"path": str(language_model)},
            "data": {"path": str(language_model / "rows.jsonl"), "chat_template": "none", "answer_column": "answer"},
            "policy": {"prompts_per_step": 2},
            "rollout": {"group_size": 2, "sampling": {"max_tokens": 4}},
            "reward": {"functions": [{"name": "exact"}]},
        }
        for dotted, value in changes.items():
            *sections, key = dotted.split("__")
            table = tables
            for section in sections:
                table = table.setdefault(section, {})
            table[key] = value
        tables["data"] = {key: value for key, value in tables["data"].items() if value is not None}
        path = tmp_path / "words.toml"
        path.write_text(tomli_w.dumps(tables))
        return path

    return write


def test_a_sound_recipe_of_a_language_model_is_ok(walk, words):
    assert walk("check", "--deep", words())[0] == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"data__chat_template": "{{ messages }"}, "the chat template rejects rows of [data]: unexpected '}'"),
        ({"data__chat_template": "auto"}, "neither a template with {{ ... }}, nor the path of a .jinja file"),
        ({"data__chat_template": "{{ bos_token }}"}, "does not contain the messages of a chat"),
        ({"algorithm__name": "ppo"}, "a language model's rollouts without [environment] have none"),
        ({"model__max_length": 64}, "model.max_length = 64: is above the model's own limit of 32 tokens"),
        ({"model__max_length": 5}, "exceeds the context of 5, and so does the shortest row"),
        ({"rollout__sampling__max_tokens": 40}, "with up to 40 new ones exceeds the context of 32"),
        ({"model__path": "./nowhere"}, "is not a directory"),
        ({"model__path": "no_model"}, "has no config.json"),
        ({"run__domain": "wfm"}, "rollout.sampling.max_tokens = 4: unknown key"),
        ({"data__chat_template": "nowhere.jinja"}, "no such file"),
        ({"teacher": {"path": "./nowhere"}}, "is not a directory"),
    ],
)
def test_a_language_model_is_refused_before_it_is_loaded(walk, words, tmp_path, change, text):
    (tmp_path / "no_model").mkdir()
    recipe = words(**change)
    code, printed = walk("check", "--deep", recipe)
    assert (code, text in printed) == (2, True), printed
    assert f"{recipe}:" in printed and " | " in printed and "^" in printed


def test_every_problem_is_reported_at_once_with_its_line(walk, words):
    recipe = words(model__path="./nowhere", rollout__engine="vlm", rollout__group_sise=4, sync__transport="rdma")
    code, printed = walk("check", "--deep", recipe)
    assert (code, f"error: {recipe}: 4 problems" in printed) == (2, True), printed
    assert printed.count(f"\n{recipe}:") == printed.count("^\n") == 4, printed
    for text in ("model.path = ", "rollout.engine = ", "rollout.group_sise = ", "sync.transport = "):
        assert text in printed


def test_a_wrong_key_hides_no_error_of_the_model_or_the_rows(walk, words, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    recipe = words(data__path=str(rows), policy__prompts_per_stepp=2, sync__interva=1, model__path="./nowhere")
    code, printed = walk("check", recipe)
    assert (code, "4 problems" in printed) == (2, True), printed
    [row] = [line for line in printed.splitlines() if "no column 'prompt'" in line]
    assert row.startswith(f"{recipe}:") and f"data.path: {rows}:1" in row


def test_the_key_of_a_column_that_the_rows_lack_is_underlined(walk, words):
    recipe = words(data__prompt_column="question")
    code, printed = walk("check", recipe)
    assert (code, "no column 'question'" in printed) == (2, True), printed
    assert 'prompt_column = "question"\n      | ^^^^^^^^^^^^^' in printed


def test_a_folder_with_a_similar_name_is_suggested(walk, words, tmp_path):
    (tmp_path / "warm").mkdir()
    code, printed = walk("check", words(model__path="./wrm"))
    assert (code, '= help: did you mean "warm"?' in printed) == (2, True), printed


@pytest.mark.parametrize(
    ("directory", "text"),
    [
        ("run", "contains an earlier run"),
        ("/proc/run", "cannot be used: /proc"),
        ("words.toml/run", "words.toml: Not a directory"),
    ],
)
def test_the_directory_of_a_run_is_checked_with_the_rest(walk, words, tmp_path, directory, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/resolved.toml").touch()
    recipe = words(run__output_dir=str(tmp_path / directory), sync__transport="rdma")
    code, printed = walk("run", recipe)
    assert (code, "2 problems" in printed, text in printed) == (2, True, True), printed
    assert f"{recipe}:" in printed and "^" in printed


def test_an_earlier_run_in_the_directory_is_a_note_of_check(walk, words, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/resolved.toml").touch()
    code, printed = walk("check", "--deep", words())
    assert (code, "contains an earlier run" in printed) == (0, True), printed


def test_a_tokenizer_without_a_chat_template_is_named(walk, words):
    recipe = words(data__chat_template=None)
    code, printed = walk("check", "--deep", recipe)
    assert (code, "has no chat template" in printed) == (2, True), printed
    assert f"{recipe}:" in printed and 'set data.chat_template to one, or to "none"' in printed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+1=", \n', ":2: not valid JSON: "),
        ('{"question": "1+1=", "answer": "2"}\n', ":1: no column 'prompt'"),
        ('{"prompt": 7, "answer": "2"}\n', ":1: "),
        ("", "the dataset is empty; it needs at least one row"),
    ],
    ids=["no JSON", "no column", "a number", "empty"],
)
def test_a_wrong_row_is_named_with_its_line(walk, words, tmp_path, text, reason):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(text)
    code, printed = walk("check", words(data__path=str(rows)))
    assert (code, reason in printed) == (2, True), printed


def test_wrong_rows_among_others_are_a_note(walk, words, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3 + '{"prompt": "", "answer": "2"}\n')
    code, printed = walk("check", "--deep", words(data__path=str(rows)))
    assert code == 0, printed
    line = f"data: 1 of 4 rows cannot be used; the first: {rows}:4: the prompt is empty (data.prompt_column); they are"
    assert line in printed, printed


def test_a_file_with_a_similar_name_is_suggested(walk, words, language_model):
    code, printed = walk("check", words(data__path=str(language_model / "row.jsonl")))
    assert (code, "rows.jsonl" in printed.partition("id you mean")[2]) == (2, True), printed


def test_a_layout_that_does_not_divide_the_model_is_refused_by_plan(walk, words):
    code, printed = walk("plan", words(policy__parallel={"tp": 3}))
    assert (code, "does not divide" in printed) == (2, True), printed


def test_rows_that_are_dropped_are_a_note(walk, words, tmp_path):
    rows = tmp_path / "rows.jsonl"
    prompts = ["1+" * 20 + "1=", "1+1="]
    rows.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts))
    code, printed = walk("check", "--deep", words(data__path=str(rows)))
    assert code == 0, printed
    assert (
        "row 1 has 42 tokens and with up to 4 new ones exceeds the context of 32; rows that do not fit are" in printed
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model__path": "nobody/has-this"}, "is no folder here and not in the cache, and the hub http://127.0.0.1"),
        ({"teacher": {"path": "nobody/teaches"}}, 'teacher.path = "nobody/teaches": is no folder here'),
        ({"data__path": "nobody/has-these-rows"}, "nobody/has-these-rows"),
    ],
    ids=["model", "teacher", "data"],
)
def test_a_hub_that_does_not_answer_is_named_within_seconds(walk, words, silent_hub, monkeypatch, change, text):
    monkeypatch.setattr(hub, "ANSWER_S", 0.5)
    code, printed = walk("check", "--deep", words(**change))
    assert (code, text in printed) == (2, True), printed


def test_a_hub_is_asked_once_and_for_less_than_five_seconds(walk, words, silent_hub):
    began = time.monotonic()
    assert "does not answer" in hub.silence()
    assert time.monotonic() - began < 5.0
    began = time.monotonic()
    assert "does not answer" in hub.silence()
    assert time.monotonic() - began < 0.1


@pytest.fixture
def silent_hub(monkeypatch):
    """A hub that accepts connections and never answers."""
    from huggingface_hub import constants

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        hub.silence.cache_clear()
        yield
        hub.silence.cache_clear()
