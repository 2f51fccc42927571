"""`cosmos-rl doctor RUN`: the wait-for graph, and the fifteen symptoms that users of such frameworks report most.

Each symptom is a run directory as the product's own writers leave it; two are also whole runs (marked ci).
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing

import msgspec
import pytest
from run_files import Clock, group, tool_group

from cosmos_rl_core import run
from cosmos_rl_core.cli import app
from cosmos_rl_core.control import protocol as m
from cosmos_rl_core.control.address_file import ControllerFile
from cosmos_rl_core.control.evaluation import Evaluation
from cosmos_rl_core.control.ledger import events
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.state import LedgerConfig
from cosmos_rl_core.errors import OutOfMemory, UserError
from cosmos_rl_core.gpus import Gpu
from cosmos_rl_core.observe.machine import MachineMetrics, MachineSample
from cosmos_rl_core.observe.record import Events, RecordedOutcome, record_outcome, record_start
from cosmos_rl_core.observe.rollouts import write_rollouts
from cosmos_rl_core.observe.sinks import JsonLines
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.ops.doctor import stacks
from cosmos_rl_core.ops.doctor.limits import GIB
from cosmos_rl_core.ops.doctor.run import examine_run
from cosmos_rl_core.ops.doctor.stacks import InspectedProcess, busy_threads, stacks_of, worker_processes
from cosmos_rl_core.ops.doctor.waits import RUN, WEIGHTS, Wait, chain, waits_of
from cosmos_rl_core.processes import ProcessName
from cosmos_rl_core.wire.listening import Address, listen

RECIPE = """[run]
domain = "{domain}"
[reward]
timeout_s = 60.0
[sync]
max_staleness = 1
timeout_s = 120.0
[policy]
collective_timeout_s = 600.0
[elastic]
stall_s = 1800.0
"""


def member(name, state="ready", *, age_s=0.5, since_s=100.0, version=41):
    role = name.partition("-")[0]
    return {"name": name, "role": role, "state": state, "age_s": age_s, "since_s": since_s, "version": version}


def status(*waits, members=("policy-0", "rollout-0", "rollout-1"), **fields):
    listed = [member(each) if isinstance(each, str) else each for each in members]
    fixed = {"phase": "training", "step": 41, "version": 41, "mesh": ["policy-0"], "wanted": {}, "samples": {}}
    return {"time": time.time(), **fixed, "members": listed, "waits": list(waits), **fields}


# -- the wait-for graph


def edges(*waits, **fields):
    return [(wait.waiter, wait.awaited) for wait in waits_of(status(*waits, **fields))]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("policy-0 waits for batch 41: 5 of 8 groups ready, 3 leased to rollout-1", [("policy-0", "rollout-1")]),
        (
            "policy-0 waits for batch 4: 0 of 8 groups ready, 3 leased to rollout-0, 5 leased to rollout-1",
            [("policy-0", "rollout-0"), ("policy-0", "rollout-1")],
        ),
        (
            "policy-0 waits for batch 4: 0 of 8 groups ready, 8 to be leased again",
            [("policy-0", "rollout-0"), ("policy-0", "rollout-1")],
        ),
        (
            "policy-0 waits for the votes of policy-1, policy-2 on step 0",
            [("policy-0", "policy-1"), ("policy-0", "policy-2")],
        ),
        ("rollout-0 waits for leases: every group the run needs is generated", [("rollout-0", "policy-0")]),
        ("rollout-0 waits for leases: its weights, version 0, are too old for step 5", [("rollout-0", WEIGHTS)]),
        ("rollout-0 waits for weights: it loads them", [("rollout-0", WEIGHTS)]),
        ("rollout-0 waits for weights of version 3: version 3 is evaluated", [("rollout-0", WEIGHTS)]),
        ("rollout-0 waits for weights: no policy is ready", [("rollout-0", "policy")]),
        ("the run waits for rollout-1 to reconnect: silent", [(RUN, "rollout-1")]),
        ("the run waits for policy replicas: 0 of 1 ready", [(RUN, "policy")]),
        ("policy-1 waits for the end of step 4, to join the mesh", [("policy-1", "policy-0")]),
        ("rollout-0 leaves: its groups are finished and read first", []),
    ],
)  # fmt: skip
def test_a_line_of_the_status_is_an_edge(line, expected):
    assert edges(line) == expected


def test_the_lines_of_the_real_ledger_are_edges():
    """A changed sentence of the ledger fails here."""
    ledger, now = Ledger(LedgerConfig(groups_per_step=2, max_staleness=0)), 0.0

    def on(event):
        return ledger.on(now, event)

    found = set()
    for name in ("policy-0", "rollout-0"):
        on(events.Join(name, name.partition("-")[0]))
        found.update(ledger.waits())
    incarnations = {name: ledger.members.by_name[name].incarnation for name in ("policy-0", "rollout-0")}

    def send(name, message):
        on(events.From(name, incarnations[name], message))
        found.update(ledger.waits())

    send("policy-0", m.Ready())
    send("rollout-0", m.Ready())
    send("rollout-0", m.RequestLeases(0, 8, 0))
    send("policy-0", m.RequestBatch(0, ledger.members.epoch))
    send("rollout-0", m.RequestLeases(0, 8, 0))
    on(events.Disconnected("rollout-0", incarnations["rollout-0"]))
    found.update(ledger.waits())
    assert len(found) >= 4, found
    for line in found:
        assert edges(line), line
    assert edges(Evaluation(version=3, rows=10).progress) == [(RUN, "rollout-0"), (RUN, "rollout-1")]


def leaf(*waits, stopped=(), **fields):
    found = status(*waits, **fields)
    steps = chain(waits_of(found), found["members"], stopped=stopped)
    return [steps[0].waiter, *(step.awaited for step in steps)] if steps else []


def test_the_chain_ends_at_the_process_that_works():
    assert leaf("policy-0 waits for batch 41: 5 of 8 groups ready, 3 leased to rollout-1") == ["policy-0", "rollout-1"]
    held = "rollout-0 waits for leases: the staleness window has no room for its weights, version 41: 16 of 16"
    assert leaf(held) == ["rollout-0", "policy-0"]
    assert leaf("policy-0 waits for batch 41: 5 of 8 groups ready, 3 leased to rollout-0", held) == [
        "policy-0",
        "rollout-0",
    ]
    assert leaf() == []


def test_the_chain_goes_through_a_rollout_without_weights():
    waits = ("policy-0 waits for batch 0: 0 of 8 groups ready", "rollout-0 waits for weights: it loads them")
    assert leaf(*waits, members=("policy-0", "rollout-0")) == ["policy-0", "rollout-0", WEIGHTS]


def test_of_two_holders_the_one_without_heartbeats_is_followed():
    line = "policy-0 waits for batch 4: 0 of 8 groups ready, 3 leased to rollout-0, 5 leased to rollout-1"
    assert leaf(line, members=("policy-0", "rollout-0", member("rollout-1", age_s=40.0)))[-1] == "rollout-1"
    assert leaf(line, members=("policy-0", member("rollout-0", "suspect"), member("rollout-1", age_s=40.0)))[-1] == (
        "rollout-0"
    )


def test_the_chain_ends_at_a_process_that_does_not_run():
    """A policy stopped between the commit and the publication of its weights is named, not the weights."""
    behind = ["rollout-0 waits for leases: its weights, version 5, are too old for step 7"]
    assert leaf(*behind, members=("policy-0", "rollout-0")) == ["rollout-0", WEIGHTS]
    assert leaf(*behind, members=("policy-0", "rollout-0"), stopped=("policy-0",)) == ["rollout-0", WEIGHTS, "policy-0"]
    waits = ("policy-0 waits for batch 0: 0 of 8 groups ready", "rollout-0 waits for weights: it loads them")
    assert leaf(*waits, members=("policy-0", "rollout-0"), stopped=("rollout-0",)) == ["policy-0", "rollout-0"]
    assert leaf(*behind, members=("policy-0", "rollout-0"), stopped=("rollout-0",)) == []


def test_two_that_wait_for_each_other_end_the_chain():
    found = chain([Wait("a", "b", ""), Wait("b", "a", "")], [])
    assert [wait.awaited for wait in found] == ["b"]


# -- run directories


class Written:
    """A run directory by the product's writers; live as long as this process."""

    def __init__(self, path, *, domain="llm", parent="", ago_s=3600.0):
        self.path = path
        (path / "logs").mkdir(parents=True)
        recipe = RECIPE.format(domain=domain)
        (path / "resolved.toml").write_text(recipe)
        record_start(path, recipe=recipe, parent=parent, takes_over=False)
        (path / "run.lock").write_text(f"{ProcessName.of_this_process().text}\n")
        self.clock = Clock(time.time() - ago_s)
        self.timelines = {}

    def status(self, *waits, **fields):
        (self.path / "status.json").write_text(json.dumps(status(*waits, **fields)))
        return self

    def spans(self, process, name, *seconds, track="", **args):
        """Closed spans of these seconds."""
        for each in seconds:
            with self._timeline(process).span(name, track=track, **args):
                self.clock.now += each
        return self

    def opens(self, process, name, *, since_s, **args):
        """A span that is open since so many seconds."""
        self.clock.now = time.time() - since_s
        self._timeline(process).span(name, **args).__enter__()
        return self

    def _timeline(self, process):
        return self.timelines.setdefault(process, Timeline(process, clock=self.clock, wall=self.clock))

    def metrics(self, *rows, count=12, **values):
        sink = JsonLines(self.path / "metrics.jsonl")
        for step, row in enumerate(rows or [values] * count):
            sink.log(step, {"step": step, "policy_version": step + 1, "time_s": 1.0 * step, **values, **row})
        sink.close()
        return self

    def ends(self, state="failed", **fields):
        record_outcome(self.path, RecordedOutcome(state=state, step=41, ended=time.time(), **fields))
        return self.status(phase="failed" if state == "failed" else "finished")

    def examine(self):
        self.clock.now = time.time()
        for name, timeline in self.timelines.items():
            timeline.stream(self.path / "spans" / f"{name}.jsonl")
            timeline.close()
        return examine_run(self.path)


