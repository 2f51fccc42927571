"""Whole runs on a pretend CUDA device: values are real, and whatever CUDA would object to is counted."""

from __future__ import annotations

import importlib

import pytest

from cosmos_rl_core import run
from doubles.pretend_cuda import pretend_cuda

pytestmark = pytest.mark.cuda_dry

RUNS = [(domain, algorithm) for domain in ("llm", "vla", "wfm") for algorithm in ("rl", "sft")]
LAZY = {"wfm": ("diffusers.models.transformers.transformer_wan", "diffusers.models.autoencoders")}
"""Modules of diffusers that are imported when a model is built."""


@pytest.mark.parametrize(("domain", "algorithm"), RUNS)
def test_a_run_mixes_no_devices(tmp_path, domain, algorithm, recipe_of):
    for module in (f"cosmos_rl_{domain}.build", f"cosmos_rl_{domain}.domain", *LAZY.get(domain, ())):
        importlib.import_module(module)  # before torch sees a GPU
    tables = recipe_of(domain, algorithm)
    tables["run"] |= {"placement": "inline", "max_steps": 2, "output_dir": str(tmp_path / "run")}
    with pretend_cuda() as record:
        result = run(tables)
    assert len(result.metrics) == 2
    assert record.streams, "nothing ran on the device"
    assert not record.mismatches, record
    assert not record.math_attention, record
    assert not record.stray, record
    steps = [place for place in record.synchronisations if f"cosmos_rl_{domain}/policy" in place]
    assert not [place for place in steps if "/probe.py" not in place], record  # of a microbatch
