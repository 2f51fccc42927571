"""Weights of a whole run on a pretend GPU: published and pulled on side streams, by threads that set their device."""

import importlib

import pytest

from cosmos_rl_core import run
from doubles.pretend_cuda import pretend_cuda

pytestmark = pytest.mark.cuda_dry


def test_a_run_moves_its_weights_beside_the_computation(tmp_path, recipe_of):
    for part in ("build", "domain"):  # before torch sees a GPU
        importlib.import_module(f"cosmos_rl_llm.{part}")
    tables = recipe_of("llm", "rl")
    tables["run"] |= {"placement": "inline", "max_steps": 2, "output_dir": str(tmp_path / "run")}
    with pretend_cuda() as record:
        run(tables)
    moved = [stream for stream in record.streams if "weights" in stream]
    assert "to the host, side stream, weights-serve" in moved, record
    assert not [stream for stream in moved if "default stream" in stream], record
    assert not [place for place in record.stray if "weights" in place or "cosmos_rl_transfer" in place], record
    assert not [place for place in record.synchronisations if "weights" in place], record
    waits = {place: count for place, count in record.waits.items() if "weights-serve" in place}
    copies = sum(count for stream, count in record.streams.items() if "to the host" in stream and "serve" in stream)
    assert sum(waits.values()) * 2 == copies, record  # a bucket's bytes and its hashes