@pytest.fixture
def written(tmp_path):
    return Written(tmp_path / "run")


def line(diagnosis, name):
    found = [check for check in diagnosis.checks if check.name == name]
    assert found, diagnosis
    return found[0]


LEASED = "policy-0 waits for batch 41: 5 of 8 groups ready, 3 leased to rollout-1"


def test_01_a_reward_that_hangs(written):
    written.status(LEASED).spans("rollout-1", "score", 0.4, 0.3, 0.5).opens("rollout-1", "score", since_s=312, sample=7)
    found = written.examine()
    assert found.waits == (LEASED,)
    verdict = line(found, "waits")
    assert verdict.level == "bad"
    assert (
        verdict.text == "rollout-1 scores rollouts with the rewards since 5 min 12 s, sample 7; usual: 0.4 s: it hangs"
    )
    assert "[reward] timeout_s = 60.0" in verdict.fix
    assert found.checks[0] == verdict


def test_01_work_of_the_usual_length_is_no_trouble(written):
    written.status(LEASED).spans("rollout-1", "score", 100.0, 110.0).opens("rollout-1", "score", since_s=90)
    verdict = line(written.examine(), "waits")
    assert (verdict.level, "usual: 1 min 45 s" in verdict.text) == ("ok", True)


def test_01_a_wait_for_weights_beside_the_work_is_no_reason(written):
    written.spans("rollout-1", "wait for weights", 0.2).spans("rollout-1", "score", 0.4)
    written.status(LEASED).opens("rollout-1", "wait for weights", since_s=400)
    found = written.opens("rollout-1", "score", since_s=312, sample=7).examine()
    assert "rollout-1 scores rollouts with the rewards since 5 min 12 s" in line(found, "waits").text
    assert all(check.name != "stalled" for check in found.checks)


