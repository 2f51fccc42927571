"""`cosmos-rl plan` beside the resident memory of a vision-language policy rank on a CPU."""

import json

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForImageTextToText

from cosmos_rl_core.assemble import build_collate, build_trainer
from cosmos_rl_core.plan.run_plan import plan
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup, Share
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.media.item import MediaItem, view_of
from cosmos_rl_llm.media.vision import find_family
from doubles.ranks import run_ranks
from doubles.resident import policy_peak

pytest.importorskip("PIL")

from tiny_vision import CONFIGS, write_processing

TEXT = {"small": {"hidden_size": 48, "num_hidden_layers": 2}, "large": {"hidden_size": 384, "num_hidden_layers": 3}}
TOWER = {"small": {"hidden_size": 32, "depth": 2}, "large": {"hidden_size": 256, "depth": 4}}
SIDES = {"small": (8, 12), "large": (40, 48)}
"""Of a picture, in patches; four of them are a token."""
MICROBATCHES = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tower")
    for family in ("qwen3_vl", "qwen2_5_vl"):
        for size in ("small", "large"):
            text, tower = TEXT[size], TOWER[size]
            width, depth = text["hidden_size"], tower["hidden_size"]
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4}
            rope = {"rope_type": "default", "mrope_section": [width // 24] * 3, "rope_theta": 10000.0}
            rope |= {"mrope_interleaved": True} if family == "qwen3_vl" else {}
            given = CONFIGS[family]
            config = AutoConfig.for_model(
                family,
                **{
                    **given,
                    "text_config": {
                        **given["text_config"], **text, **heads,
                        "intermediate_size": 2 * width, "rope_parameters": rope, "max_position_embeddings": 2048,
                    },
                    "vision_config": {
                        **given["vision_config"], **tower, "intermediate_size": 4 * depth, "out_hidden_size": width,
                    },
                },
            )  # fmt: skip
            directory = folder / family / size
            AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
            write_processing(directory, family)
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "what", "answer": "red"}) + "\n")
    return str(folder)


def tokens_of(size):
    height, width = SIDES[size]
    return 2 * (height * width // 4 + 16)


def config_of(folder, family, size, *, freeze=(), **policy):
    return load_config(
        {
            "run": {"domain": "llm", "max_steps": 1},
            "model": {"path": f"{folder}/{family}/{size}", "max_length": tokens_of(size), "freeze": list(freeze)},
            "data": {"path": f"{folder}/train.jsonl"},
            "algorithm": {"name": "grpo"},
            "rollout": {"group_size": 2, "sampling": {"max_tokens": 8}},
            "reward": {"functions": [{"name": "math"}]},
            "policy": {"prompts_per_step": 4, "microbatch_terms": tokens_of(size), **policy},
        }
    )


def groups_of(config, family, size, *, number):
    """Groups of one rollout with a picture of its own, two a microbatch."""
    random, (height, width) = np.random.default_rng(0), SIDES[size]
    made = find_family(config.model.path, AutoConfig.from_pretrained(config.model.path))
    groups = []
    for _ in range(2 * number):
        pixels = random.standard_normal((height * width, made.blank("image").pixels.shape[1]), np.float32)
        tokens = np.full(height * width // 4, made.token_ids["image"], np.int32)
        view = view_of(tokens, [MediaItem(kind="image", pixels=pixels, grid=(1, height, width))], made)
        rollout = Rollout(
            arrays={"prompt_tokens": tokens, "tokens": np.arange(16, dtype=np.int32) + 40, **view.arrays},
            rollout_logprobs=np.zeros(16, np.float32),
            versions=np.zeros(16, np.int32),
            loss_mask=np.ones(16, bool),
            advantage=1.0,
        )
        groups.append(RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=(rollout,)))
    return groups


def policy_rank(rank, world_size, *, folder, family, options):
    found = {}
    for size in ("small", "large"):  # the small model loads the libraries
        config = config_of(folder, family, size, **options)

        def build(config=config):
            return build_trainer(config, LLM, None), None

        def make_batch(policy, config=config, size=size):
            batch = build_collate(config, LLM, Share())(groups_of(config, family, size, number=MICROBATCHES))
            assert len(batch.microbatches) == MICROBATCHES
            return batch

        found[size] = policy_peak(build, make_batch)
    return found


LAYOUTS = {
    "qwen3_vl": {},
    "qwen2_5_vl": {},
    "qwen3_vl, full checkpointing": {"memory": {"activation_checkpointing": "full"}},
    "qwen3_vl, tower frozen": {"freeze": ["tower"]},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ci if name == "qwen3_vl" else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_policy_rank_takes_the_planned_memory(folder, name):
    family = name.partition(",")[0]
    planned = plan(config_of(folder, family, "large", **LAYOUTS[name]), gpu=False)
    assert planned.memory is not None
    expected = planned.memory.policy
    (found,) = run_ranks(policy_rank, 1, folder=folder, family=family, options=LAYOUTS[name])

    assert expected.device == pytest.approx(float(found["large"]), rel=0.1), expected
