"""What tests of the policy server share: a policy without a network, a small one in a folder, a server in a process."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from cosmos_rl_core.wire.listening import Address, listen
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.config import VLAModelConfig
from cosmos_rl_vla.models.families import load
from cosmos_rl_vla.serving.batching import RobotBatcher
from cosmos_rl_vla.serving.observations import ObservationLayout, RobotObservation
from cosmos_rl_vla.serving.openpi import openpi_server
from cosmos_rl_vla.serving.served import ActionRequest

CACHE = Path(__file__).parents[4] / ".cache"
COMMAND = "import sys; from cosmos_rl_core.cli.app import main; main(sys.argv[1:])"


def layout(**changes: Any) -> ObservationLayout:
    """Two cameras of 4 x 6 pixels, three numbers of state, chunks of four actions of two numbers."""
    values: dict[str, Any] = {
        "cameras": ("front", "wrist"),
        "image_size": (4, 6),
        "state_keys": ("state",),
        "state_dim": 3,
        "action_dim": 2,
        "horizon": 4,
        "stats": ActionStats.unit(2),
    }
    return ObservationLayout(**values | changes)


def observation(state: Sequence[float] = (0.1, 0.2, 0.3), **changes: Any) -> dict[str, Any]:
    """As an openpi client sends it."""
    images = {f"observation/{name}": np.full((4, 6, 3), 7, np.uint8) for name in ("front", "wrist")}
    return {**images, "observation/state": np.array(state), "prompt": "open the door"} | changes


class SumPolicy:
    """Each action of a chunk is the sum of the state; a state of -1 fails. `gate` holds the passes back."""

    name = "sum"

    def __init__(self) -> None:
        self.layout = layout()
        self.batches: list[int] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def admit(self, seen: RobotObservation, *, seed: int, place: int) -> ActionRequest:
        return ActionRequest(observation=seen, state=seen.state, seed=seed, place=place)

    def act(self, requests: Sequence[ActionRequest]) -> list[np.ndarray]:
        self.entered.set()
        assert self.gate.wait(60)
        self.batches.append(len(requests))
        if any(one.state[0] == -1 for one in requests):
            raise FloatingPointError("no number")
        return [np.full((4, 2), one.state.sum(), np.float32) for one in requests]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def batching(policy: Any, *, max_batch: int = 8, lines: list[str] | None = None) -> AsyncIterator[RobotBatcher]:
    with ThreadPoolExecutor(1) as compute:
        batcher = RobotBatcher(
            policy, compute=compute, max_batch=max_batch, log=(lines if lines is not None else []).append
        )
        passes = asyncio.create_task(batcher.run())
        yield batcher
        passes.cancel()


@asynccontextmanager
async def openpi(
    policy: Any, *, token: str = "", lines: list[str] | None = None
) -> AsyncIterator[tuple[str, RobotBatcher]]:
    """Serve a policy in this process; yields the URL."""
    said = lines if lines is not None else []
    async with batching(policy, lines=said) as batcher:
        with listen(Address(host="127.0.0.1"), allow_remote=False) as listener:
            async with openpi_server(batcher, listener, token=token, say=said.append):
                yield f"ws://127.0.0.1:{listener.getsockname()[1]}", batcher


def small_policy(directory: Path, *, dims: tuple[int, int] = (2, 2)) -> Path:
    """Write a folder with an initialised pi0.5 of these dimensions of state and action."""
    words = ("reach the red green blue square",)
    sizes: dict[str, Any] = {"state_dim": dims[0], "action_dim": dims[1], "horizon": 4, "num_steps": 4}
    loaded = load(VLAModelConfig(family="pi05", stats="unit", words=words, **sizes))
    loaded.save_config(directory)
    tensors = {name: tensor.detach().contiguous() for name, tensor in loaded.weights().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class ServerProcess:
    """`cosmos-rl serve-policy` with these arguments."""

    def __init__(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-c", COMMAND, "serve-policy", *map(str, arguments), "--threads", "1"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the match of the next printed line that has one."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            if found := re.search(pattern, line):
                return found
        raise AssertionError("\n".join(["the server ended:", *self.lines]))

    def stop(self) -> tuple[int, str]:
        """Interrupt it; returns its exit code and all that it printed."""
        self._process.send_signal(signal.SIGINT)
        rest, _ = self._process.communicate(timeout=120)
        return self._process.returncode, "\n".join([*self.lines, rest])

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def served(*arguments: str | Path) -> Iterator[ServerProcess]:
    server = ServerProcess(*arguments)
    try:
        yield server
    finally:
        server.kill()


def client_python(name: str, *requirements: str) -> Path:
    """Return the interpreter of an environment with a robot's client over the packages of this one.

    It is made once, in .cache. The clients' own bounds of numpy's version are not applied. Skips where the client
    cannot be installed.
    """
    root = CACHE / name
    python, stamp = root / "bin" / "python", root / ".installed"
    if stamp.exists() and stamp.read_text() == " ".join(requirements):
        return python
    site = next(path for path in sys.path if path.endswith("site-packages"))
    folder = root / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *requirements]
    for command in ([sys.executable, "-m", "venv", str(root)], install):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{' '.join(requirements)} cannot be installed: {done.stderr.strip()[-300:]}")
    (folder / "packages_of_the_tests.pth").write_text(f"import site; site.addsitedir({site!r})\n")
    stamp.write_text(" ".join(requirements))
    return python