def test_01_a_span_of_an_earlier_process_is_left_out(written):
    written.status(LEASED).opens("rollout-1", "score", since_s=900).clock.now += 1.0
    written.spans("rollout-1", "build", 3.0)
    assert line(written.examine(), "waits").text == "rollout-1 works; nothing in it takes longer than a second"


@pytest.mark.parametrize(
    "message",
    [
        "policy-0, rank 1: RuntimeError: Timed out waiting 600000ms for recv operation to complete",
        "policy-0: DistBackendError: [PG ID 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=14)",
    ],
)
def test_02_a_collective_that_times_out(written, message):
    found = line(written.ends(message=message, worker="policy-0").examine(), "cause")
    assert "a rank did not reach the collective" in found.text
    assert "collective_timeout_s" in found.fix


def test_02_the_rank_that_is_not_in_the_collective(written):
    waits = "rollout-0 waits for leases: the staleness window has no room for its weights, version 41: 16 of 16 groups"
    written.status(waits, members=("policy-0", "rollout-0"))
    for rank in ("policy-0 rank 0", "policy-0 rank 1", "policy-0 rank 2"):
        written.clock.now = time.time() - 1000
        written.spans(rank, "forward_backward", 9.0, 9.5)
    for rank in ("policy-0 rank 0", "policy-0 rank 2"):
        written.opens(rank, "forward_backward", since_s=400, step=41)
    found = line(written.examine(), "waits")
    assert found.level == "bad"
    assert "is in the forward and backward pass since 6 min 40 s, step 41; usual: 9.2 s" in found.text
    assert "not in it: policy-0 rank 1 (in no span since 16 min" in found.text


def test_02_a_stopped_rank_is_named_and_shown_where_no_process_waits(written, monkeypatch):
    ranks = [InspectedProcess(pid=10**9 + n, worker=name, rank=rank, state=state, writes_stacks=False)
             for n, (name, rank, state) in enumerate((("rollout-0", "", "S"), ("policy-0", "1", "T")))]  # fmt: skip
    monkeypatch.setattr("cosmos_rl_core.ops.doctor.run.worker_processes", lambda run_dir: ranks)
    found = examine_run(written.status(members=("policy-0", "rollout-0")).path, stacks=True)
    assert line(found, "waits").text == f"policy-0 does not run: rank 1, process {ranks[1].pid} is stopped (SIGSTOP)"
    assert "rollout-0" not in found.stacks
    assert f"rank 1, process {ranks[1].pid}: no stacks, as it is stopped" in found.stacks


