"""The recipe of a checkpoint that is served."""

import json

import pytest

from cosmos_rl_core.checkpoint.manifest import write_manifest
from cosmos_rl_core.checkpoint.resume import recipe_of
from cosmos_rl_core.inference.serve import ServeRequest, _served
from cosmos_rl_core.recipe.load import load_config


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_run_is_served_whatever_it_was_trained_with(tmp_path, algorithm):
    """A checkpoint has all sections of its recipe, also those that a supervised recipe must not have."""
    tables = {
        "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 1},
        "model": {},
        "data": {},
        "algorithm": {"name": algorithm},
    }
    if algorithm == "grpo":
        tables |= {"reward": {"functions": [{"name": "hits"}]}, "rollout": {"sampling": {"max_tokens": 3}}}
    folder = tmp_path / "step_1"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights.safetensors").write_bytes(b"")
    origin = {"num_ranks": 1, "layout": "one rank", "recipe": recipe_of(load_config(tables))}
    state = {"step": 1, "next_sample": 0, "unfinished": [], "origin": origin}
    (folder / "state.json").write_text(json.dumps(state))
    write_manifest(folder)
    config, weights = _served(ServeRequest(checkpoint=str(folder)), [])
    assert config.algorithm.name == algorithm
    assert config.rollout.engine
    assert weights.version == 1
