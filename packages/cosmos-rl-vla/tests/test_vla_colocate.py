"""[run] colocate: a robot policy and the engine with its simulators take turns on the same GPU."""

import asyncio
import importlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cosmos_rl_core import run
from cosmos_rl_core.types import Prompt
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.build import build_engine
from cosmos_rl_vla.config import VLADataConfig, VLAModelConfig, VLASampling, VLATorchOptions
from cosmos_rl_vla.data.rows import load_rows
from doubles.pretend_cuda import pretend_cuda

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 2
DATA = {"simulator": "reach", "tasks": ["red", "green"], "options": {"image_size": 16, "max_steps": 20}}


@pytest.fixture
def model(tmp_path):
    """A tiny pi0.5."""
    for module in ("cosmos_rl_vla.build", "cosmos_rl_vla.models.pi.family", "transformers.modeling_utils"):
        importlib.import_module(module)  # before torch sees a GPU
    ActionStats.unit(2).save(tmp_path)
    words, stats = ["reach the red green square"], str(tmp_path / "action_stats.json")
    return {"action_dim": 2, "state_dim": 2, "horizon": 4, "words": words, "stats": stats}


@pytest.mark.ci
@pytest.mark.cuda_dry
def test_a_sleeping_engine_has_no_weights_on_the_gpu_and_answers_as_before(model):
    data = VLADataConfig(**DATA)
    rows, _ = load_rows(data)

    async def go():
        options = VLATorchOptions(processes=1, slots=2)
        engine = await asyncio.to_thread(build_engine, VLAModelConfig(**model), data=data, options=options)
        try:
            await engine.switch(3, lambda: None)
            tensors = [*engine._model.parameters(), *engine._model.buffers()]
            sizes, answers = [num_bytes(tensors)], []
            for sleep in (True, False):
                prompt = Prompt(sample_id=0, row=rows[0])
                sampling = VLASampling(max_steps=10)
                answers.append((await engine.generate(prompt, num_samples=2, sampling=sampling, seed=1))[1])
                if sleep:
                    await engine.sleep()
                    sizes.append(num_bytes(tensors))
                    await engine.wake()
                    sizes.append(num_bytes(tensors))
            return sizes, answers
        finally:
            await engine.close()

    with pretend_cuda() as record:
        sizes, (before, after) = asyncio.run(asyncio.wait_for(go(), 120))
    assert not record.mismatches, record
    assert sizes[0] == sizes[2] > 0 == sizes[1]
    for one, other in zip(before, after, strict=True):
        assert one.arrays.keys() == other.arrays.keys()
        assert all(np.array_equal(one.arrays[name], other.arrays[name]) for name in one.arrays)


def num_bytes(tensors):
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.ci
@pytest.mark.cuda_dry
def test_a_run_in_turns_has_the_bits_of_one_without(model, tmp_path):
    def learnt(name, **section):
        result = run(
            {
                "run": {"domain": "vla", "placement": "inline", "max_steps": STEPS, **section},
                "model": model,
                "data": DATA,
                "algorithm": {"name": "ppo"},
                "policy": {"prompts_per_step": 4, "microbatch_terms": 64, "threads": 1},
                "rollout": {
                    "group_size": 1,
                    "threads": 1,
                    "sampling": {"max_steps": 12},
                    "options": {"processes": 1, "slots": 3, "steady": True},
                },
                "reward": {"functions": [{"name": "success"}]},
                "sync": {"max_staleness": 0},
                "logging": {"sinks": ["jsonl"], "media_every": 0},
            },
            [f"run.output_dir={tmp_path / name}"],
        )
        assert result.steps == STEPS
        files = sorted((tmp_path / name / "checkpoints" / f"step_{STEPS}" / "policy").glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    with pretend_cuda() as record:
        plain, turns = learnt("plain"), learnt("turns", colocate=True)
    assert not record.mismatches, record
    assert plain and plain.keys() == turns.keys()
    assert all(torch.equal(plain[name], turns[name]) for name in plain)
