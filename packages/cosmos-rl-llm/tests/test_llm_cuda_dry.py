"""The torch engine keeps the promises of its interface on a pretend CUDA device, and mixes no devices there."""

import asyncio

import pytest
import torch
from tiny_engine import PROMPT, make_engine, tiny_model

from cosmos_rl_core.testing.conformance import ENGINE_CHECKS
from cosmos_rl_core.types import Sampling
from doubles.pretend_cuda import pretend_cuda

pytestmark = pytest.mark.cuda_dry


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_the_torch_engine(check):
    model = tiny_model()
    with pretend_cuda() as record:
        torch.cuda.set_device(0)
        asyncio.run(check(lambda: make_engine(model.to("cuda")), PROMPT, Sampling(max_terms=12)))
    assert record.synchronisations, "the engine was not on the device"
    assert not record.mismatches, record
    assert not record.stray, record
