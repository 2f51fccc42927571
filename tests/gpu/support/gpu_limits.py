"""Steps of the first hour at the limits of a machine: a full GPU, and weights of real size between processes."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from gpu_alone import QWEN2_5_1_5B
from gpu_hour import GIB, Hour
from gpu_runs import Running, shared, sums

FULL = """
import torch
from cosmos_rl_core.testing.tiny import Tiny

class Full(Tiny):
    def collate(self, groups, *, microbatch_terms, share):
        if share.index == 1:
            if not torch.cuda.is_available():
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 TiB")
            torch.empty(1 << 46, dtype=torch.uint8, device="cuda")
        return super().collate(groups, microbatch_terms=microbatch_terms, share=share)

DOMAIN = Full()
"""


def full_gpu(hour: Hour) -> None:
    """Expect a rank that runs out of memory to end the run of two within 60 s, with its number, the part and the keys.

    Failing: a run that hangs is the other rank in a collective that was not aborted; exit code 1 is an error of
    CUDA that was not recognised as a full GPU (its text is in the log; add it to workers/failure.py).
    """
    tables: dict[str, Any] = {
        "run": {"domain": "full:DOMAIN", "name": "full", "output_dir": str(hour.directory / "full"), "max_steps": 2},
        "policy": {"prompts_per_step": 4, "threads": 1, "parallel": {"dp_shard": 2}},
        "rollout": {"engine": "tiny", "group_size": 2, "threads": 1, "sampling": {"max_tokens": 3}},
        "reward": {"functions": [{"name": "hits"}]},
        "logging": {"sinks": ["console", "jsonl"]},
    }
    (hour.directory / "full.py").write_text(FULL)
    begun = time.monotonic()
    running = Running(hour, shared(tables))
    try:
        running.wait_for(lambda: running.process.poll() is not None, timeout_s=180)
    finally:
        running.stop()
    hour.note(running.end())
    text = " ".join(running.text().split())
    hour.measured("from the command to the end", time.monotonic() - begun, "s", "<= 60")
    hour.measured("exit code", running.process.returncode, "", ">= 2", always=True)
    for part in ("policy-0, rank 1", "out of GPU memory in collating a batch", "policy.microbatch_terms"):
        hour.measured(f"the error names {part!r}", float(part in text), "", ">= 1", always=True)
    hour.measured("processes left", len(running.workers()), "", "<= 0", always=True)


def between_processes(hour: Hour) -> None:
    """Expect 3 GiB of weights from a policy's process to an engine's at 20 GB/s by CUDA IPC, 5 GB/s by shared memory.

    Failing: "cannot be mapped" is a container without a shared PID or IPC namespace (docker --ipc=host --pid=host); a
    shared-memory speed below 2 GB/s is pageable memory: look for "weights: pageable" and `ulimit -l`.
    """
    import torch

    from cosmos_rl_llm.model.causal_lm import make_model

    for transport, target in (("cuda_ipc", ">= 20"), ("shm", ">= 5"))[hour.size(0, 1) :]:
        tables = sums(hour.directory / transport, algorithm="grpo", steps=4)
        if not hour.rehearsal:
            make_model(QWEN2_5_1_5B, dtype=torch.bfloat16, seed=0).save_pretrained(tables["model"]["path"])
            tables["model"]["dtype"] = "bfloat16"
        tables["sync"] = {"transport": transport}
        running = Running(hour, tables)
        steps = running.finish(timeout_s=600)[1:]
        logs = (Path(tables["run"]["output_dir"]) / "logs/rollout-0.log").read_text()
        over = float(f"weights are read over {transport}" in logs)
        hour.measured(f"{transport}: read over it", over, "", ">= 1", always=True)
        num_bytes = sum(file.stat().st_size for file in Path(tables["model"]["path"]).glob("*.safetensors"))
        seconds = statistics.median(step["sync_s"] for step in steps)
        hour.note(f"{transport}: {num_bytes / GIB:.2f} GiB")
        hour.measured(f"{transport}: weights", num_bytes / max(seconds, 1e-9) / 1e9, "GB/s", target)
        hour.measured(f"{transport}: stall of a step", statistics.median(s["sync_stall_s"] for s in steps), "s", "<= 1")
