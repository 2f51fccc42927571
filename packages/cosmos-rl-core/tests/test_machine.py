"""Samples of processes and machines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from cosmos_rl_core.observe import machine
from cosmos_rl_core.observe.machine import machine_log
from cosmos_rl_core.observe.thinned import ThinnedLog
from cosmos_rl_core.ops.dashboard.machines import MOST_POINTS, MachineHistory
from cosmos_rl_core.processes import cpu_s, process_tree, resident_bytes

BUSY = "x = bytearray(50_000_000)\nprint('there', flush=True)\nwhile True: pass"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def child():
    """A process that works and holds 50 MB."""
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as started:
        started.stdout.readline()
        yield started.pid
        started.kill()


def test_a_process_counts_those_that_it_has_started(tmp_path, child, monkeypatch):
    monkeypatch.setattr(machine, "EVERY_S", 0.5)
    reference = cpu_s(child)
    with machine_log(tmp_path, "rollout-0"), machine_log(tmp_path, "controller", alone=True):
        while cpu_s(child) < reference + 0.2:
            time.sleep(0.01)
    [rollout, controller] = [lines(tmp_path / "system" / f"{name}.jsonl")[-1] for name in ("rollout-0", "controller")]
    assert child in process_tree(os.getpid())
    assert rollout["processes"] >= 2 and "processes" not in controller
    assert rollout["memory"] >= controller["memory"] + 50_000_000
    assert rollout["cpu"] > 0.0
    assert (rollout["process"], rollout["host"], rollout["pid"]) == ("rollout-0", socket.gethostname(), os.getpid())


def test_one_process_of_a_machine_has_its_figures_and_another_one_takes_over(tmp_path):
    (tmp_path / "system").mkdir()
    first, second = (machine._Log(tmp_path, name, alone=True) for name in ("policy-0", "rollout-0"))
    with ExitStack() as later:
        with ExitStack() as held:
            found = first._sample(held).machine
            assert second._sample(later).machine is None
            assert first._sample(held).machine is not None
        assert second._sample(later).machine is not None
    assert found.cpus == os.cpu_count()
    assert 0 < found.memory < found.memory_total and 0 < found.disk_free < found.disk_total
    assert found.cpu >= 0.0 and found.received >= 0.0 and found.sent >= 0.0


def test_network_and_processors_are_read_as_the_kernel_writes_them(tmp_path):
    table = tmp_path / "dev"
    table.write_text(
        "Inter-|   Receive                          |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls\n"
        "    lo: 900 1 0 0 0 0 0 0 900 1 0 0 0 0\n"
        "  eth0: 100 1 0 0 0 0 0 0 20 1 0 0 0 0\n"
        "  eth1:7 1 0 0 0 0 0 0 3 1 0 0 0 0\n"
    )
    assert machine.network_bytes(str(table)) == (107, 23)
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 200 300 5000 6000 400 500 600 7000 8000\ncpu0 1 1 1 1\n")
    assert machine.busy_s(str(stat)) == 2100 / os.sysconf("SC_CLK_TCK")
    assert machine.busy_s(str(tmp_path / "none")) == 0.0


def test_a_process_that_has_ended_counts_nothing():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert (cpu_s(ended.pid), resident_bytes(ended.pid)) == (0.0, 0)
    assert process_tree(ended.pid) == [ended.pid]


def test_a_removed_directory_ends_the_samples_and_not_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "EVERY_S", 0.01)
    with machine_log(tmp_path / "gone", "rollout-0"):
        for thread in [each for each in threading.enumerate() if each.name == "machine"]:  # unless it has ended
            thread.join(60)
            assert not thread.is_alive()
    assert not (tmp_path / "gone").exists()


def test_a_full_file_keeps_every_second_line_and_doubles_its_interval(tmp_path):
    log = ThinnedLog(tmp_path / "a.jsonl", every_s=5.0, most_lines=4, most_bytes=1000)
    for number in range(5):
        log.add(str(number).encode())
    assert (lines(tmp_path / "a.jsonl"), log.every_s) == ([0, 2, 4], 10.0)
    again = ThinnedLog(tmp_path / "a.jsonl", every_s=5.0, most_lines=4, most_bytes=1000)
    for number in (5, 6):
        again.add(str(number).encode())
    assert (lines(tmp_path / "a.jsonl"), again.every_s) == ([0, 4, 6], 10.0)


def test_the_dashboard_joins_the_files_of_a_machine(tmp_path):
    figures = {"cpus": 2, "memory_total": 8, "disk_free": 3, "disk_total": 4, "received": 1.0, "sent": 2.0}
    for process, first in (("policy-0", 100.0), ("rollout-0", 2100.0)):
        log = (tmp_path / f"{process}.jsonl").open("w")
        with log:
            for number in range(1000):
                row = {"time": first + number, "process": process, "host": "a", "pid": 1, "cpu": 1.0, "memory": number}
                gpu = {"index": 0, "name": "H100", "memory": number, "memory_total": 80, "busy": 0.5}
                row["machine"] = {**figures, "cpu": 0.5, "memory": number, "gpus": [gpu]}
                log.write(json.dumps(row) + "\n")
    history = MachineHistory(tmp_path).read()
    [host] = history["machines"]
    assert (host["host"], host["cpus"], host["at"][-1], host["memory"][-1]) == ("a", 2, 2999.0, 999)
    assert len(host["at"]) == len(host["gpus"][0]["busy"]) <= MOST_POINTS
    assert [(row["process"], row["largest"], row["at"][-1]) for row in history["processes"]] == [
        ("policy-0", 999, 999.0),
        ("rollout-0", 999, 2999.0),
    ]
    assert MachineHistory(tmp_path / "none").read() == {"machines": [], "processes": []}
