"""Runs of every kind of model on a pretend CUDA device: no operation mixes devices, and each engine sets its GPU."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from importlib import import_module

import pytest

from cosmos_rl_core import run
from cosmos_rl_core.inference import worker
from cosmos_rl_core.inference.pool import InstanceTask, PromptRow, RowResult
from cosmos_rl_core.recipe.load import load_config, load_domain, tables_of
from cosmos_rl_core.train.trainer import Trainer
from doubles.pretend_cuda import pretend_cuda
from doubles.pretend_record import Record

pytestmark = pytest.mark.cuda_dry

IMPORTS = {
    "llm": ("cosmos_rl_llm.build", "transformers.models.qwen3.modeling_qwen3", "peft"),
    "vla": ("cosmos_rl_vla.build", "cosmos_rl_vla.models.openvla.family", "transformers.modeling_utils"),
    "wfm": ("cosmos_rl_wfm.build", "diffusers.models.transformers.transformer_wan", "diffusers.models.autoencoders"),
}
"""Modules that check for GPUs while they are imported, and would keep the answer."""
ENGINE_THREADS = {"torch-engine", "simulate", "denoise"}

WAN = {"family": "wan", "tiny": True, "codec": None, "network": None, "text": {"encoder": "words", "length": None}}
CLIPS = {"size": {"frames": 5, "height": 32, "width": 32}, "mock": {"rows": 4}}
GUIDED = {"num_steps": 3, "guidance": 4.0, "window": "fixed", "steps": [0, 1]}
CLEAN = {"num_steps": 3, "rule": "ode", "old_decay": "slow", "guidance": 4.0, "window": None, "steps": None}
OFT = {"rollout": {"group_size": 2, "sampling": {"terms": "token"}}, "data": {"options": {"image_size": 32}}}

MIXED = {"dtype": "bfloat16"}
"""float32 weights, products in bfloat16: what GPUs train with."""

RUNS = {
    "llm with reference and evaluation": ("llm", {"algorithm": {"kl_coef": 0.1}, "eval": {}}),
    "llm adapters in bfloat16": ("llm", {"algorithm": {"kl_coef": 0.1}, "model": {"lora": {"rank": 2}, **MIXED}}),
    "OpenVLA GRPO in bfloat16": (
        "vla",
        {"model": {"family": "openvla_oft", "num_steps": None, **MIXED}, "algorithm": {"name": "grpo"}, **OFT},
    ),
    "MLP PPO": ("vla", {"model": {"family": "mlp", "horizon": 1, "num_steps": None}}),
    "pi0.5 PPO in bfloat16": ("vla", {"model": MIXED}),
    "guided FlowGRPO with reference": (
        "wfm",
        {"model": WAN, "data": CLIPS, "rollout": {"sampling": GUIDED}, "algorithm": {"kl_coef": 0.04}},
    ),
    "guided DDRL in bfloat16": (
        "wfm",
        {
            "model": WAN | MIXED,
            "data": CLIPS,
            "rollout": {"sampling": GUIDED},
            "algorithm": {"name": "ddrl"},
            "data_regularization": {"coef": 0.01, "rows_per_step": 2},
        },
    ),
    "guided NFT with average and evaluation": (
        "wfm",
        {
            "model": {"ema": {"decay": 0.9}},
            "rollout": {"sampling": CLEAN},
            "algorithm": {"name": "nft"},
            "eval": {},
        },
    ),
}


WAITS: dict[str, int] = {}
"""Synchronisations and blocking uploads of a microbatch, where it is not 0."""


class Waits(list):
    """Of each `forward_backward` of a trainer: the waits in its own thread, and its number of microbatches."""

    record: Record


@pytest.fixture
def microbatches(monkeypatch):
    found, forward_backward = Waits(), Trainer.forward_backward

    def counted(trainer, microbatches):
        before = waits_here(found.record)
        forward_backward(trainer, microbatches)
        found.append((waits_here(found.record) - before, len(microbatches)))

    monkeypatch.setattr(Trainer, "forward_backward", counted)
    return found


def waits_here(record):
    """Synchronisations and blocking uploads of this thread so far, by place."""
    name, waits = f"({threading.current_thread().name})", record.synchronisations + record.uploads
    return Counter({place: count for place, count in waits.items() if place.endswith(name)})


@pytest.mark.parametrize("name", RUNS)
def test_a_run_mixes_no_devices(tmp_path, name, recipe_of, microbatches):
    domain, changes = RUNS[name]
    tables = changed(recipe_of(domain, "rl"), changes)
    tables["run"] |= {"placement": "inline", "max_steps": 2, "output_dir": str(tmp_path / "run")}
    if "eval" in changes:
        tables["eval"] = {"data": tables["data"], "limit": 2}
    prepare(domain)
    with pretend_cuda() as record:
        microbatches.record = record
        result = run(tables)
    assert len(result.metrics) == 2
    assert not record.mismatches, record
    assert not record.math_attention, record
    assert len(microbatches) >= 2
    for waits, number in microbatches[1:]:  # the first step makes what is kept
        assert waits.total() <= WAITS.get(name, 0) * number, waits
    steps = [place for place in record.uploads if "(denoise)" in place and "/samplers/" in place]
    assert not steps, record  # of a denoising step
    assert threads_of(record.synchronisations) & ENGINE_THREADS, "the engine was not on the device"
    assert not threads_of(record.stray) & ENGINE_THREADS, record


VISION_WAITS = 12
"""Synchronisations and blocking uploads of a microbatch with pictures, in transformers' code, with any tower."""


