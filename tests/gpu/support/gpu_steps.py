"""The steps of the first hour, in the order of what they prove a minute; docs/gpu.md has the page about them.

`--minutes` cuts from the end. Numbers are names, and stay when the order changes.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import gpu_alone as alone
import gpu_engines as engines
import gpu_limits as limits
import gpu_pairs as pairs
import gpu_runs as runs
import torch
from gpu_hour import Hour, Step
from gpu_software import Package, Variable, ours

TRANSFER, LLM = ours("transfer"), ours("llm")
PYTEST = (Package("pytest"), Package("pytest-timeout"), Package("hypothesis"))
VLLM = (Package("vllm", in_rehearsals=False),)
RAGGED = (Package("torch", "2.12", of="enable_gqa of torch.nn.attention.varlen.varlen_attn", in_rehearsals=False),)
"""On a GPU packed rows in half precision are one call of it."""
MESH = (Package("torch", "2.13", of="DeviceMesh.size(-1) of one dimension"),)
"""FSDP cuts parameters by it."""
SLOTS = (Package("torch", "2.12", of="torch._C._accelerator_getAllocatorSettings", in_rehearsals=False),)
"""Slots of CUDA IPC are allocated outside expandable segments."""
MODEL = Variable(runs.MODEL_7B, "a folder with Qwen2.5-7B-Instruct")
NODE = Variable(runs.SECOND_NODE, 'the command that runs its arguments on the other node, as "ssh node2"')

STEPS = (
    Step(number=0, name="machine", minutes=1, perform=alone.here),
    Step(number=3, name="attention kernels", minutes=2, perform=alone.attention, needs=LLM + RAGGED),
    Step(number=8, name="transfer beside training", minutes=2, perform=alone.transfer, needs=TRANSFER),
    Step(
        number=4,
        name="training speed",
        minutes=4,
        perform=alone.training,
        needs=LLM + RAGGED + MESH,
        timeout_s=900,
        on_cpu=True,
    ),
    Step(
        number=17,
        name="tokens of vLLM",
        minutes=3,
        perform=engines.tokens,
        needs=LLM + VLLM,
        timeout_s=900,
        on_cpu=True,
    ),
    Step(
        number=5,
        name="vLLM on one GPU",
        minutes=10,
        perform=engines.vllm_tests,
        needs=LLM + VLLM + PYTEST,
        timeout_s=1200,
        on_cpu=True,
    ),
    Step(
        number=18,
        name="two processes of one GPU",
        minutes=1,
        perform=pairs.on_one_card,
        needs=TRANSFER + SLOTS,
        on_cpu=True,
    ),
    Step(number=2, name="demo on one GPU", minutes=4, perform=runs.demo, needs=LLM, on_cpu=True),
    Step(
        number=19,
        name="one of two policies dies",
        minutes=3,
        perform=pairs.one_of_two_policies,
        needs=LLM,
        on_cpu=True,
    ),
    Step(
        number=12,
        name="turns on one GPU",
        minutes=5,
        perform=engines.in_turns,
        needs=LLM,
        timeout_s=1500,
        on_cpu=True,
    ),
    Step(
        number=20,
        name="weights that vLLM packs",
        minutes=3,
        perform=engines.landing,
        needs=LLM + VLLM,
        timeout_s=900,
        on_cpu=True,
    ),
    Step(number=9, name="kills", minutes=3, perform=runs.faults, needs=LLM, on_cpu=True),
    Step(
        number=10,
        name="world model and robot",
        minutes=3,
        perform=runs.other_domains,
        needs=ours("wfm", "vla"),
        on_cpu=True,
    ),
    Step(
        number=16,
        name="rendering",
        minutes=1,
        perform=limits.rendering,
        needs=(*ours("vla"), Package("mujoco")),
        on_cpu=True,
    ),
    Step(
        number=6,
        name="two GPUs",
        minutes=12,
        perform=runs.parallelism,
        gpus=2,
        needs=LLM + MESH,
        timeout_s=1500,
        on_cpu=True,
    ),
    Step(
        number=14,
        name="weights between two GPUs",
        minutes=5,
        perform=limits.between_processes,
        gpus=2,
        needs=LLM + RAGGED + SLOTS,
        on_cpu=True,
    ),
    Step(
        number=7,
        name="eight GPUs",
        minutes=30,
        perform=runs.large_run,
        gpus=8,
        needs=(*LLM, *VLLM, *MESH, MODEL),
        timeout_s=2400,
        on_cpu=True,
    ),
    Step(number=13, name="a full GPU", minutes=2, perform=limits.full_gpu, gpus=2, needs=LLM + MESH, on_cpu=True),
    Step(
        number=15,
        name="checkpoints",
        minutes=15,
        perform=limits.checkpoints,
        gpus=2,
        needs=LLM + MESH,
        timeout_s=1800,
        on_cpu=True,
    ),
    Step(
        number=11,
        name="two nodes",
        minutes=10,
        perform=runs.two_nodes,
        needs=(*LLM, *MESH, NODE),
        timeout_s=1200,
        on_cpu=True,
    ),
    Step(
        number=1,
        name="tests on one GPU",
        minutes=15,
        perform=runs.tests,
        needs=(*LLM, *RAGGED, *MESH, *ours("wfm", "vla"), *PYTEST),
        timeout_s=1200,
        on_cpu=True,
    ),
    Step(
        number=21,
        name="slow tests of vLLM",
        minutes=25,
        perform=engines.slow_vllm_tests,
        needs=LLM + VLLM + PYTEST,
        timeout_s=2400,
        on_cpu=True,
    ),
)

BY_NUMBER = {step.number: step for step in STEPS}


def perform(step: Step, hour: Hour) -> None:
    """Perform a step, or rehearse it: on the CPU or on a pretend GPU."""
    if not hour.rehearsal:
        step.perform(hour)
        return
    if step.on_cpu:
        step.perform(replace(hour, device=torch.device("cpu")))
        return
    for module in (
        "transformers.modeling_utils",
        "cosmos_rl_llm.policy.policy",
        "cosmos_rl_transfer.publish.publisher",
    ):
        import_module(module)  # before torch sees a GPU
    from doubles.pretend_cuda import pretend_cuda  # of torch's internals, which an older torch has elsewhere

    with pretend_cuda() as record:
        step.perform(hour)
    assert not record.mismatches, record
