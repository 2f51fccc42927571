"""New weights are written into vLLM's model after its last pass, which another thread's stream may still run."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from cosmos_rl_llm.engines.vllm.weights import TransferWeights


@pytest.mark.parametrize(
    ("device", "wanted"), [("cuda", ["device", "wait", "write", "settle", "wait"]), ("cpu", ["write", "settle"])]
)
def test_a_gpu_has_finished_before_weights_are_written(device, wanted, monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: events.append("device"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait"))
    engine = object.__new__(TransferWeights)
    engine.device = torch.device(device)
    subscriber = SimpleNamespace(apply=lambda: events.append("write"))
    landing = SimpleNamespace(settle=lambda: events.append("settle"))
    engine._commit(subscriber, landing)  # pyright: ignore[reportArgumentType]
    assert events == wanted
