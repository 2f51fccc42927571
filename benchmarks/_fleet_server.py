"""The server side of controller.py: the product's controller, and the bare wire beside it.

    python _fleet_server.py controller|bare DIRECTORY

Prints its address and serves until stdin closes.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from _fleet import MAX_STALENESS

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.journal.journal import Journal
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.state import LedgerConfig
from cosmos_rl_core.control.server import Controller, Job
from cosmos_rl_core.control.status import write_status
from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_core.wire.channel import Connection, Server, serve
from cosmos_rl_core.wire.handshake import make_token
from cosmos_rl_core.wire.listening import raise_descriptor_limit

GROUPS_PER_STEP = 400
NUM_POLICIES = 3
STATUS_S = 1.0
PROMPT = "a question of about two hundred bytes, as long as one of a dataset of mathematics: " + "so many apples, " * 7


class Silent:
    """An observer without sinks: the benchmark measures the controller, not the console."""

    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluated(self, version: int, metrics: Mapping[str, float], groups: list[RolloutGroup]) -> None: ...


async def serve_controller(directory: Path, token: bytes) -> None:
    """Serve as `cosmos-rl run` does: journal on disk, status.json every second."""
    source = PromptSource([{"prompt": f"{n}: {PROMPT}"} for n in range(1000)], origin="rows")
    job = Job(
        config_toml="# a resolved recipe\n" * 100,
        run_dir=directory,
        resume_from="",
        supervised=False,
        max_steps=None,
        eval_every_steps=0,
        eval_by=(),
        group_size=8,
        external=True,
    )
    config = LedgerConfig(
        groups_per_step=GROUPS_PER_STEP,
        max_staleness=MAX_STALENESS,
        policy_members=NUM_POLICIES,
    )
    with closing(Journal(directory / "journal")) as journal:
        controller = Controller(
            job,
            source=source,
            eval_source=None,
            ledger=Ledger(config),
            journal=journal,
            clock=time.monotonic,
            observer=Silent(),
        )

        async def keep_status() -> None:
            while True:
                write_status(directory / "status.json", controller, phase="training")
                await asyncio.sleep(STATUS_S)

        server = await serve("tcp://127.0.0.1:0", token=token, decode=p.ToController, on_connect=controller.on_connect)
        await _until_stdin_closes(server, controller.run(), keep_status())


async def serve_bare(_: Path, token: bytes) -> None:
    """Decode the same messages and grant each request at once: no ledger, no journal, no status."""
    row = b'{"prompt": "1: ' + PROMPT.encode() + b'"}'
    lease = p.LeasedPrompt(sample=0, attempt=1, deadline=MAX_STALENESS, row=row, origin="rows:1")

    async def answer(connection: Connection) -> None:
        connection.post(p.Welcome(1, 0, 0))
        numbers = itertools.count()

        def take(message: p.ToController) -> None:
            if isinstance(message, p.RequestLeases):
                connection.post(p.Grant(tuple(_numbered(lease, next(numbers)) for _ in range(message.capacity))))

        await connection.consume(take)

    await _until_stdin_closes(await serve("tcp://127.0.0.1:0", token=token, decode=p.ToController, on_connect=answer))


def _numbered(lease: p.LeasedPrompt, sample: int) -> p.LeasedPrompt:
    return p.LeasedPrompt(sample, lease.attempt, lease.deadline, lease.row, lease.origin)


async def _until_stdin_closes(server: Server, *beside) -> None:
    print(server.address, flush=True)
    tasks = [asyncio.create_task(work) for work in beside]
    end = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    done, _ = await asyncio.wait({*tasks, end}, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.close()


SERVERS = {"controller": serve_controller, "bare": serve_bare}


if __name__ == "__main__":
    raise_descriptor_limit()
    folder = Path(sys.argv[2])
    asyncio.run(SERVERS[sys.argv[1]](folder, make_token(folder / "token")))