def test_03_weights_that_do_not_arrive(written):
    waits = ("policy-0 waits for batch 41: 0 of 8 groups ready, 8 leased to rollout-0", LOADS)
    written.status(*waits, members=("policy-0", member("rollout-0", version=-1)))
    written.opens("rollout-0", "wait for weights", since_s=200, source="tcp://10.0.0.1:4000")
    found = line(written.examine(), "waits")
    assert found.level == "bad"
    assert (
        "rollout-0 has no weights, the run is at 41; it waits for those of tcp://10.0.0.1:4000 since 3 min"
        in found.text
    )
    assert "[sync] timeout_s = 120.0" in found.fix


def test_03_the_port_of_the_weights_is_tried_from_this_machine(written):
    with closing(listen(Address(host="127.0.0.1"), allow_remote=False)) as listener:
        port = listener.getsockname()[1]
        with closing(socket.socket()) as bound:  # a port at which nothing listens, and nothing else will
            bound.bind(("127.0.0.1", 0))
            closed = bound.getsockname()[1]
            policy = {**member("policy-0"), "weights_at": f"127.0.0.1:{port},127.0.0.1:{closed},/a/folder"}
            written.status(members=(policy, "rollout-0"))
            found = [check for check in written.examine().checks if check.name == "weight port"]
            assert {(check.level, check.text) for check in found} == {
                ("ok", f"policy-0: 127.0.0.1:{port} accepts connections of this machine"),
                ("note", f"policy-0: 127.0.0.1:{closed}: connection refused"),
            }
            written.status(LOADS, members=(policy, member("rollout-0", version=-1)))
            found = [check for check in written.examine().checks if check.name == "weight port"]
            assert [check.level for check in found] == ["bad", "ok"]  # a rollout waits for them
            assert "firewall" in found[0].fix


LOADS = "rollout-0 waits for weights: it loads them"


def test_04_an_engine_that_stays_at_version_0(written):
    written.status(members=("policy-0", member("rollout-0", version=0)), version=1200, step=1200)
    found = line(written.examine(), "weights")
    assert found.level == "bad"
    assert "rollout-0 has weights of version 0, the policy those of 1200" in found.text


def test_04_an_engine_within_the_staleness_is_no_trouble(written):
    written.status(members=("policy-0", member("rollout-0", version=40)))
    assert all(check.name != "weights" for check in written.examine().checks)


def test_05_a_port_that_another_process_holds(written):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = Address(host="127.0.0.1", port=holder.getsockname()[1])
        with pytest.raises(UserError) as refused:
            listen(address, allow_remote=False)
        written.ends(message=str(refused.value))
        found = line(written.examine(), "port")
        assert found.level == "bad"
        assert f"process {os.getpid()} " in found.text
    assert line(written.examine(), "port").level == "note"


def test_06_a_timeout_that_is_nearly_reached(written):
    written.status().spans("rollout-0", "switch weights", 20.0, 97.2, track="weights")
    found = line(written.examine(), "timeout")
    assert "took 97.2 s: 81% of [sync] timeout_s" in found.text
    assert found.fix == "sync.timeout_s = 120: a larger one"


def test_07_out_of_memory(written):
    error = OutOfMemory("policy-0: out of GPU memory in the forward and backward pass: tried 2 GiB", role="policy")
    found = line(written.ends(message=str(error), worker="policy-0").examine(), "cause")
    assert "policy.microbatch_terms" in found.fix


def test_07_a_worker_that_the_kernel_killed(written):
    Events(written.path).add("note", "rollout-0 died (signal SIGKILL); starting it again. The end of its log: ...")
    found = line(written.status().examine(), "cause")
    assert (found.level, "memory" in found.text) == ("note", True)


def test_07_memory_and_disk_that_are_nearly_full(written):
    gpu = Gpu(index=0, name="H100", memory=79 * GIB, memory_total=80 * GIB)
    machine = MachineMetrics(
        cpus=8,
        cpu=1.0,
        memory=97 * GIB,
        memory_total=100 * GIB,
        disk_free=GIB // 2,
        disk_total=GIB,
        received=0.0,
        sent=0.0,
        gpus=(gpu,),
    )
    sample = MachineSample(
        time=1.0, process="rollout-0", host="node-3", pid=1, cpu=1.0, memory=60 * GIB, machine=machine
    )
    (written.path / "system").mkdir()
    (written.path / "system" / "rollout-0.jsonl").write_bytes(msgspec.json.encode(sample) + b"\n")
    found = written.ends(message="rollout-0 died (signal SIGKILL)").examine()
    assert "killed it, mostly because the machine" in line(found, "cause").text
    assert line(found, "memory").text == "node-3 uses 97.0 of 100.0 GiB; the largest: rollout-0 60.0 GiB"
    assert line(found, "disk").text == "node-3 has 0.5 GiB free where the run's directory is"
    assert any(check.text == "GPU 0 of node-3 uses 79.0 of 80.0 GiB" for check in found.checks)


