"""Rows out of Python: [data] rows names them, run and evaluate are given them."""

import json

import pytest
from pydantic import ValidationError

from cosmos_rl_core import Request, UserError, evaluate, run
from cosmos_rl_llm import write_tiny_model
from cosmos_rl_llm.config import LLMDataConfig
from cosmos_rl_llm.data.rows import load_rows

MODULE = """
LIST = [{"prompt": "1+1=", "answer": 2}, {"prompt": "2+2=", "answer": 4}]

def function():
    return (dict(row) for row in LIST)

def fails():
    raise RuntimeError("no network")

def bare():
    return [{"prompt": "1+1=", "date": object()}]

NUMBER = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "python_rows.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def load(name, **keys):
    return load_rows(LLMDataConfig(rows=f"python_rows:{name}", chat_template="none", **keys))


@pytest.mark.parametrize("name", ["LIST", "function"])
def test_a_list_and_a_function_give_the_same_rows(module, name):
    rows, origin = load(name, answer_column="answer")
    assert rows == [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    assert origin == f"python_rows:{name}"
    assert len(load(name, limit=1)[0]) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fails", r"\[data\] rows = 'python_rows:fails' raised RuntimeError: no network"),
        ("bare", r"python_rows:bare\[0\]: column 'date' holds object .* which is not JSON"),
        ("NUMBER", r"\[data\] rows = 'python_rows:NUMBER' is int 3; it must be a list of rows"),
        ("nothing", r"\[data\] rows = 'python_rows:nothing': python_rows .* has no attribute 'nothing'"),
    ],
)
def test_what_gives_no_rows_is_named(module, name, why):
    with pytest.raises(UserError, match=why):
        load(name)


def test_rows_need_a_module_and_stand_alone():
    with pytest.raises(UserError, match=r"\[data\] rows = 'train' must be written as module:attribute"):
        load_rows(LLMDataConfig(rows="train"))
    with pytest.raises(ValidationError, match="rows replaces path, split and subset"):
        LLMDataConfig(rows="my_rows:train", path="train.jsonl")
    with pytest.raises(ValidationError, match="path is missing"):
        LLMDataConfig()


@pytest.mark.ci
def test_a_dataset_is_trained_on_and_evaluated_as_any_rows(tmp_path):
    datasets = pytest.importorskip("datasets", reason="an extra of the package")
    sums = [{"question": f"{a}+{a}=", "answer": str(a + a)} for a in range(20)]
    recipe = {
        "run": {"domain": "llm", "placement": "inline", "output_dir": str(tmp_path / "run"), "max_steps": 1},
        "model": {"path": str(write_tiny_model(tmp_path / "base", num_layers=1))},
        "data": {
            "path": "openai/gsm8k", "subset": "main", "split": "train",
            "prompt_column": "question", "answer_column": "answer", "chat_template": "none",
        },
        "policy": {"prompts_per_step": 4},
        "rollout": {"group_size": 2, "sampling": {"max_tokens": 3}},
        "logging": {"sinks": ["jsonl"]},
    }  # fmt: skip
    result = run(recipe, rewards=["numeric"], rows=datasets.Dataset.from_list(sums), eval_rows=sums[:3])
    kept = (result.run_dir / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == sums
    assert result.evaluations[0]["eval/rows"] == 3
    measured = evaluate(recipe, rewards=["numeric"], rows=sums[:5], request=Request(out=tmp_path / "eval"))
    assert measured.rows == 5
