"""Rollouts of a tiny mixture of experts by vLLM, which records the experts; replayed in a policy. For a child process.

    python routed_rollouts.py FOLDER dtype seed ...        writes FOLDER/rollouts.json

The environment has what `pretend_triton` says where there is no GPU.
"""

import asyncio
import copy
import json
import sys
from pathlib import Path

import numpy as np
import torch
from sent_weights import sent_weights
from tiny_engine import TokenChat
from transformers import DynamicCache

from cosmos_rl_core.episodes.interfaces import Opening
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Microbatch, Prompt, RolloutGroup, Sampling, Share
from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_llm.data.collate import collate
from cosmos_rl_llm.engines.vllm.engine import VllmEngine
from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions
from cosmos_rl_llm.engines.vllm.start import start
from cosmos_rl_llm.model.causal_lm import make_model
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.routing import RouteRecorder

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "initializer_range": 0.1,
    "eos_token_id": None,
    "max_position_embeddings": 256,
}
SHARED = list(range(1, 41))
"""Begins every prompt: more than a block of vLLM's prefix cache, so that later prompts read their experts from it."""


def tiny(seed):
    return make_model(CONFIG, dtype=torch.float32, seed=seed).eval()


async def draw(engine, *, number, max_terms=24, num_samples=4, seed=0, **sampling):
    prompt = Prompt(sample_id=number, row={"tokens": [*SHARED, 50 + number]})
    sampling = Sampling(max_terms=max_terms, **sampling)
    _, rollouts = await engine.generate(prompt, num_samples=num_samples, sampling=sampling, seed=seed + number)
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))


@torch.no_grad()
def chosen(model, rollout, *, start=0, before=None):
    """The experts that transformers' model chooses for inputs of a rollout from `start`, after those of `before`."""
    fed = np.concatenate([rollout.arrays["prompt_tokens"], rollout.arrays["tokens"][:-1]])
    tokens, cache = torch.from_numpy(fed).long()[None], DynamicCache()
    if start:
        before(input_ids=tokens[:, :start], past_key_values=cache, use_cache=True)
    model = copy.deepcopy(model).float()
    recorder = RouteRecorder(model)
    model(input_ids=tokens[:, start:], past_key_values=cache, use_cache=True)
    return recorder.take().numpy()


def agreement(routes, others):
    """Share of the tokens' layers whose experts are the same, in any order."""
    return float((np.sort(routes, axis=-1) == np.sort(others, axis=-1)).all(axis=-1).mean())


@torch.no_grad()
def mismatch(policy, group, *, replay):
    """The metric `mismatch_kl` of a policy, the mean of r - 1 - log r, and its number of terms."""
    total = count = 0.0
    for microbatch in collate([group], microbatch_terms=1 << 14, share=Share()).microbatches:
        inputs = {name: value for name, value in microbatch.inputs.items() if replay or name != "routes"}
        logprobs = policy.forward(Microbatch(inputs=inputs, terms=microbatch.terms)).logprobs
        log_ratio = (logprobs - microbatch.terms.rollout_logprobs).double()
        total += float((log_ratio.exp() - 1 - log_ratio).sum())
        count += log_ratio.numel()
    return total / count


async def measured(engine, model, number):
    """Two groups, the second with a prefix hit; the policy's mismatch without and with replay."""
    groups = [await draw(engine, number=index, seed=10 * number) for index in range(2)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    everything = RolloutGroup(prompt=groups[0].prompt, rollouts=tuple(rollouts))
    policy = CausalLMPolicy(copy.deepcopy(model).float())
    return {
        "lengths": [len(r.arrays["prompt_tokens"]) + r.num_terms - 1 for r in rollouts],
        "shapes": [list(r.arrays["routes"].shape) for r in rollouts],
        "dtypes": sorted({str(r.arrays["routes"].dtype) for r in rollouts}),
        "agreement": [agreement(r.arrays["routes"], chosen(model, r)) for r in rollouts],
        "free": mismatch(policy, everything, replay=False),
        "replayed": mismatch(policy, everything, replay=True),
    }


async def switched(engine, send, new, *, old, recomputes):
    """A group whose weights change while it runs: of each rollout its versions, and its experts beside the models'."""
    running = asyncio.create_task(draw(engine, number=7, max_terms=80, num_samples=2))
    first = engine.progress
    while engine.progress < first + 4:
        await asyncio.sleep(0)
    version = engine.version
    await send(version + 1)
    found = []
    for rollout in (await running).rollouts:
        routes = rollout.arrays["routes"]
        # An input after the prompt is a term, and the next term was sampled in the pass that read it.
        start = len(rollout.arrays["prompt_tokens"]) + int((rollout.versions[1:] > version).argmax())
        earlier, later = chosen(old, rollout), chosen(new, rollout, start=0 if recomputes else start, before=old)
        found.append(
            {
                "versions": sorted(set(rollout.versions.tolist())),
                "length": len(rollout.arrays["prompt_tokens"]) + rollout.num_terms - 1,
                "routed": len(routes),
                "old": agreement(routes[:start], earlier[:start]),
                "new": agreement(routes[start:], later[start:] if recomputes else later),
            }
        )
    return found


async def stopped(engine):
    """A group that ends at a stop string, which vLLM has sampled past."""
    group = await draw(engine, number=3, max_terms=40, stop=("<7>", "<9>", "<11>"))
    return [
        [len(r.arrays["prompt_tokens"]) + r.num_terms - 1, len(r.arrays["routes"]), r.finish_reason]
        for r in group.rollouts
    ]


def refused(engine):
    try:
        engine.open(Opening(terms=np.array([1, 2], np.int32), text=""))
    except UserError as error:
        return str(error)
    return None


async def main(folder, dtype, seeds):
    model = tiny(0)
    model.save_pretrained(folder / "model")
    options = VllmEngineOptions(record_routes=True, cache_bytes=64 << 20, extra={"block_size": 32})
    llm = await asyncio.to_thread(start, str(folder / "model"), options=options, dtype=dtype, max_length=256)
    engine = VllmEngine(llm, TokenChat(), records_routes=True, version=0)
    found = {"seeds": [], "refused": refused(engine)}
    live = copy.deepcopy(model).to(getattr(torch, dtype))
    async with sent_weights(engine, live, SyncSection(timeout_s=60.0)) as send:
        for number, seed in enumerate(seeds):
            live.load_state_dict(tiny(seed).state_dict())
            await send(number + 1)
            found["seeds"].append(await measured(engine, live, number))
            print(seed, found["seeds"][-1]["free"], found["seeds"][-1]["replayed"], flush=True)
        found["stopped"] = await stopped(engine)
        old, new = copy.deepcopy(live), tiny(100)
        live.load_state_dict(new.state_dict())
        found["switched"] = await switched(engine, send, new, old=old, recomputes=False)
        engine._recompute_kv = True
        live.load_state_dict(old.state_dict())
        found["recomputed"] = await switched(engine, send, old, old=new, recomputes=True)
    await engine.close()
    (folder / "rollouts.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    folder, dtype, *seeds = sys.argv[1:]
    asyncio.run(main(Path(folder), dtype, [int(seed) for seed in seeds]))
