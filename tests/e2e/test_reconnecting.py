"""Workers whose connection to the controller is cut go on, and return under their incarnation (row 23)."""

import contextlib
import json
import signal
import socket
import threading
import time

import pytest

from cosmos_rl_core.checkpoint.manifest import read_state
from cosmos_rl_core.control.ledger import records
from cosmos_rl_core.control.ledger.membership import MemberState
from cosmos_rl_core.launch.run import run

pytestmark = pytest.mark.ci

STEPS, PROMPTS = 24, 4


class Proxy:
    """Passes TCP connections on to an address, until it is cut."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.num_connections = 0
        self._target = target
        self._is_cut = False
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *error: object) -> None:
        self.cut(0.0)
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def cut(self, seconds: float) -> None:
        """Close all connections, and refuse new ones for some time."""
        self._is_cut = True
        for end in list(self._open):
            _shut(end)
        time.sleep(seconds)
        self._is_cut = False

    def _start(self, work, *arguments) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was shut
            while True:
                near, _ = self._listener.accept()
                if self._is_cut:
                    near.close()
                    continue
                self.num_connections += 1
                self._start(self._serve, near, socket.create_connection(self._target))

    def _serve(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            self._open |= {near, far}
            back = threading.Thread(target=_pass, args=(far, near))
            back.start()
            _pass(near, far)
            back.join()
            self._open -= {near, far}


def _pass(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other direction has ended
        while data := source.recv(2**16):
            sink.sendall(data)
    for end in (source, sink):
        _shut(end)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it ended by itself
        end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy_of():
    """A proxy of the controller of a run."""
    with contextlib.ExitStack() as proxies:

        def make(run_dir):
            host, _, port = json.loads((run_dir / "controller.json").read_text())["address"][6:].rpartition(":")
            return proxies.enter_context(Proxy((host, int(port))))

        yield make


@pytest.mark.timeout(400)
def test_a_cut_of_some_seconds_costs_nothing_and_nothing_is_done_twice(
    controller, start, wait_for, rows_of, finished, journal_of, bits_of, bandit, tmp_path, proxy_of
):
    changes = {"run__max_steps": STEPS, "sync__max_staleness": 0, "rollout__options": {"delay_s": 0.02}}
    process, run_dir, _ = controller(elastic__suspect_grace_s=60.0, **changes)
    proxies = {role: proxy_of(run_dir) for role in ("policy", "rollout")}
    workers = [
        start("worker", "--role", role, "--controller", proxy.address, "--token-file", run_dir / "token")
        for role, proxy in proxies.items()
    ]
    metrics, cuts = run_dir / "metrics.jsonl", 0
    for wanted, role in ((2, "rollout"), (6, "policy"), (10, "rollout"), (14, "policy"), (18, "both")):
        wait_for(lambda: len(rows_of(metrics)) >= wanted, f"step {wanted}")  # noqa: B023
        cut = [
            threading.Thread(target=proxy.cut, args=(1.0,)) for name, proxy in proxies.items() if role in (name, "both")
        ]
        for thread in cut:
            thread.start()
        for thread in cut:
            thread.join()
        cuts += len(cut)
    for worker in workers:
        finished(worker)
    finished(process)

    assert sum(proxy.num_connections for proxy in proxies.values()) == 2 + cuts
    assert [line["step"] for line in rows_of(metrics)] == list(range(STEPS))
    journal = journal_of(run_dir)
    # A grant that was on its way when the connection broke is returned and granted again, before anything was made.
    (spans,) = (run_dir / "spans").glob("rollout-*.jsonl")
    generated = [each["args"]["sample"] for each in rows_of(spans) if each["name"] == "generate" and "open" not in each]
    assert sorted(generated) == list(range(STEPS * PROMPTS))
    assert [record.epoch for record in journal if isinstance(record, records.Meshed)] == [1]
    assert len([r for r in journal if isinstance(r, records.Moved) and r.state is MemberState.SUSPECT]) == cuts
    delivered = [record.sample for record in journal if isinstance(record, records.Delivered)]
    assert sorted(delivered) == list(range(STEPS * PROMPTS))

    run(bandit(tmp_path / "whole", **changes, run__placement="inline"))
    assert bits_of(run_dir / "checkpoints" / f"step_{STEPS}") == bits_of(
        tmp_path / "whole/checkpoints" / f"step_{STEPS}"
    )
    assert read_state(run_dir / "checkpoints" / f"step_{STEPS}").unfinished == ()


def test_a_worker_that_was_away_for_too_long_ends_and_says_why(
    controller, start, wait_for, rows_of, finished, proxy_of
):
    process, run_dir, (policy, rollout) = controller(run__max_steps=10_000, elastic__suspect_grace_s=0.5)
    proxy = proxy_of(run_dir)
    away = start("worker", "--role", "rollout", "--controller", proxy.address, "--token-file", run_dir / "token")
    others = [start(*policy), start(*rollout)]
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 2, "two steps")
    proxy.cut(3.0)
    _, errors = finished(away, 1)
    assert "was away for too long: others have its work" in errors
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) > steps, "another step")
    process.send_signal(signal.SIGINT)
    finished(process, 130)
    for worker in others:
        finished(worker)
