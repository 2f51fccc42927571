"""The engine of robot policies keeps the promises of every rollout engine, on the CPU and on a pretend GPU."""

import asyncio
from contextlib import nullcontext

import pytest
import torch

from cosmos_rl_core.testing.conformance import ENGINE_CHECKS, is_greedy_at_zero
from cosmos_rl_core.types import Prompt
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.build import build_engine
from cosmos_rl_vla.config import VLADataConfig, VLAModelConfig, VLASampling, VLATorchOptions
from cosmos_rl_vla.data.rows import load_rows
from doubles.pretend_cuda import pretend_cuda

DATA = VLADataConfig(simulator="reach", tasks=("red",), options={"image_size": 16, "max_steps": 12})
SAMPLING = VLASampling(max_steps=4)
CHECKS = [check for check in ENGINE_CHECKS if check is not is_greedy_at_zero]


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stats")
    ActionStats.unit(2).save(directory)
    model = VLAModelConfig(
        action_dim=2,
        state_dim=2,
        horizon=4,
        words=("reach the red square",),
        stats=str(directory / "action_stats.json"),
    )
    return lambda: build_engine(model, data=DATA, options=VLATorchOptions(processes=1, slots=4))


@pytest.mark.ci
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda_dry)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_torch_engine(make_engine, check, device):
    rows, _ = load_rows(DATA)
    with pretend_cuda() if device == "cuda" else nullcontext() as record:
        if device == "cuda":
            torch.cuda.set_device(0)
        asyncio.run(check(make_engine, Prompt(sample_id=0, row=rows[0]), SAMPLING))
    if record is not None:
        assert record.uploads or record.synchronisations or record.waits, "the engine was not on the device"
        assert not record.mismatches, record
        assert not record.stray, record
