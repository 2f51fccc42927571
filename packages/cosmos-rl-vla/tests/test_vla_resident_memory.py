"""`cosmos-rl plan` beside the resident memory that policy ranks and rollout replicas really take on a CPU."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from vla_fixtures import save_pi, small_pi
from vla_parity import decisions, microbatch_of

from cosmos_rl_core.assemble import build_engine, build_mesh, build_trainer
from cosmos_rl_core.plan.run_plan import plan
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.types import Prompt, TrainBatch
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.config import VLAModelConfig
from cosmos_rl_vla.domain import VLA
from cosmos_rl_vla.models.families import load
from cosmos_rl_vla.models.instructions import word_instructions
from cosmos_rl_vla.models.pi.config import GemmaSize, VisionSize
from cosmos_rl_vla.models.pi.family import random_pi
from doubles.ranks import run_ranks
from doubles.resident import engine_peak, policy_peak

LANGUAGE = GemmaSize(width=512, depth=4, mlp=2048, heads=8, kv_heads=1, head_dim=64)
LARGE = {
    "language": LANGUAGE,
    "expert": replace(LANGUAGE, width=256, mlp=1024),
    "vision": VisionSize(image_size=128, patch_size=8, width=256, depth=4, mlp=1024, heads=4),
}
TEXT = 64
"""Tokens of an instruction, as many as the plan assumes."""
SAMPLES = 4
"""Decisions of a microbatch; a step has two."""
SLOTS = 8
"""Observations of a forward pass, at most; with `steady` always."""


def write(folder, **changes):
    config = small_pi(horizon=2, action_dim=2, **changes)
    save_pi(random_pi(config, seed=0), folder)
    word_instructions(("reach the red square",)).save(folder)
    ActionStats.unit(config.action_dim).save(folder)


def config_of(path, *, model=None, **policy):
    return load_config(
        {
            "run": {"domain": "vla", "max_steps": 1},
            "model": {"path": str(path), **(model or {})},
            "data": {"simulator": "reach", "tasks": ["red"]},
            "algorithm": {"name": "grpo"},
            "rollout": {"group_size": 2, "sampling": {"max_steps": 4}, "options": {"slots": SLOTS, "steady": True}},
            "reward": {"functions": [{"name": "success"}]},
            "policy": {"prompts_per_step": 2, "microbatch_terms": 4 * SAMPLES, **policy},
        }
    )


def policy_rank(rank, world_size, *, folder, options):
    found = {}
    for size in ("small", "large"):  # the small model loads the libraries
        config = config_of(f"{folder}/{size}", **options)
        mesh = build_mesh(config)
        inputs, acted = decisions(load(VLAModelConfig(path=config.model.path)))
        tokens = torch.arange(TEXT).expand(2 * SAMPLES, -1) % 20
        inputs |= {"tokens": tokens, "token_mask": torch.ones_like(tokens, dtype=torch.bool)}
        halves = [range(SAMPLES), range(SAMPLES, 2 * SAMPLES)]
        microbatches = [microbatch_of(inputs, acted, list(half), supervised=False) for half in halves]
        count = sum(int(microbatch.terms.loss_mask.sum()) for microbatch in microbatches)
        batch = TrainBatch(microbatches=tuple(microbatches), num_terms=count, num_rollouts=2 * SAMPLES)

        def build(config=config, mesh=mesh):
            return build_trainer(config, VLA, mesh), None

        found[size] = policy_peak(build, lambda _, batch=batch: batch)
    return found


def rollout_replica(rank, world_size, *, folder):
    found = {}
    for size in ("small", "large"):
        config = config_of(f"{folder}/{size}")
        rows, _ = VLA.load_rows(config.data)
        prompts = [Prompt(sample_id=number, row=rows[number]) for number in range(4)]
        found[size], _ = engine_peak(partial(build_engine, config, VLA), prompts, config=config)
    return found


LAYOUTS = {
    "one rank": {},
    "two shards, full checkpointing": {
        "parallel": {"dp_shard": 2},
        "memory": {"activation_checkpointing": "full"},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for size, changes in (("small", {}), ("large", LARGE)):
        (folder / size).mkdir()
        write(folder / size, **changes)
    return folder


@pytest.mark.slow
def test_a_rollout_replica_takes_the_planned_memory(folder):
    planned = plan(config_of(folder / "large"), gpu=False)
    assert planned.memory is not None and planned.memory.rollout is not None
    needs = planned.memory.rollout
    [found] = run_ranks(rollout_replica, 1, folder=str(folder))
    assert needs.device == pytest.approx(float(found["large"]), rel=0.1), needs


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_policy_rank_takes_the_planned_memory(folder, name):
    planned = plan(config_of(folder / "large", **LAYOUTS[name]), gpu=False)
    assert planned.memory is not None
    needs = planned.memory.policy
    for found in run_ranks(policy_rank, len(planned.ranks.places), folder=str(folder), options=LAYOUTS[name]):
        assert needs.device == pytest.approx(float(found["large"]), rel=0.1), needs