def test_08_workers_that_do_not_connect(written):
    start = json.loads((written.path / "run.json").read_text())
    (written.path / "run.json").write_text(json.dumps({**start, "started": time.time() - 900}))
    waits = "the run waits for policy replicas: 0 of 1 ready"
    written.status(waits, members=(), mesh=[], wanted={"policy": 1, "rollout": 2}, phase="starting", version=0)
    found = line(written.examine(), "waits")
    assert found.level == "bad"
    assert found.text == "no policy worker has connected, 1 wanted, 15 min 00 s after the start"


def test_08_a_worker_that_still_builds(written):
    waits = "the run waits for policy replicas: 0 of 1 ready"
    written.status(waits, members=(member("policy-0", "joining", version=-1),), mesh=[], phase="starting")
    found = line(written.opens("policy-0", "build", since_s=200).examine(), "waits")
    assert "policy-0 builds its part of the run since 3 min 20 s" in found.text
    assert "logs/policy-0.log" in found.fix


def test_08_the_phase_of_a_start(written):
    waits = "the run waits for policy replicas: 0 of 1 ready"
    starting = member("policy-0", "joining", version=-1) | {
        "phase": "reading weights",
        "phase_s": 95.0,
        "started": {"importing": 6.25},
    }
    written.status(waits, members=(starting,), mesh=[], phase="starting").opens("policy-0", "build", since_s=100)
    found = line(written.examine(), "waits")
    text = "policy-0 starts: reading weights since 1 min 35 s; before that 6.2 s: importing 6.2 s"
    assert (found.level, found.text) == ("note", text)


def test_09_a_full_staleness_window_means_that_the_policy_is_the_bottleneck(written):
    waits = "rollout-0 waits for leases: the staleness window has no room for its weights, version 41: 16 of 16 groups"
    written.status(waits, members=("policy-0", "rollout-0"))
    written.spans("policy-0", "forward_backward", 9.0, 9.5).opens("policy-0", "forward_backward", since_s=8, step=41)
    written.opens("rollout-0", "wait for leases", since_s=8)
    found = line(written.metrics(reward_mean=0.5).examine(), "waits")
    assert found.level == "ok"
    assert "policy-0 is in the forward and backward pass since 8" in found.text
    assert any("training is the bottleneck" in check.text for check in written.examine().checks)


AGENT = '\n[environment]\nname = "games:Guess"\ntimeout_s = 20.0\n'


def test_an_environment_that_everything_waits_for_is_named_with_its_slowest_tool(written):
    recipe = written.path / "resolved.toml"
    recipe.write_text(recipe.read_text() + AGENT)
    written.metrics(reward_mean=0.5, episode_environment_s=4.5, episode_model_s=0.3).status()
    write_rollouts(written.path / "rollouts", step=11, groups=[tool_group(0)])
    found = line(written.examine(), "environment")
    assert found.text == (
        "an episode waits 4.5 s for the environment 'games:Guess' and 0.3 s for the model; "
        "the slowest tool is 'calculator', 1.5 s an answer"
    )
    assert "environment.max_episodes" in found.fix


@pytest.mark.parametrize("seconds", [(0.5, 0.01), (4.0, 3.0)], ids=["quick", "as slow as the model"])
def test_an_environment_that_is_no_bottleneck_is_not_named(written, seconds):
    environment_s, model_s = seconds
    written.metrics(reward_mean=0.5, episode_environment_s=environment_s, episode_model_s=model_s).status()
    assert [check for check in written.examine().checks if check.name == "environment"] == []


def test_a_replica_that_generates_episodes_names_the_environment_and_its_limit(written):
    recipe = written.path / "resolved.toml"
    recipe.write_text(recipe.read_text() + AGENT)
    written.status(LEASED).spans("rollout-1", "generate", 0.4).opens("rollout-1", "generate", since_s=312, sample=7)
    verdict = line(written.examine(), "waits")
    assert "generates episodes with the environment 'games:Guess' since 5 min 12 s" in verdict.text
    assert "the code of 'games:Guess'" in verdict.fix and "[environment] timeout_s = 20.0" in verdict.fix


