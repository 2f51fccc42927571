"""Steps of the first hour at the limits of a machine: a full GPU; weights and checkpoints of real size; rendering."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from ctypes.util import find_library
from pathlib import Path
from typing import Any

from gpu_hour import GIB, Hour, Skipped
from gpu_runs import Running, shared, sums, write_large

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
    """Expect the weights of a 1.3B model (2.6 GB in bfloat16) to reach an engine's process at 20 GB/s by CUDA IPC and
    at 5 GB/s by shared memory.

    Failing: "cannot be mapped" is a container without a shared PID or IPC namespace (docker --ipc=host --pid=host); a
    shared-memory speed below 2 GB/s is pageable memory: look for "weights: pageable" and `ulimit -l`.
    """
    for transport, target in (("cuda_ipc", ">= 20"), ("shm", ">= 5"))[hour.size(0, 1) :]:
        tables = sums(hour.directory / transport, algorithm="grpo", steps=4)
        if not hour.rehearsal:
            write_large(Path(tables["model"]["path"]))
            tables["model"]["dtype"] = "bfloat16"
        tables["sync"] = {"transport": transport}
        running = Running(hour, tables)
        steps = running.finish(timeout_s=600)[1:]
        logs = (Path(tables["run"]["output_dir"]) / "logs/rollout-0.log").read_text()
        over = float(f"weights are read over {transport}" in logs)
        hour.measured(f"{transport}: read over it", over, "", ">= 1", always=True)
        pulls = [pull for pull in running.arguments("wait for weights") if pull.get("pull_s")]
        hour.note(f"{transport}: {statistics.median(pull['bytes'] for pull in pulls) / GIB:.2f} GiB")
        speed = statistics.median(pull["bytes"] / pull["pull_s"] for pull in pulls)
        hour.measured(f"{transport}: weights", speed / 1e9, "GB/s", target)
        hour.measured(f"{transport}: stall of a step", statistics.median(s["sync_stall_s"] for s in steps), "s", "<= 1")


def checkpoints(hour: Hour) -> None:
    """Expect saves of a 1.3B model with Adam (16 GB) on two GPUs to stop training for 2 s at most.

    A rank holds the copy of its half once. One GPU, and two with tp, continue from step 2 with the losses of the
    undisturbed run. Failing: a stall as long as a write is pageable memory, or a write that takes longer than the steps
    between two saves.
    """
    steps, saved = 4, 2
    tables = sums(hour.directory / "whole", algorithm="sft", steps=steps)
    tables["data"]["response_column"] = "response"
    if not hour.rehearsal:
        write_large(Path(tables["model"]["path"]))
    tables["policy"] |= {"parallel": {"dp_shard": 2}, "threads": 1}
    tables["checkpoint"] = {"every_steps": saved, "keep": 9}
    tables["run"]["output_dir"] = str(hour.directory / "dp_shard2")
    whole = Running(hour, tables)
    losses = [step["loss"] for step in whole.finish(timeout_s=900)]
    hour.measured("stall of a save", max(ended - begun for begun, ended, _ in whole.spans("save")), "s", "<= 2")
    folder = whole.directory / "checkpoints" / f"step_{saved}"
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    hour.measured("checkpoint", num_bytes / GIB, "GiB")
    hour.measured("memory of a rank", whole.resident_gib, "GiB", f"<= {num_bytes / 2 * 1.2 / GIB + 8:.1f}")
    for layout in ({"dp_shard": 1}, {"dp_shard": 1, "tp": 2}):
        name = "-".join(f"{axis}{size}" for axis, size in layout.items())
        tables["run"]["output_dir"] = str(hour.directory / name)
        tables["policy"]["parallel"] = layout
        running = Running(hour, tables, arguments=["--resume", str(folder)])
        again = [step["loss"] for step in running.finish(timeout_s=900)]
        apart = max(abs(a - b) for a, b in zip(losses[saved:], again, strict=True))
        hour.measured(f"{name}: loss beside the undisturbed run", apart, "", "<= 0.01", always=True)


FRAMES = """
import os, sys, time
from cosmos_rl_vla.sims.rendering import make_context
context = make_context(224, 224)
context.make_current()
import mujoco
model = mujoco.MjModel.from_xml_string(
    "<mujoco><worldbody><light pos='0 0 3'/><geom type='plane' size='1 1 .1'/>"
    "<body pos='0 0 .5'><freejoint/><geom type='box' size='.1 .1 .1' rgba='1 0 0 1'/></body></worldbody></mujoco>"
)
data = mujoco.MjData(model)
with mujoco.Renderer(model, 224, 224) as renderer:
    frames, begun = int(sys.argv[1]), time.perf_counter()
    for _ in range(frames):
        mujoco.mj_step(model, data)
        renderer.update_scene(data)
        picture = renderer.render()
    assert picture.std() > 0, "an empty picture"
    print(frames / (time.perf_counter() - begun))
"""


def rendering(hour: Hour) -> None:
    """Expect MuJoCo to render 224 x 224 pixels at 1,000 frames/s with EGL, faster than with OSMesa on the CPU.

    Failing: EGL at the speed of OSMesa is Mesa's own library in place of the driver's (libnvidia-egl; in a container
    NVIDIA_DRIVER_CAPABILITIES=all); "cannot create" is a driver without it.
    """
    speeds = {}
    for kind, library in (("egl", "EGL"), ("osmesa", "OSMesa")):
        if find_library(library) is None or (kind == "egl" and hour.rehearsal):
            hour.note(f"{kind}: lib{library} is not on this machine, or this is a rehearsal")
            continue
        done = subprocess.run(
            [sys.executable, "-c", FRAMES, str(hour.size(2000, 5))],
            env={**os.environ, "MUJOCO_GL": kind},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        speeds[kind] = hour.measured(f"{kind}: frames", float(done.stdout), "1/s", ">= 1000" if kind == "egl" else "")
    if not speeds:
        raise Skipped("neither EGL nor OSMesa is on this machine")
    if len(speeds) == 2:
        hour.measured("egl over osmesa", speeds["egl"] / speeds["osmesa"], "x", ">= 2")
