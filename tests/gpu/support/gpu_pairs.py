"""Steps of the first hour with two processes on one GPU: weights by CUDA IPC, and policies of which one is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpu_hour import Hour
from gpu_reader import TOKEN, numbered
from gpu_runs import Running, shared, sums

OWN_HOST = """
import os

os.environ["NCCL_HOSTID"] = str(os.getpid())

from cosmos_rl_llm.domain import LLM as DOMAIN
"""
"""A domain whose workers are hosts of their own to NCCL, which refuses two ranks of one host on one GPU ("Duplicate GPU
detected"). It then connects them by sockets. NCCL 2.30 has NCCL_MULTI_RANK_GPU_ENABLE, torch 2.13 has NCCL 2.29."""


def on_one_card(hour: Hour) -> None:
    """Expect 2 GiB to reach another process on the same GPU with every bit: at 50 GB/s by CUDA IPC, 5 GB/s by shared
    memory, and CUDA IPC faster.

    Failing: "cannot be mapped" is a container without a shared PID or IPC namespace (docker --ipc=host --pid=host), or
    a driver under WSL2; a shared-memory speed below 2 GB/s is pageable memory: `ulimit -l`.
    """
    speeds = {}
    for transport, target in (("cuda_ipc", ">= 50"), ("shm", ">= 5"))[hour.size(0, 1) :]:
        reads = asyncio.run(_reads(hour, transport))
        hour.measured(
            f"{transport}: versions equal to the bit", sum(read["equal"] for read in reads), "", ">= 3", always=True
        )
        hour.measured(f"{transport}: buckets sent again", sum(r["repaired"] for r in reads), "", "<= 0", always=True)
        speed = statistics.median(read["bytes"] / read["seconds"] for read in reads[1:]) / 1e9
        speeds[transport] = hour.measured(f"{transport}: weights", speed, "GB/s", target)
    if len(speeds) == 2:
        hour.measured("CUDA IPC over shared memory", speeds["cuda_ipc"] / speeds["shm"], "x", ">= 1")


async def _reads(hour: Hour, transport: str) -> list[dict[str, Any]]:
    """Publish three versions to a process of its own; the lines that it prints."""
    from cosmos_rl_core.parallel.device import own_device
    from cosmos_rl_core.weight_sync import SyncSection
    from cosmos_rl_transfer import Publisher

    num, size, versions, device = *hour.size((32, 1 << 25), (4, 1 << 10)), 3, own_device()
    trained = numbered(0, num=num, size=size, device=device)
    publisher = Publisher(trained, token=TOKEN, settings=SyncSection.model_validate({"transport": transport}))
    hour.note(f"weights: {publisher.path}")
    command = [str(Path(__file__).with_name("gpu_reader.py")), publisher.address, transport]
    reader = await asyncio.create_subprocess_exec(
        sys.executable, *command, *map(str, (num, size, versions)), stdout=asyncio.subprocess.PIPE
    )
    assert reader.stdout is not None
    reads = []
    try:
        for version in range(1, versions + 1):
            await publisher.fence()
            for name, tensor in numbered(version, num=num, size=size, device=device).items():
                trained[name].copy_(tensor)
            await publisher.publish(version, trained)
            line = await asyncio.wait_for(reader.stdout.readline(), timeout=120)
            assert line, f"the process that reads ended with {await reader.wait()}"
            reads.append(json.loads(line))
        assert await asyncio.wait_for(reader.wait(), timeout=60) == 0
    finally:
        if reader.returncode is None:
            reader.kill()
            await reader.wait()
        await publisher.close()
    return reads


def one_of_two_policies(hour: Hour) -> None:
    """Expect the survivor of two policies to commit a step alone within 10 s of the kill of the other, after NCCL's
    group was aborted, and the killed one to start again and train with it within 120 s.

    On one GPU each policy is a host of its own to NCCL, and the sums go over sockets. Failing: no commit is an abort
    that waits for NCCL (py-spy dump the survivor: `_give_up`); the survivor ends too where the watchdog of torch ends
    its process; "connect" in its log after the kill is a store that the group still polls.
    """
    tables = shared(sums(hour.directory, algorithm="grpo", steps=100_000))
    tables["policy"] |= {"replicas": 2, "threads": 1}
    tables["rollout"]["threads"] = 1
    if not hour.rehearsal and torch.cuda.device_count() == 1:
        (hour.directory / "own_host.py").write_text(OWN_HOST)
        tables["run"]["domain"] = "own_host:DOMAIN"
    hour.note(f"sums over the policies: {'gloo' if hour.rehearsal else 'NCCL'}, domain {tables['run']['domain']}")
    both, alone = ("policy-0", "policy-1"), ("policy-0",)
    running = Running(hour, tables)

    def commits(voters: tuple[str, ...]) -> int:
        return votes(running.directory).count(voters)

    try:
        running.wait_for(lambda: commits(both) >= 2, timeout_s=180)
        hour.measured("steps of both", commits(both), "", ">= 2", always=True)
        before, killed = commits(alone), time.monotonic()
        os.kill(running.pid_of("policy-1"), signal.SIGKILL)
        running.wait_for(lambda: commits(alone) > before, timeout_s=60)
        hour.measured("commits of the survivor alone", commits(alone) - before, "", ">= 1", always=True)
        hour.measured("from the kill to its commit", time.monotonic() - killed, "s", "<= 10")
        before = commits(both)
        running.wait_for(lambda: commits(both) > before, timeout_s=180)
        hour.measured("commits of both after it", commits(both) - before, "", ">= 1", always=True)
        hour.measured("from the kill to a commit of both", time.monotonic() - killed, "s", "<= 120")
        hour.measured("the run goes on", float(running.process.poll() is None), "", ">= 1", always=True)
    finally:
        running.stop()


def votes(run_dir: Path) -> list[tuple[str, ...]]:
    """The replicas that committed each step, from the journal of a live run."""
    import msgspec

    from cosmos_rl_core.control.journal import read_segment, segment_firsts, segment_path
    from cosmos_rl_core.control.ledger import records

    folder = run_dir / "journal"
    firsts = segment_firsts(folder) if folder.exists() else []
    decoder, committed = msgspec.msgpack.Decoder(records.AnyRecord), []
    for first in firsts:
        for body, _ in read_segment(segment_path(folder, first), first=first, is_last=first == firsts[-1]):
            record = decoder.decode(body)
            if isinstance(record, records.Commit):
                committed.append(tuple(sorted(record.voters)))
    return committed