def test_10_rewards_that_are_always_0(written):
    values = {"zero_variance_fraction": 1.0, "reward_std": 0.0, "reward_mean": 0.0}
    written.metrics(**values, **{"reward/format": 0.0, "reward/length": 0.5}).status()
    write_rollouts(written.path / "rollouts", step=11, groups=[group(n, right=0.0) for n in range(3)])
    found = line(written.examine(), "reward")
    assert found.level == "bad"
    assert "100% of the groups have equal rewards; 'format' gave 0 to every rollout" in found.text
    assert "Answers: '<b>0</b>'" in found.text


def test_10_weights_that_diverged_are_named_and_no_format(written):
    first = {"reward_mean": 0.6, "zero_variance_fraction": 0.1, "reward_std": 0.3, "grad_norm": 1.0}
    rest = {"reward_mean": 0.0, "zero_variance_fraction": 1.0, "reward_std": 0.0, "grad_norm": 500.0}
    (written.path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, **(first if step < 2 else rest)}) + "\n" for step in range(14))
    )
    found = written.status().examine()
    assert [check.name for check in found.checks if "format" in check.fix] == []
    fix = next(check.fix for check in found.checks if "diverged" in check.text)
    assert fix.startswith("policy.optimizer.learning_rate")


def test_10_rewards_that_differed_before_do_not_lack_a_format(written):
    first = {"reward_mean": 0.6, "zero_variance_fraction": 0.1, "reward_std": 0.3}
    rest = {"reward_mean": 1.0, "zero_variance_fraction": 1.0, "reward_std": 0.0}
    (written.path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, **(first if step < 2 else rest)}) + "\n" for step in range(14))
    )
    assert line(written.status().examine(), "reward").fix == "harder prompts, as the rewards differed before"


@pytest.mark.parametrize(
    ("complaint", "text", "fix"),
    [
        (
            "rollout-0: reward 'judge' is slow or hangs: [reward] timeout_s = 60 ends a call",
            "reward 'judge' is slow or hangs",
            "the server that it asks",
        ),
        (
            "a group failed (rollout-0): reward 'judge' on train.jsonl:7 took longer than [reward] timeout_s = 60",
            "reward 'judge' on train.jsonl:7 took longer than [reward] timeout_s = 60",
            "the server that it asks",
        ),
        (
            "a group failed (rollout-0): reward 'judge' on train.jsonl:7 raised KeyError: 'answer'",
            "reward 'judge' on train.jsonl:7 raised KeyError: 'answer'",
            "check --deep",
        ),
    ],
    ids=["slow", "timeout", "raises"],
)
def test_a_reward_that_fails_is_named(written, complaint, text, fix):
    Events(written.path).add("note", complaint)
    found = line(written.status().examine(), "reward")
    assert (found.level, found.text) == ("bad", text)
    assert "'judge'" in found.fix and fix in found.fix
    assert "larger" not in found.fix


def nothing(group):
    return [0.0] * len(group.rollouts)


def test_10_a_run_whose_reward_is_always_0(tmp_path):
    tables = {
        "run": {
            "domain": "cosmos_rl_core.testing.tiny:TINY",
            "output_dir": str(tmp_path / "run"),
            "max_steps": 4,
            "placement": "inline",
        },
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 4, "threads": 1},
        "rollout": {"group_size": 4, "threads": 1, "sampling": {"max_tokens": 3}},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
        "logging": {"sinks": ["jsonl"]},
    }
    run(tables, rewards=[nothing])
    found = line(examine_run(tmp_path / "run"), "reward")
    assert "100% of the groups have equal rewards; 'nothing' gave 0 to every rollout" in found.text
    assert "Answers: '" in found.text


@pytest.mark.parametrize(("staleness", "expected"), [(1.0, "numerical"), (4.0, "versions old")])
def test_11_an_engine_that_disagrees_with_the_policy(written, staleness, expected):
    found = written.metrics(mismatch_kl=0.4, staleness_max=staleness).status().examine()
    assert expected in line(found, "mismatch").text
    assert any("Engine and policy compute different" in check.text for check in found.checks)


def test_12_the_first_step_whose_gradient_is_not_finite(written):
    rows = [{"grad_norm": 1.0 if step < 7 else float("nan")} for step in range(12)]
    found = line(written.metrics(*rows).status().examine(), "gradient")
    assert found.level == "bad"
    assert found.text.startswith("step 7 is the first of 5")
    assert "rollouts/step_000007.jsonl" in found.text


def test_13_simulators_that_hang(tmp_path):
    written = Written(tmp_path / "run", domain="vla").status(LEASED)
    written.spans("rollout-1", "generate", 4.0, 5.0).opens("rollout-1", "generate", since_s=400, sample=3)
    found = line(written.examine(), "waits")
    assert "rollout-1 plays episodes in simulators since 6 min 40 s, sample 3; usual: 4.5 s: it hangs" in found.text
    assert "cosmos_rl_vla.sims.doctor" in found.fix


