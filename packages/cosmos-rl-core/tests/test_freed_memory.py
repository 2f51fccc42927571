"""A worker on the CPU keeps the memory of freed tensors; a process that only uses the package does not."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.workers.context import Assignment, WorkerContext

BLOCKS = [2**24 * n for n in (1, 3, 5, 12)]  # bytes; glibc's own limit is 32 MiB

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        for size in BLOCKS:
            torch.ones(size // 4).add(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def prepare(shares_process):
    context = WorkerContext(name="", token=b"", timeline=Timeline(""), threads=1, shares_process=shares_process)
    others = dict.fromkeys(("domain", "compute", "run_dir", "shares_run_dir", "last_step", "resume_from", "kept"))
    Assignment(context=context, config=SimpleNamespace(run=SimpleNamespace(seed=0)), **others).prepare_torch()
    return pages()

torch.set_num_threads(1)
def again():
    return min(pages() for _ in range(3))  # one block more may be needed once, as others lie in its place

print(pages(), prepare(True), prepare(False), again(), ThreadPoolExecutor(1).submit(prepare, False).result(), again())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt(3) is glibc's")
def test_a_worker_asks_the_kernel_for_memory_once():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    before, inline, _, kept, _, last = map(int, done.stdout.split())
    assert before > 5 * 2**28 // 4096, "the kernel gives larger pages: nothing is measured"
    assert inline > before // 2, "a process that runs inline keeps its memory as it was"
    assert max(kept, last) < before // 50
