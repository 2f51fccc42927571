"""`cosmos-rl plan` beside the resident memory that a rollout replica and a policy rank really take on a CPU."""

from functools import partial

import pytest
from wfm_fixtures import NETWORK, pixel_model, prompt, recipe

from cosmos_rl_core.assemble import build_collate, build_engine, build_mesh, build_reference, build_trainer
from cosmos_rl_core.plan.run_plan import plan
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.types import Share
from cosmos_rl_wfm.domain import WFM
from doubles.ranks import run_ranks
from doubles.resident import engine_peak, policy_peak

LARGE = {"patch_size": [1, 2, 2], "num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 2048, "num_layers": 4}
PIXELS = {"small": 8, "large": 32}
GROUP_SIZE = 2


def config_of(size, *, model=None, kl_coef=0.0, **policy):
    network = {**NETWORK, "cross_attn_norm": True, **(LARGE if size == "large" else {})}
    given = pixel_model(network=network, **(model or {})).model_dump(mode="json", exclude_none=True)
    pixels = PIXELS[size]
    return load_config(
        recipe(
            model=given,
            data={"kind": "mock", "size": {"frames": 4, "height": pixels, "width": pixels}},
            algorithm={"name": "flow_grpo", "kl_coef": kl_coef},
            policy={"prompts_per_step": 1, "microbatch_terms": 1, **policy},
            rollout={
                "group_size": GROUP_SIZE,
                "sampling": {"num_steps": 4, "window": "fixed", "steps": [0]},
                "options": {"samples_at_once": GROUP_SIZE},
            },
        )
    )


def measure(rank, world_size, *, options):
    configs = {size: config_of(size, **options) for size in ("small", "large")}
    mesh = build_mesh(configs["large"])
    share = Share() if mesh is None else mesh.share
    found = {}
    for size, config in configs.items():  # the small model loads the libraries

        def build(config=config):
            trainer = build_trainer(config, WFM, mesh)
            return trainer, build_reference(config, WFM, trainer, mesh)

        prompts = [prompt(number) for number in range(share.count)]
        found[f"rollout {size}"], groups = engine_peak(partial(build_engine, config, WFM), prompts, config=config)
        batch = build_collate(config, WFM, share)(groups)
        found[f"policy {size}"] = policy_peak(build, lambda _, batch=batch: batch)
    return found


LAYOUTS = {
    "one rank": {},
    "bfloat16, reference, full checkpointing": {
        "model": {"dtype": "bfloat16"},
        "kl_coef": 0.1,
        "memory": {"activation_checkpointing": "full"},
    },
    "adapters": {"model": {"lora": {"rank": 4}}},
    "two shards": {"parallel": {"dp_shard": 2}},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "one rank" else pytest.mark.slow) for name in LAYOUTS]
)
def test_processes_take_the_planned_memory(name):
    planned = plan(config_of("large", **LAYOUTS[name]), gpu=False)
    assert planned.memory is not None and planned.memory.rollout is not None
    for found in run_ranks(measure, len(planned.ranks.places), options=LAYOUTS[name]):
        for role, needs in (("policy", planned.memory.policy), ("rollout", planned.memory.rollout)):
            assert needs.device == pytest.approx(float(found[f"{role} large"]), rel=0.1), needs