def test_13_simulators_that_cannot_render(written):
    message = "rollout-0: SampleError: ImportError: Cannot initialize a EGL device display"
    assert "cannot render" in line(written.ends(message=message).examine(), "cause").text


def test_14_a_resume_that_trained_nothing(tmp_path):
    parent = str(tmp_path / "run" / "checkpoints" / "step_41")
    found = Written(tmp_path / "run", parent=parent).ends("done").examine()
    assert "resumed from step 41 and ended without a step" in line(found, "resume").text


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("policy-0: RuntimeError: The NVIDIA driver version is insufficient for CUDA", "cosmos-rl doctor"),
        ("rollout-0 died (signal SIGBUS); the run cannot continue without it", "--shm-size"),
        ("17 samples in a row failed, the last with: reward 'x' raised KeyError", "check --deep"),
        ("no space left on /scratch; what was written so far is kept", "output_dir"),
    ],
)  # fmt: skip
def test_15_the_cause_of_an_error(written, message, fix):
    found = line(written.ends(message=message).examine(), "cause")
    assert (found.level, fix in found.fix) == ("bad", True)


# -- other states of a run


def test_a_worker_without_heartbeats(written):
    waits = "the run waits for rollout-1 to reconnect: connection closed"
    written.status(waits, members=("policy-0", member("rollout-1", "suspect", age_s=50.0)))
    found = line(written.examine(), "waits")
    assert (found.level, "rollout-1 (suspect) sent its last heartbeat 50 s ago" in found.text) == ("bad", True)


def test_a_stalled_process_outside_of_the_chain_is_named(written):
    written.status(LEASED).spans("rollout-0", "generate", 1.0).opens("rollout-0", "generate", since_s=500)
    found = line(written.examine(), "stalled")
    assert (found.level, "rollout-0 is in 'generate' since 8 min 20 s; usual: 1 s" in found.text) == ("bad", True)


def test_a_clock_that_differs(written):
    written.status()
    written.clock.now = time.time() + 500
    timeline = written._timeline("rollout-0")
    with timeline.span("generate"):
        pass
    timeline.stream(written.path / "spans" / "rollout-0.jsonl")
    timeline.close()
    assert "is 500 s ahead" in line(examine_run(written.path), "clock").text


def test_a_controller_that_is_alive_and_writes_nothing(written):
    written.status(time=time.time() - 120, pid=12)
    found = line(written.examine(), "controller")
    assert (found.level, found.text) == ("bad", "its process 12 is alive and has written no status for 2 min 00 s")


def test_a_healthy_run_has_no_bad_line(written):
    written.status().metrics(reward_mean=0.5, policy_idle_fraction=0.1, rollout_idle_fraction=0.1)
    found = written.examine()
    assert line(found, "waits").text == "no process waits for another one"
    assert {check.level for check in found.checks} == {"ok"}


def test_a_dead_run_is_not_taken_for_a_hanging_one(written):
    written.status(LEASED).opens("rollout-1", "score", since_s=900)
    (written.path / "run.lock").write_text("1073741823 elsewhere 1\n")
    found = written.examine()
    assert (found.when, found.waits) == ("when it was last seen", (LEASED,))
    assert not [check for check in found.checks if check.name in ("waits", "stalled")]
    assert "The controller is gone" in found.checks[0].text
    assert "its controller is gone" in found.title


def test_a_directory_without_a_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no run has started here"):
        examine_run(tmp_path)
    (tmp_path / "launch").mkdir()
    with pytest.raises(UserError, match="has written no status yet"):
        examine_run(tmp_path)


def test_the_verb_prints_chain_and_lines_and_ends_with_1(written, capsys):
    written.status(LEASED).spans("rollout-1", "score", 0.4).opens("rollout-1", "score", since_s=312)
    written.examine()
    for arguments in (["doctor", str(written.path)], ["doctor", str(written.path), "--json"]):
        with pytest.raises(SystemExit) as ended:
            app.main(arguments)
        assert ended.value.code == 1
    text = capsys.readouterr().out
    assert f"waits:\n  {LEASED}\n\nbad" in text
    assert json.loads(text[text.index("\n{") :])["checks"][0]["name"] == "waits"


# -- runs that are gone


def test_of_a_killed_run_the_doctor_shows_what_it_was_waiting_for(written):
    written.status(LEASED).opens("rollout-1", "score", since_s=12)
    (written.path / "run.lock").write_text("999999999\n")
    found = written.examine()
    assert (found.when, found.waits) == ("when it was last seen", (LEASED,))
    assert "rollout-1 was in 'score', for 12 s" in line(found, "last seen").text
    assert "when it was last seen:\n  policy-0 waits for batch 41" in str(found)
    assert "Continue: cosmos-rl run" in str(found)


