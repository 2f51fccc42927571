"""The engine of world models keeps the promises of every rollout engine, on the CPU and on a pretend GPU."""

import asyncio
from contextlib import nullcontext

import pytest
import torch
from wfm_fixtures import mock_data, pixel_model, prompt

from cosmos_rl_core.testing.conformance import ENGINE_CHECKS, is_greedy_at_zero
from cosmos_rl_wfm.build import build_engine
from cosmos_rl_wfm.engines.torch import WFMTorchOptions
from cosmos_rl_wfm.sampling import FlowSampling
from doubles.pretend_cuda import pretend_cuda

SAMPLING = FlowSampling(num_steps=5, window="fixed", steps=(0, 2))
CHECKS = [check for check in ENGINE_CHECKS if check is not is_greedy_at_zero]


def make_engine():
    return build_engine(pixel_model(), data=mock_data(), options=WFMTorchOptions(samples_at_once=2))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda_dry)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_torch_engine(check, device):
    with pretend_cuda() if device == "cuda" else nullcontext() as record:
        if device == "cuda":
            torch.cuda.set_device(0)
        asyncio.run(check(make_engine, prompt(), SAMPLING))
    if record is not None:
        assert record.uploads or record.synchronisations or record.waits, "the engine was not on the device"
        assert not record.mismatches, record
        assert not record.stray, record
