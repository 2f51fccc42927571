"""[run] colocate: the policy and the rollouts take turns; the weights are those of a run without turns."""

import importlib
import json
import os
import signal
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from cosmos_rl_core import assemble, run
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_llm.engines.torch.engine import TorchEngine
from doubles.pretend_cuda import pretend_cuda

STEPS = 5
INVARIANT = {"rollout__options": {"batch_invariant": True}}
ci = pytest.mark.ci
slow = [pytest.mark.ci, pytest.mark.slow]


def weights_of(result):
    found = {}
    for file in sorted((result.checkpoint / "policy").glob("*.safetensors")):
        found |= load_file(file)
    return found


def same_bits(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def turns(directory):
    """The turns of a run in the order of their starts: (start, end, role) in microseconds."""
    events = json.loads((directory / "timeline.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found = [
        (event["ts"], event["ts"] + event["dur"], names[event["pid"]].partition("-")[0])
        for event in events
        if event["name"] == "turn"
    ]
    return sorted(found)


def assert_alternating(directory, *, steps):
    """No turn of the policy overlaps one of a rollout, and each step has its own turn."""
    found = turns(directory)
    assert len([turn for turn in found if turn[2] == "policy"]) >= steps
    for (_, end, role), (start, _, following) in pairwise(found):
        assert role == following or start >= end, f"{following} began its turn {end - start:g} us before {role} left"
    assert len([1 for left, right in pairwise(found) if left[2] != right[2]]) >= steps


@pytest.mark.parametrize(
    ("domain", "changes"),
    [
        pytest.param("sums", {"run__placement": "inline", **INVARIANT}, id="inline"),
        pytest.param("sums", {"run__placement": "local", **INVARIANT}, id="processes", marks=ci),
        pytest.param("bandit", {"policy__parallel__dp_shard": 2, "rollout__replicas": 2}, id="ranks", marks=slow),
    ],
)
def test_a_run_in_turns_has_the_bits_of_one_without(domain, changes, request, tmp_path, one_thread):
    recipe = request.getfixturevalue(domain)
    changes = {"run__max_steps": STEPS, "sync__max_staleness": 0, **changes}
    plain = run(recipe(tmp_path / "plain", **changes))
    tables = recipe(tmp_path / "turns", run__colocate=True, checkpoint__every_steps=2, eval__every_steps=2, **changes)
    tables["eval"]["data"] = tables.get("data", {})
    found = run(tables)
    assert found.steps == STEPS
    assert sorted(found.evaluations) == [0, 2, 4, STEPS]
    assert same_bits(weights_of(found), weights_of(plain))
    assert_alternating(tmp_path / "turns", steps=STEPS)


@ci
def test_one_step_stale_in_turns(sums, tmp_path):
    changes = {"run__max_steps": STEPS, "run__placement": "local", "sync__max_staleness": 1}
    found = run(sums(tmp_path / "turns", run__colocate=True, rollout__replicas=2, **changes))
    assert found.steps == STEPS
    assert max(line["staleness_max"] for line in found.metrics) <= 1
    assert_alternating(tmp_path / "turns", steps=2)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_kills_on_both_sides_leave_no_turn_behind(
    staleness, tmp_path, bandit, write_recipe, start, wait_for, pid_of, rows_of
):
    run_dir, steps = tmp_path / "run", 24
    tables = bandit(
        run_dir,
        run__max_steps=steps,
        run__colocate=True,
        sync__max_staleness=staleness,
        rollout__replicas=2,
        rollout__options={"delay_s": 0.1},
        checkpoint__every_steps=1,
        logging__sinks=["console", "jsonl"],
    )
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    for number, name in enumerate(["rollout-0", "policy-0", "rollout-1", "policy-0"]):
        done = 3 + 4 * number
        wait_for(lambda done=done: len(rows_of(run_dir / "metrics.jsonl")) >= done, f"{done} steps")
        pid = wait_for(lambda name=name: pid_of(run_dir, name), f"{name} to run")
        os.kill(pid, signal.SIGKILL)
    text, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert text.count("died (signal SIGKILL); starting it again") == 4
    assert rows_of(run_dir / "metrics.jsonl")[-1]["step"] == steps - 1


def num_bytes(tensors):
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def cache_of(engine):
    return [store for pair in engine._batch._cache._stores for store in pair or ()]


def weights_in(engine):
    return [*engine._model.parameters(), *engine._model.buffers()]


def states_of(trainer):
    parameters = list(trainer.policy.module.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    moments = [value for state in trainer.optimizer.state.values() for value in state.values() if value.dim()]
    return [*parameters, *gradients, *moments]


@pytest.fixture
def memory(monkeypatch):
    """Bytes of each side while the other computes, and while it computes itself."""
    built, seen = {}, {"engine": [], "cache": [], "policy": [], "engine at work": [], "policy at work": []}

    def note(name, build):
        def built_and_noted(*args, **kwargs):
            built[name] = build(*args, **kwargs)
            return built[name]

        return built_and_noted

    forward_backward, work = Trainer.forward_backward, TorchEngine._work

    def train(self, microbatches):
        seen["engine"].append(num_bytes(weights_in(built["engine"])))
        seen["cache"].append(num_bytes(cache_of(built["engine"])))
        forward_backward(self, microbatches)
        seen["policy at work"].append(num_bytes(states_of(self)))

    def generate(self):
        if self._batch.sequences or self._waiting:
            seen["policy"].append(num_bytes(states_of(built["trainer"])))
            work(self)
            seen["engine at work"].append(num_bytes([*weights_in(self), *cache_of(self)]))
        else:
            work(self)

    monkeypatch.setattr(assemble, "build_engine", note("engine", assemble.build_engine))
    monkeypatch.setattr(assemble, "build_trainer", note("trainer", assemble.build_trainer))
    monkeypatch.setattr(Trainer, "forward_backward", train)
    monkeypatch.setattr(TorchEngine, "_work", generate)
    return seen


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda_dry)])
def test_the_side_without_a_turn_has_no_memory_on_the_gpu(device, sums, tmp_path, memory):
    for module in ("cosmos_rl_llm.build", "transformers.models.qwen3.modeling_qwen3"):
        importlib.import_module(module)  # before torch sees a GPU
    changes = {"run__placement": "inline", "run__max_steps": 3, "run__colocate": True, "sync__max_staleness": 0}
    with pretend_cuda() if device == "cuda" else nullcontext() as record:
        result = run(sums(tmp_path / "run", checkpoint__every_steps=2, **changes))
    assert len(result.metrics) == 3
    assert [line["ratio_mean"] for line in result.metrics] == pytest.approx([1.0] * 3, abs=1e-6)  # the engine's weights
    assert len(memory["policy at work"]) >= 3 and memory["engine at work"]
    assert min(memory["policy at work"]) > 0 and min(memory["engine at work"]) > 0
    assert max(memory["cache"]) == 0
    if record is None:  # there is no other memory: both sides stay, without keys, values and gradients
        (weights,), parameters = set(memory["engine"]), memory["policy"][0]
        assert 0 < weights < min(memory["engine at work"])
        assert set(memory["policy"]) == {parameters, 3 * parameters}  # and Adam's two moments after the first step
        assert set(memory["policy at work"]) == {2 * parameters, 4 * parameters}
        return
    assert not record.mismatches, record
    assert max(memory["engine"]) == 0
    assert max(memory["policy"]) == 0
