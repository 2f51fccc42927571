"""[logging.profile]: the steps that torch's profiler records."""

import gzip
import json

import pytest
import torch

from cosmos_rl_core import run
from cosmos_rl_core.train.profile import ProfileWindow


def products(path, *, count, **keys):
    """The sizes of the matrices that the file has, of a run that multiplies one of 10 + step in each step."""
    window = ProfileWindow(path, shapes=True, log=lambda _: None, **keys)
    for step in range(count):
        window.advance()
        torch.ones(10 + step, 10 + step) @ torch.ones(10 + step, 1)
    window.advance()
    window.stop()
    if not path.exists():
        return None
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["args"]["Input Dims"][0][0] for event in events if event["name"] == "aten::mm"]


@pytest.mark.parametrize(
    ("count", "keys", "sizes"),
    [
        (8, {"wait_steps": 2, "steps": 2}, [13, 14]),  # 2 waited for, 1 of warm-up
        (8, {"wait_steps": 0, "steps": 1}, [11]),
        (4, {"wait_steps": 2, "steps": 5}, [13]),
        (2, {"wait_steps": 2, "steps": 2}, None),
    ],
)
def test_the_steps_after_those_it_waits_for_are_recorded(tmp_path, count, keys, sizes):
    assert products(tmp_path / "profile" / "policy-0.json.gz", count=count, **keys) == sizes


def test_a_run_writes_the_profile_of_its_policy(tmp_path):
    result = run(
        {
            "run": {
                "domain": "cosmos_rl_core.testing.tiny:TINY",
                "max_steps": 3,
                "placement": "inline",
                "output_dir": str(tmp_path / "run"),
            },
            "policy": {"prompts_per_step": 2, "threads": 1},
            "rollout": {"group_size": 2, "threads": 1, "sampling": {"max_tokens": 3}},
            "reward": {"functions": [{"name": "hits"}]},
            "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
            "logging": {"sinks": ["jsonl"], "profile": {"steps": 1, "wait_steps": 1}},
        }
    )
    text = gzip.decompress((result.run_dir / "profile" / "policy-0.json.gz").read_bytes()).decode()
    assert "autograd::engine::evaluate_function" in text, "the backward pass of a step"