def test_a_run_that_was_copied_from_another_machine_is_not_called_alive(written):
    written.status(LEASED)
    run_dir = written.path
    (run_dir / "run.lock").write_text("999999999\n")
    (run_dir / "status.json").write_text(json.dumps(status(LEASED, pid=12) | {"time": time.time() - 3 * 86400}))
    here = ControllerFile.of_this_process("tcp://127.0.0.1:1", generation=0)
    msgspec.structs.replace(here, host="n7", pid=12).write(run_dir)
    found = examine_run(run_dir)
    assert "unknown, last seen 72 h" in found.title
    assert "is alive and has written no status" not in str(found)
    assert "It is not known whether the run, on another machine, is alive" in str(found)


# -- stacks


def test_a_child_that_has_ended_and_a_short_wait_for_the_disk_are_no_trouble(tmp_path, monkeypatch):
    seen = iter(["D", "S"])
    monkeypatch.setattr(stacks, "_process", lambda pid, worker: InspectedProcess(pid, worker, "", next(seen), True))
    process = InspectedProcess(1, "rollout-0", "", "D", True)
    assert stacks._watched(process, is_main=True).trouble == ""
    seen = iter(["D", "D", "D"])
    assert stacks._watched(process, is_main=True).trouble == "process 1 waits for a disk"
    ended = process._replace(state="Z")
    assert (stacks._watched(ended, is_main=False).trouble, stacks._watched(ended, is_main=True).trouble) == (
        "",
        "process 1 has ended",
    )


HANGS = """
import sys, threading
from cosmos_rl_core.processes import write_stacks_on_signal
write_stacks_on_signal()
def wait_for_the_judge():
    print("hangs", file=sys.stderr, flush=True)
    threading.Event().wait()
wait_for_the_judge()
"""


@pytest.fixture
def hanging(tmp_path):
    """A process with the log of a worker that hangs."""
    log = tmp_path / "logs" / "rollout-0.log"
    log.parent.mkdir()
    (tmp_path / "hangs.py").write_text(HANGS)
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, tmp_path / "hangs.py"], stdout=output, stderr=output)
    deadline = time.monotonic() + 60
    while b"hangs" not in log.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.02)
    yield process
    process.kill()
    process.wait()


def test_the_stacks_of_a_hanging_worker_are_read_without_permission_to_trace(hanging, tmp_path, monkeypatch):
    monkeypatch.setattr("cosmos_rl_core.ops.doctor.stacks._py_spy", lambda: "")
    (found,) = worker_processes(tmp_path)
    assert (found.pid, found.worker, found.writes_stacks, found.trouble) == (hanging.pid, "rollout-0", True, "")
    text = stacks_of([found], tmp_path)
    assert f"rollout-0, process {hanging.pid}" in text
    assert "wait_for_the_judge" in text and "hangs.py:7" in text
    assert "_bootstrap" not in text
    assert hanging.poll() is None


def test_a_stopped_process_is_named_and_gets_no_signal(hanging, tmp_path):
    hanging.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while worker_processes(tmp_path)[0].state != "T" and time.monotonic() < deadline:
        time.sleep(0.02)
    (found,) = worker_processes(tmp_path)
    assert found.trouble == f"process {hanging.pid} is stopped (SIGSTOP)"
    assert "no stacks, as it is stopped (SIGSTOP)" in stacks_of([found], tmp_path)


def test_threads_that_wait_for_work_are_left_out():
    faulthandler = """[rank 0] Thread 0x00007fe98a (most recent call first):
[rank 0]   File "/usr/lib/python3.11/concurrent/futures/thread.py", line 81 in _worker
[rank 0]   File "/usr/lib/python3.11/threading.py", line 982 in run
[rank 0]
[rank 0] Current thread 0x00007fe9b (most recent call first):
[rank 0]   File "/x/torch/distributed/distributed_c10d.py", line 3151 in broadcast
[rank 0]   File "/usr/lib/python3.11/threading.py", line 982 in run
"""
    assert busy_threads(faulthandler) == "  thread\n    broadcast (torch/distributed/distributed_c10d.py:3151)"
    spied = """Process 316: python
Thread 316 (idle): "MainThread"
    EpollSelector.select (selectors.py:468)
    BaseEventLoop._run_once (asyncio/base_events.py:1884)
Thread 445 (idle): "ranks_0"
    broadcast (torch/distributed/distributed_c10d.py:3151)
    Thread._bootstrap (threading.py:1002)
"""
    assert busy_threads(spied) == "  thread ranks_0\n    broadcast (torch/distributed/distributed_c10d.py:3151)"
    assert busy_threads(spied[: spied.index("Thread 445")]) == "  all 1 threads wait for work"
