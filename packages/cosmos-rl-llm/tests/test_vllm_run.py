"""vLLM in whole runs, over several workers, and when its owner is killed: minutes, so all of it is slow."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from cosmos_rl_core import run
from cosmos_rl_core.config.base import ConfigError
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Prompt, Sampling
from cosmos_rl_core.weight_sync import SyncSettings
from cosmos_rl_llm.config import LoraSection
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.engines.vllm import VllmEngine
from cosmos_rl_llm.engines.vllm_options import VllmEngineOptions
from cosmos_rl_llm.engines.vllm_start import start
from cosmos_rl_llm.model import load_model, named_weights
from cosmos_rl_llm.testing import write_sums, write_tiny_model
from cosmos_rl_transfer.publish.publisher import Publisher

psutil = pytest.importorskip("psutil", reason="comes with vLLM")

pytest.importorskip("vllm", reason="the extra cosmos-rl-llm[vllm] is not installed")
pytestmark = [
    pytest.mark.xdist_group("vllm"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings(  # vLLM's own
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Unclosed context:ResourceWarning"
    ),
]
slow = pytest.mark.slow

CACHE_BYTES = 64 << 20
STEPS = 4


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"max_model_length": 5}, "max_model_len"),
        ({"extra": {"seed": 3}}, "seed: set by the engine"),
        ({"extra": {"tensor_parallel_size": 2}}, "an option of its own"),
    ],
)
def test_options_it_does_not_take(options, found):
    with pytest.raises(ConfigError, match=found):
        LLM.build_engine(LLM.Model(path="x"), data=LLM.Data(path="x"), name="vllm", options=options)


def test_adapters_are_refused():
    model = LLM.Model(path="x", lora=LoraSection(rank=2))
    with pytest.raises(UserError, match=r"model\.lora"):
        LLM.build_engine(model, data=LLM.Data(path="x"), name="vllm", options={})


@slow
def test_a_run_with_vllm(tmp_path):
    train, _ = write_sums(tmp_path / "data")
    model = write_tiny_model(tmp_path / "model", num_layers=2)
    recipe = {
        "run": {"domain": "llm", "output_dir": str(tmp_path / "run"), "max_steps": STEPS},
        "model": {"path": str(model)},
        "data": {"path": str(train), "chat_template": "none"},
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 4, "threads": 1, "optimizer": {"learning_rate": 1e-3}},
        "rollout": {
            "engine": "vllm",
            "group_size": 4,
            "threads": 1,
            "sampling": {"max_terms": 4},
            "options": {"cache_bytes": CACHE_BYTES},
        },
        "reward": {"functions": [{"name": "length", "options": {"max_terms": 1, "slack_terms": 3}}]},
        "sync": {"max_staleness": 1},
        "logging": {"sinks": ["jsonl"]},
    }
    metrics = run(recipe).metrics
    assert [line["step"] for line in metrics] == list(range(STEPS))
    assert all(line["staleness_max"] <= 1 for line in metrics)
    assert metrics[0]["mismatch_kl"] < 1e-5  # drawn with the weights that are trained
    assert len({line["reward_mean"] for line in metrics}) > 1
    assert all(np.isfinite(line["loss"]) and line["terms"] > 0 for line in metrics)


@slow
@pytest.mark.parametrize("staging", ["shadow", "in_place"])
def test_after_ten_syncs_two_workers_answer_as_a_fresh_engine(tmp_path, staging):
    model = load_model(write_tiny_model(tmp_path / "first", initializer_range=0.2), dtype=torch.float32)
    settings = SyncSettings(token=b"the secret of the test", staging=staging, timeout_s=60.0)
    prompts = [Prompt(sample_id=i, row={"tokens": [3 + i, 4, 13, 5, 14]}) for i in range(6)]
    greedy = Sampling(max_terms=40, temperature=0.0)

    async def answers(engine):
        calls = (engine.generate(prompt, num_samples=1, sampling=greedy, seed=0) for prompt in prompts)
        return [rollouts[0].arrays["tokens"].tolist() for _, rollouts in await asyncio.gather(*calls)]

    async def synced():
        publisher = Publisher(named_weights(model), token=settings.token)
        async with started(tmp_path / "first", tensor_parallel_size=2) as engine:
            subscriber = await engine.subscriber(publisher.address, backend="transfer", settings=settings)
            for version in range(10):
                perturb(model, seed=version)
                await publisher.publish(version, named_weights(model))
                assert await subscriber.stage(after=version - 1) == version
                await engine.switch(version, subscriber.apply)
                await publisher.fence()
            await subscriber.close()
            await publisher.close()
            return await answers(engine)

    async def fresh():
        async with started(tmp_path / "last") as engine:
            return await answers(engine)

    found = asyncio.run(synced())
    model.save_pretrained(tmp_path / "last")
    assert found == asyncio.run(fresh())
    assert len({tuple(tokens) for tokens in found}) > 1


@asynccontextmanager
async def started(path, **options):
    llm = start(
        str(path), options=VllmEngineOptions(cache_bytes=CACHE_BYTES, **options), dtype="float32", max_length=None
    )
    encode = lambda prompt: np.array(prompt.row["tokens"], np.int32)  # noqa: E731
    engine = VllmEngine(llm, encode=encode, decode=str, decode_prompt=str, stop_ids=[])
    try:
        yield engine
    finally:
        await engine.close()
        llm.engine_core.resources.ctx.destroy(linger=0)  # vLLM leaves that to the garbage collector, which warns


@torch.no_grad()
def perturb(model, *, seed):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.02)


OWNER = """
import sys, time
from cosmos_rl_llm.engines.vllm_options import VllmEngineOptions
from cosmos_rl_llm.engines.vllm_start import start

if __name__ == "__main__":
    llm = start(sys.argv[1], options=VllmEngineOptions(cache_bytes=1 << 26), dtype="float32", max_length=None)
    print("started", flush=True)
    time.sleep(600)
"""


@slow
def test_its_processes_end_with_an_owner_that_is_killed(tmp_path):
    model = write_tiny_model(tmp_path / "model", num_layers=2)
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen([sys.executable, script, model], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    while "started" not in owner.stdout.readline():
        assert owner.poll() is None
    children = [p for p in psutil.Process(owner.pid).children(recursive=True) if "VLLM" in p.name()]
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert len(children) == 2
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
