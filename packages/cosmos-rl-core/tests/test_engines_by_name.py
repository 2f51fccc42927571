"""Engines that no domain ships: named by an entry point or as "module:attribute"."""

import pytest

from cosmos_rl_core import UserError, load_config, run
from cosmos_rl_core.assemble import build_engine
from cosmos_rl_core.imports import add_folders
from cosmos_rl_core.launch.check import check
from cosmos_rl_core.testing.tiny import TINY

ENGINE = '''
from cosmos_rl_core import Options, engine_options
from cosmos_rl_core.testing.tiny import TINY


class Speed(Options):
    delay_s: float


def build(model, *, data, options):
    """The tiny domain's engine, at another speed."""
    assert type(data).__name__ == "TinyData"
    return TINY.build_engine(model, data=data, name="tiny", options=engine_options(Speed, options).model_dump())


NOT_ONE = 3
'''


def recipe(tmp_path, engine):
    return {
        "run": {
            "domain": "cosmos_rl_core.testing.tiny:TINY",
            "output_dir": str(tmp_path / "run"),
            "placement": "inline",
            "max_steps": 2,
        },
        "policy": {"prompts_per_step": 10, "threads": 1},
        "rollout": {"engine": engine, "options": {"delay_s": 0.001}, "threads": 1, "sampling": {"max_tokens": 3}},
        "reward": {"functions": [{"name": "hits"}]},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
        "logging": {"sinks": ["jsonl"]},
    }


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own_engine.py").write_text(ENGINE)
    return [str(tmp_path)]


def test_a_run_takes_an_engine_of_a_module(tmp_path, folder):
    assert run(recipe(tmp_path, "own_engine:build"), python_path=folder).steps == 2


def test_a_run_takes_an_engine_that_a_package_offers(tmp_path, folder, monkeypatch):
    info = tmp_path / "own_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cosmos_rl.engines]\nfast = own_engine:build\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run(recipe(tmp_path, "fast")).steps == 2


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (
            "fast",
            r"rollout.engine = \"fast\": no engine is called 'fast'; known: tiny, torch; one of your own is module",
        ),
        ("own_engine:NOT_ONE", r"\[rollout\] engine = 'own_engine:NOT_ONE' is 3, not a function that makes an engine"),
        ("own_engine:other", r"engine 'own_engine:other': own_engine .* has no attribute 'other'"),
    ],
)
def test_what_is_no_engine_is_refused(tmp_path, folder, engine, why):
    add_folders(folder)
    with pytest.raises(UserError, match=why):
        check(load_config(recipe(tmp_path, engine)))


def test_an_option_that_the_engine_does_not_have_is_named(tmp_path, folder):
    add_folders(folder)
    tables = recipe(tmp_path, "own_engine:build")
    tables["rollout"]["options"] = {"delay": 3}
    with pytest.raises(UserError, match=r'rollout.options.delay = 3: unknown key; did you mean "delay_s"'):
        build_engine(load_config(tables), TINY)


def test_check_imports_the_engine(tmp_path, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder[0])
    check(load_config(recipe(tmp_path, "own_engine:build")))


def test_a_run_that_goes_on_keeps_the_engine_it_began_with(tmp_path, folder, capsys):
    run(recipe(tmp_path, "own_engine:build"), python_path=folder)
    chooses = recipe(tmp_path, "auto")
    chooses["run"]["max_steps"], chooses["logging"]["sinks"] = 4, ["jsonl", "console"]
    assert run(chooses, resume="auto", python_path=folder).steps == 4
    assert "engine: own_engine:build (as the run began)" in "".join(capsys.readouterr())
    assert 'engine = "own_engine:build"' in (tmp_path / "run/resolved.toml").read_text()
    del chooses["rollout"]["options"]["delay_s"]
    run(chooses, overwrite=True)
    assert 'engine = "torch"' in (tmp_path / "run/resolved.toml").read_text()
