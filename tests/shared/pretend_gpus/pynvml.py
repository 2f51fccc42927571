"""In place of `pynvml` on a child process's import path: H100s whose UUIDs PRETEND_GPUS lists."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from doubles.fake_nvml import FakeNvml

_MACHINE = FakeNvml({uuid: () for uuid in os.environ["PRETEND_GPUS"].split(",")})


def __getattr__(name):
    return getattr(_MACHINE, name)
