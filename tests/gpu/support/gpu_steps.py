"""The steps of the first hour, in their order; docs/gpu.md has the page about them."""

from __future__ import annotations

from importlib import import_module

import gpu_alone as alone
import gpu_limits as limits
import gpu_runs as runs
from gpu_hour import Hour, Step

from doubles.pretend_cuda import pretend_cuda

STEPS = (
    Step(number=0, name="machine", perform=alone.here),
    Step(number=1, name="tests on one GPU", perform=runs.tests, timeout_s=1200, starts_processes=True),
    Step(number=2, name="demo on one GPU", perform=runs.demo, starts_processes=True),
    Step(number=3, name="attention kernels", perform=alone.attention),
    Step(number=4, name="training speed", perform=alone.training, timeout_s=900),
    Step(number=5, name="vLLM on one GPU", perform=runs.vllm, timeout_s=2400, starts_processes=True),
    Step(number=6, name="two GPUs", perform=runs.parallelism, gpus=2, timeout_s=1500, starts_processes=True),
    Step(number=7, name="eight GPUs", perform=runs.large_run, gpus=8, timeout_s=2400, starts_processes=True),
    Step(number=8, name="transfer beside training", perform=alone.transfer),
    Step(number=9, name="kills", perform=runs.faults, starts_processes=True),
    Step(number=10, name="world model and robot", perform=runs.other_domains, starts_processes=True),
    Step(number=11, name="two nodes", perform=runs.two_nodes, timeout_s=1200, starts_processes=True),
    Step(number=12, name="turns on one GPU", perform=runs.in_turns, timeout_s=1500, starts_processes=True),
    Step(number=13, name="a full GPU", perform=limits.full_gpu, gpus=2, starts_processes=True),
    Step(number=14, name="weights between processes", perform=limits.between_processes, gpus=2, starts_processes=True),
    Step(number=15, name="checkpoints", perform=limits.checkpoints, gpus=2, timeout_s=1800, starts_processes=True),
    Step(number=16, name="rendering", perform=limits.rendering, starts_processes=True),
)

IMPORTS = ("transformers.modeling_utils", "cosmos_rl_llm.policy.policy", "cosmos_rl_transfer.publish.publisher")
"""Modules that check for GPUs while they are imported: imported before a rehearsal."""


def perform(step: Step, hour: Hour) -> None:
    """Perform a step. A rehearsal of one that starts no processes is on a pretend GPU."""
    if step.starts_processes or not hour.rehearsal:
        step.perform(hour)
        return
    for module in (
        "transformers.modeling_utils",
        "cosmos_rl_llm.policy.policy",
        "cosmos_rl_transfer.publish.publisher",
    ):
        import_module(module)  # before torch sees a GPU
    with pretend_cuda() as record:
        step.perform(hour)
    assert not record.mismatches, record
