"""`cosmos-rl plan` beside the resident memory that a policy rank and a rollout replica really take on a CPU."""

import json
from functools import partial

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from cosmos_rl_core.assemble import build_collate, build_engine, build_mesh, build_reference, build_trainer
from cosmos_rl_core.plan.run_plan import plan
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup, Share
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.tiny import write_tokenizer
from doubles.ranks import run_ranks
from doubles.resident import engine_peak, policy_peak

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LARGE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
TOKENS = {"small": 64, "large": 1024}
"""Of a microbatch."""
MICROBATCHES = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resident")
    for name, sizes in (("small", SMALL), ("large", LARGE)):
        heads = {"num_key_value_heads": sizes["num_attention_heads"] // 2, "tie_word_embeddings": False}
        heads["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
        config = AutoConfig.for_model("qwen3", **sizes, **heads, max_position_embeddings=1024, eos_token_id=1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        write_tokenizer(folder / name)
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    return str(folder)


def config_of(folder, size, *, kl_coef=0.0, dtype="float32", lora=None, rollout=None, **policy):
    return load_config(
        {
            "run": {"domain": "llm", "max_steps": 1},
            "model": {"path": f"{folder}/{size}", "dtype": dtype, "lora": lora, "max_length": 512},
            "data": {"path": f"{folder}/train.jsonl", "chat_template": "none"},
            "algorithm": {"name": "grpo", "kl_coef": kl_coef},
            "rollout": {"group_size": 2, "sampling": {"max_tokens": TOKENS[size] // 4}, **(rollout or {})},
            "reward": {"functions": [{"name": "math"}]},
            "policy": {"prompts_per_step": 4, "microbatch_terms": TOKENS[size], **policy},
        }
    )


def groups_of(config, number):
    """Groups of two rollouts, one microbatch each, whose prompts of one token differ, so that no token is shared."""
    terms = config.policy.microbatch_terms // 2 - 1
    rollouts = [
        Rollout(
            arrays={"prompt_tokens": np.array([token], np.int32), "tokens": np.arange(terms, dtype=np.int32) % 50},
            rollout_logprobs=np.zeros(terms, np.float32),
            versions=np.zeros(terms, np.int32),
            loss_mask=np.ones(terms, bool),
            advantage=1.0,
        )
        for token in (1, 2)
    ]
    return [RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=tuple(rollouts))] * number


def policy_rank(rank, world_size, *, folder, options):
    configs = {size: config_of(folder, size, **options) for size in ("small", "large")}
    mesh = build_mesh(configs["large"])
    share = Share() if mesh is None else mesh.share
    found = {}
    for size, config in configs.items():  # the small model loads the libraries

        def build(config=config):
            trainer = build_trainer(config, LLM, mesh)
            return trainer, build_reference(config, LLM, trainer, mesh)

        def make_batch(policy, config=config):
            batch = build_collate(config, LLM, share)(groups_of(config, MICROBATCHES * share.count))
            assert len(batch.microbatches) == MICROBATCHES
            return batch

        found[size] = policy_peak(build, make_batch)
    return found


FULL, SELECTIVE = ({"activation_checkpointing": mode} for mode in ("full", "selective"))
LAYOUTS = {
    "one rank": {},
    "one rank, full checkpointing": {"memory": FULL},
    "one rank, adapters": {"lora": {"rank": 8}},
    "one rank, bfloat16, reference": {"dtype": "bfloat16", "kl_coef": 0.1},
    "two shards": {"parallel": {"dp_shard": 2}},
    "two shards, full checkpointing": {"parallel": {"dp_shard": 2}, "memory": FULL},
    "two shards, adapters": {"parallel": {"dp_shard": 2}, "lora": {"rank": 8}},
    "two shards, bfloat16, reference": {"parallel": {"dp_shard": 2}, "dtype": "bfloat16", "kl_coef": 0.1},
    "tp, selective checkpointing": {"parallel": {"tp": 2}, "memory": SELECTIVE},
}
IN_DEFAULT_SUITE = "one rank, full checkpointing"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == IN_DEFAULT_SUITE else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_policy_rank_takes_the_planned_memory(folder, name):
    planned = plan(config_of(folder, "large", **LAYOUTS[name]), gpu=False)
    assert planned.memory is not None
    expected = planned.memory.policy
    ranks = run_ranks(policy_rank, len(planned.ranks.places), folder=folder, options=LAYOUTS[name])
    for found in ranks:
        assert expected.device == pytest.approx(float(found["large"]), rel=0.1), expected


PROMPT = "12+34=" * 40
ENGINE = {"group_size": 2, "engine": "torch", "options": {"max_sequences": 8}}


def engine_rank(rank, world_size, *, folder):
    # Twice as many as run at once: the second half is read while the cache has its greatest length. The prompts differ,
    # since equal prompts of one pass are read once.
    prompts = [Prompt(sample_id=number, row={"prompt": f"{number}{PROMPT[1:]}"}) for number in range(8)]
    found = {}
    for size in ("small", "large"):
        config = config_of(folder, size, rollout=ENGINE)
        found[size], _ = engine_peak(partial(build_engine, config, LLM), prompts, config=config)
    return found


def test_a_rollout_replica_takes_the_planned_memory(folder):
    planned = plan(config_of(folder, "large", rollout=ENGINE), gpu=False).memory
    assert planned is not None and planned.rollout is not None
    (found,) = run_ranks(engine_rank, 1, folder=folder)
    assert planned.rollout.device == pytest.approx(float(found["large"]), rel=0.1), (planned.rollout, found)
