"""Two machines: network namespaces with addresses of their own, TLS between them, and a cable that is pulled.

The second machine does not see the run's directory. It has the controller's address, the token and the certificate.
"""

import json
import time
from collections import Counter
from functools import cache

import pytest
from separate_machines import SeparateMachines, missing

from cosmos_rl_core.checkpoint.manifest import read_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS, GROUP = 4, 4
ENCRYPTED = {
    "tls__enabled": True,
    "tls__weights": True,
    "sync__transport": "tcp",
    "rollout__spool": {"threshold_bytes": 0},
}
why_not = cache(missing)


@pytest.fixture
def two(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "run").mkdir()
    with SeparateMachines(tmp_path / "logs", hidden=tmp_path / "run") as machines:
        yield machines


@pytest.fixture
def begin(two, tmp_path, bandit, write_recipe, wait_for):
    """Start a controller on the first machine; return its process, and the arguments and secrets of other workers."""

    def start(**changes):
        run_dir = tmp_path / "run" / "directory"
        tables = bandit(
            run_dir,
            run__bind=two.first.address,
            checkpoint__path=str(tmp_path / "saved"),
            checkpoint__every_steps=5,
            logging__sinks=["console", "jsonl"],
            **ENCRYPTED,
            **changes,
        )
        process = two.first.start("controller", "controller", write_recipe(tmp_path / "run.toml", tables))
        wait_for((run_dir / "controller.json").exists, "the controller")
        address = json.loads((run_dir / "controller.json").read_text())["address"]
        secrets = {
            "COSMOS_RL_TOKEN": (run_dir / "token").read_text().strip(),
            "COSMOS_RL_TLS": (run_dir / "tls.pem").read_text(),
        }
        return process, run_dir, ("--controller", address), secrets

    return start


def alive(*processes):
    """Return True; fail if one has ended."""
    assert [process.poll() for process in processes] == [None] * len(processes), "a process has ended: see its log"
    return True


def must_have_trained_once(rows_of, run_dir, steps):
    """Each step's file has the rollouts of its own samples: `GROUP` of each."""
    files = (run_dir / "rollouts" / f"step_{step:06d}.jsonl" for step in range(steps))
    counts = Counter(row["sample"] for file in files for row in rows_of(file))
    assert len(counts) == steps * PROMPTS and set(counts.values()) == {GROUP}


def test_a_policy_over_both_machines_and_rollouts_on_the_second_outlast_a_pulled_cable(
    two, begin, tmp_path, wait_for, rows_of
):
    """The collective, the heartbeats and the weights of both machines stand still for five seconds, and go on."""
    steps = 60
    controller, run_dir, join, secrets = begin(
        run__max_steps=steps, policy__num_nodes=2, policy__parallel__dp_shard=2, policy__threads=2
    )
    both = ("--num-nodes", 2, "--rendezvous", f"{two.first.address}:29400")
    policy = ("worker", "--role", "policy", "--name", "policy-0", *both)
    workers = [
        two.first.start("rank-0", *policy, "--run", run_dir, "--node", 0),
        two.second.start("rank-1", *policy, *join, "--node", 1, **secrets),
        *(
            two.second.start(f"rollout-{i}", "worker", "--role", "rollout", "--name", f"rollout-{i}", *join, **secrets)
            for i in range(2)
        ),
    ]
    wait_for(
        lambda: alive(controller, *workers) and len(rows_of(run_dir / "metrics.jsonl")) >= 10,
        "ten steps",
        timeout_s=240,
    )
    two.cut()
    time.sleep(1)  # messages under way
    before = len(rows_of(run_dir / "metrics.jsonl"))
    time.sleep(4)  # the length of the cut is the point of the test
    assert len(rows_of(run_dir / "metrics.jsonl")) == before, "the run went on without its second rank"
    two.join()
    assert controller.wait(timeout=240) == 0, (tmp_path / "logs" / "controller").read_text()
    assert [worker.wait(timeout=60) for worker in workers] == [0] * 4
    assert [line["step"] for line in rows_of(run_dir / "metrics.jsonl")] == list(range(steps))
    must_have_trained_once(rows_of, run_dir, steps)
    assert read_state(tmp_path / "saved" / f"step_{steps}").step == steps
    log = (tmp_path / "logs" / "rank-1").read_text()
    assert "network interfaces: gloo cable0, nccl =cable0, ucx " in log
    assert "TLS 1.3 with the CA" in (tmp_path / "logs" / "controller").read_text()


def test_the_first_machine_goes_on_alone_until_the_second_one_is_back(two, begin, tmp_path, wait_for, rows_of):
    """Cut off for longer than `silence_s`: its prompts go to others, it is refused when it is back, and joins anew."""
    controller, run_dir, join, secrets = begin(
        run__max_steps=100_000, elastic__silence_s=3.0, rollout__options={"delay_s": 0.02}
    )
    worker = ("worker", "--role", "rollout", "--name")
    here = [two.first.start("policy", "worker", "--role", "policy", "--run", run_dir)]
    here.append(two.first.start("near", *worker, "near", "--run", run_dir))
    far = two.second.start("far", *worker, "far", *join, **secrets)
    metrics = run_dir / "metrics.jsonl"

    def workers(*states):
        if not (run_dir / "status.json").exists():  # it is written once a second
            return set()
        status = json.loads((run_dir / "status.json").read_text())
        return {member["name"] for member in status["members"] if member["state"] in states}

    wait_for(
        lambda: alive(controller, far, *here) and metrics.exists() and {"near", "far"} <= workers("ready"),
        "both rollout workers",
        timeout_s=240,
    )
    two.cut()
    wait_for(lambda: "far" not in workers("ready", "suspect"), "the loss of the far worker")
    steps = len(rows_of(metrics))
    wait_for(lambda: len(rows_of(metrics)) >= steps + 5, "five steps without it")
    two.join()
    assert far.wait(timeout=120) == 1
    again = two.second.start("far-again", *worker, "far", *join, **secrets)
    wait_for(lambda: alive(again) and "far" in workers("ready"), "its return", timeout_s=240)
    steps = len(rows_of(metrics))
    wait_for(lambda: len(rows_of(metrics)) >= steps + 5, "five steps with it")
    controller.send_signal(2)
    assert controller.wait(timeout=120) == 130
    assert [process.wait(timeout=60) for process in (*here, again)] == [0] * 3
    steps = [line["step"] for line in rows_of(metrics)]
    assert steps == list(range(len(steps)))
    must_have_trained_once(rows_of, run_dir, len(steps))


def test_a_worker_that_is_cut_off_for_good_leaves(two, begin, tmp_path, wait_for):
    """No packet says that its connection has ended."""
    wait_s = 5.0
    controller, run_dir, join, secrets = begin(run__max_steps=100_000, elastic__controller_wait_s=wait_s)
    far = two.second.start("far", "worker", "--role", "rollout", "--name", "far", *join, **secrets)
    log = run_dir / "status.json"
    wait_for(lambda: alive(controller, far) and log.exists() and "far" in log.read_text(), "the worker", timeout_s=240)
    time.sleep(5)  # it connects before it imports torch
    two.cut()
    since = time.monotonic()
    assert far.wait(timeout=120) == 1
    print(f"it has left {time.monotonic() - since:.1f} s after the cut")
    assert "the connection broke" in (tmp_path / "logs" / "far").read_text()
    controller.send_signal(2)
    controller.wait(timeout=120)