@pytest.mark.parametrize("family", ["qwen2_5_vl"])
def test_a_run_with_pictures_mixes_no_devices(tmp_path, family, microbatches, monkeypatch):
    monkeypatch.setattr("cosmos_rl_llm.policy.kernels.available", lambda device: {"flash"})  # flex needs a real GPU
    pytest.importorskip("PIL")
    from tiny_vision import COLOURS, make, square, write_processing

    prepare("llm")
    make(family).save_pretrained(tmp_path / "base")
    write_processing(tmp_path / "base", family)
    rows = []
    for number, (name, colour) in enumerate(COLOURS.items()):
        square(colour, dark_rows=number + 1).save(tmp_path / f"{number}.png")
        rows.append({"prompt": "what colour ?", "picture": f"{number}.png", "answer": name})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "rows.jsonl"), "image_column": "picture", "media": {"root": str(tmp_path)}}
    tables = {
        "run": {"domain": "llm", "max_steps": 2, "placement": "inline", "output_dir": str(tmp_path / "run")},
        "model": {"path": str(tmp_path / "base"), "dtype": "bfloat16"},
        "data": data,
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 2},
        "rollout": {"group_size": 2, "sampling": {"max_tokens": 3}},
        "reward": {"functions": [{"name": "exact"}]},
        "logging": {"sinks": ["jsonl"], "media_every": 0},
    }
    with pretend_cuda() as record:
        microbatches.record = record
        result = run(tables)
    assert len(result.metrics) == 2
    assert not record.mismatches, record
    assert not record.math_attention, record
    assert not threads_of(record.stray) & ENGINE_THREADS, record
    for waits, number in microbatches:
        assert waits.total() <= VISION_WAITS * number, waits


@pytest.mark.parametrize("domain", ["llm", "vla", "wfm"])
def test_generate_mixes_no_devices(domain, recipe_of):
    tables = recipe_of(domain, "rl")
    tables["run"] |= {"max_steps": 1}
    prepare(domain)
    config = load_config(tables, generating=True)
    rows, origin = load_domain(domain).load_rows(config.data)
    task = InstanceTask(
        name="instance",
        recipe=tables_of(config, generating=True),
        checkpoint="",
        averaged=False,
        version=0,
        rows=[PromptRow(sample=place, columns=row, origin=f"{origin}:{place}") for place, row in enumerate(rows[:2])],
        num_samples=2,
        rows_at_once=None,
        scored=True,
        media="",
        threads=1,
    )
    answers = []
    with pretend_cuda() as record:
        asyncio.run(worker._answer_all(task, answers.append))
    assert [answer for answer in answers if not isinstance(answer, RowResult)] == []
    assert sorted(answer.sample for answer in answers) == [0, 1]
    assert not [line for answer in answers for line in answer.lines if "error" in line]
    assert not record.mismatches, record
    assert not record.stray, record


def changed(tables, changes):
    """`tables` with `changes` in them, table by table; None removes a key."""
    found = dict(tables)
    for name, value in changes.items():
        below = found.get(name)
        found[name] = changed(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
        if value is None:
            del found[name]
    return found


def prepare(domain):
    for module in IMPORTS[domain]:
        import_module(module)


def threads_of(counts):
    """Names of the threads in a record's counts."""
    return {event.rpartition("(")[2].rstrip(")") for event in counts}
