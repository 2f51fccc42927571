"""The servers of controller.py: the product's controller, and two that do less, as bounds of what is possible.

    python _fleet_server.py controller|journaled|bare DIRECTORY [PORT]

Prints its address, the number of replayed records and the seconds for them; serves until stdin closes. With a port,
that of a server which was killed, it continues from the journal of that one.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from _fleet import MAX_STALENESS

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.durable import FLUSH_BURST, FLUSHES_PER_S, Pace
from cosmos_rl_core.control.journal import Journal
from cosmos_rl_core.control.ledger import records
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.state import LedgerConfig
from cosmos_rl_core.control.lifecycle import Predecessor
from cosmos_rl_core.control.server import Controller
from cosmos_rl_core.control.settings import ControllerSettings
from cosmos_rl_core.control.status import status_of
from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.launch.interrupts import run_to_end
from cosmos_rl_core.observe.record import Events
from cosmos_rl_core.observe.reporting import Reporter
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_core.wire.channel import ChannelServer, Connection, serve
from cosmos_rl_core.wire.handshake import make_token, read_token
from cosmos_rl_core.wire.listening import raise_descriptor_limit

GROUPS_PER_STEP = 400
NUM_POLICIES = 3
PROMPT = "a question of about two hundred bytes, as long as one of a dataset of mathematics: " + "so many apples, " * 7


class Silent:
    """An observer without sinks: the benchmark measures the controller, not the console."""

    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluated(self, version: int, metrics: Mapping[str, float], groups: list[RolloutGroup]) -> None: ...

    def rolled_back(self, version: int) -> None: ...


RETURN_S = 10.0
"""Time for workers to return after a restart, as of `cosmos-rl controller`."""


async def serve_controller(directory: Path, token: bytes, port: int) -> None:
    """Serve as `cosmos-rl controller` does: journal on disk, status.json every second. port: of the dead one, or 0."""
    source = PromptSource([{"prompt": f"{n}: {PROMPT}"} for n in range(1000)], origin="rows")
    job = ControllerSettings(
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
        restart_grace_s=RETURN_S,
    )
    with closing(Journal(directory / "journal")) as journal:
        began = time.perf_counter()
        ledger = Ledger.restore(config, journal.snapshot, journal.replay())
        replay = journal.num_records, time.perf_counter() - began
        controller = Controller(
            job,
            source=source,
            eval_source=None,
            ledger=ledger,
            journal=journal,
            clock=time.monotonic,
            observer=Silent(),
        )

        reporter = Reporter(
            directory,
            status=lambda phase: status_of(controller, phase=phase),
            phase=lambda: "training",
            events=Events(directory),
            checks=(),
            is_taken_over=lambda: controller.outcome.is_taken_over,
            note=Silent().note,
            starting=lambda _: None,
        )
        if port:
            controller.recovery.succeed(Predecessor(generation=ledger.generation + 1, step=-1, evaluated=-1))
        address = f"tcp://127.0.0.1:{port}"
        server = await serve(address, token=token, decode=p.ToController, on_connect=controller.on_connect)
        await _until_stdin_closes(server, controller.run(), reporter.run(), replay=replay)


async def serve_bare(_: Path, token: bytes, port: int) -> None:
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

    address = f"tcp://127.0.0.1:{port}"
    await _until_stdin_closes(await serve(address, token=token, decode=p.ToController, on_connect=answer))


async def serve_journaled(directory: Path, token: bytes, port: int) -> None:
    """The same with a journal: a grant is sent when its record, and all deliveries before it, are on disk.

    At most as many flushes a second as of the controller.
    """
    row = b'{"prompt": "1: ' + PROMPT.encode() + b'"}'
    lease = p.LeasedPrompt(sample=0, attempt=1, deadline=MAX_STALENESS, row=row, origin="rows:1")
    numbers = itertools.count()
    waiting: list[tuple[Connection, p.Grant]] = []
    work, pace = asyncio.Event(), Pace(FLUSHES_PER_S, burst=FLUSH_BURST)

    with closing(Journal(directory / "journal")) as journal:

        async def answer(connection: Connection) -> None:
            connection.post(p.Welcome(1, 0, 0))
            name = connection.peer.name

            def take(message: p.ToController) -> None:
                if isinstance(message, p.RequestLeases):
                    leases = tuple(_numbered(lease, next(numbers)) for _ in range(message.capacity))
                    for each in leases:
                        journal.append(records.Leased(each.sample, name, each.attempt, each.deadline))
                    waiting.append((connection, p.Grant(leases)))
                    work.set()
                elif isinstance(message, p.Deliver):
                    journal.append(records.Delivered(message.sample, name, 0, 0, 0, message.num_terms))

            await connection.consume(take)

        async def flush() -> None:
            while True:
                await work.wait()
                await pace.wait()
                work.clear()
                granted, waiting[:] = list(waiting), []
                await journal.flush()
                for connection, grant in granted:
                    connection.post(grant)

        address = f"tcp://127.0.0.1:{port}"
        server = await serve(address, token=token, decode=p.ToController, on_connect=answer)
        await _until_stdin_closes(server, flush())


def _numbered(lease: p.LeasedPrompt, sample: int) -> p.LeasedPrompt:
    return p.LeasedPrompt(sample, lease.attempt, lease.deadline, lease.row, lease.origin)


async def _until_stdin_closes(server: ChannelServer, *beside, replay: tuple[int, float] = (0, 1.0)) -> None:
    print(server.address, *replay, flush=True)
    tasks = [asyncio.create_task(work) for work in beside]
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def watch() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=watch, daemon=True).start()  # a failed server ends at once
    end = asyncio.create_task(over.wait())
    done, _ = await asyncio.wait({*tasks, end}, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.close()


SERVERS = {"controller": serve_controller, "journaled": serve_journaled, "bare": serve_bare}


if __name__ == "__main__":
    raise_descriptor_limit()
    folder, former = Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
    secret = read_token(folder / "token") if former else make_token(folder / "token")
    run_to_end(SERVERS[sys.argv[1]](folder, secret, former))
