"""A run whose workers are started by others: `cosmos-rl controller`, and `cosmos-rl worker` from anywhere."""

import json
import re
import signal
import subprocess
import sys

import pytest

from cosmos_rl_core.checkpoint.manifest import read_state
from cosmos_rl_core.wire.handshake import PROTOCOL_VERSION

pytestmark = pytest.mark.ci

STEPS, PROMPTS = 12, 4
OF_AN_EARLIER_VERSION = """
from cosmos_rl_core.wire import handshake
handshake.make_preamble.__kwdefaults__["version"] -= 1
from cosmos_rl_core.cli.app import main
main()
"""

SIZED = """
import os
from cosmos_rl_core.testing.tiny import Tiny

class Sized(Tiny):
    def build_policy(self, model, **options):
        hidden = int(os.environ.get("HIDDEN", model.hidden))
        return super().build_policy(model.model_copy(update={"hidden": hidden}), **options)

DOMAIN = Sized()
"""


def test_the_printed_commands_start_a_run_that_trains_every_sample_once(controller, start, rows_of, finished):
    process, run_dir, (policy, rollout) = controller()
    contact = json.loads((run_dir / "controller.json").read_text())
    assert contact["pid"] == process.pid and contact["generation"] == 0
    workers = [start(*policy), start(*rollout), start(*rollout)]  # the two have names of their own
    finished(process)
    for worker in workers:
        finished(worker)
    assert not (run_dir / "controller.json").exists()
    assert [line["step"] for line in rows_of(run_dir / "metrics.jsonl")] == list(range(STEPS))
    trained = [
        row["sample"] for step in range(STEPS) for row in rows_of(run_dir / "rollouts" / f"step_{step:06d}.jsonl")
    ]
    assert len(set(trained)) == STEPS * PROMPTS
    assert read_state(run_dir / "checkpoints" / f"step_{STEPS}").step == STEPS


def test_workers_without_the_directory_need_the_address_and_the_token_alone(
    controller, start, tmp_path, monkeypatch, rows_of, finished
):
    """The directory is renamed to a place of which its workers learn nothing."""
    checkpoints = tmp_path / "elsewhere"
    process, run_dir, _ = controller(checkpoint__path=str(checkpoints))
    address = json.loads((run_dir / "controller.json").read_text())["address"]
    monkeypatch.setenv("COSMOS_RL_TOKEN", (run_dir / "token").read_text().strip())
    (run_dir / "token").unlink()  # by which a worker recognises the run's directory
    workers = [start("worker", "--role", role, "--controller", address) for role in ("policy", "rollout")]
    finished(process)
    for worker in workers:
        finished(worker)
    assert read_state(checkpoints / f"step_{STEPS}").step == STEPS


def test_a_rollout_worker_that_is_killed_is_replaced_by_one_that_nobody_announced(
    controller, start, wait_for, rows_of, finished
):
    process, run_dir, (policy, rollout) = controller(
        run__max_steps=24, rollout__options={"delay_s": 0.05}, elastic__suspect_grace_s=1.0
    )
    first = [start(*policy), start(*rollout)]
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps")
    first[1].send_signal(signal.SIGKILL)
    start("worker", "--role", "rollout", "--name", "a-spot-machine", "--run", run_dir)
    finished(process)
    assert [line["step"] for line in rows_of(run_dir / "metrics.jsonl")] == list(range(24))


def test_workers_that_cannot_join_say_why_and_leave_the_run_unharmed(
    controller, start, wait_for, rows_of, tmp_path, finished
):
    process, run_dir, (policy, rollout) = controller(run__max_steps=10_000)
    good = [start(*policy), start(*rollout)]
    wait_for(lambda: rows_of(run_dir / "metrics.jsonl"), "the first step")

    other = tmp_path / "token"
    other.write_text("00" * 32)
    other.chmod(0o600)
    _, errors = finished(start(*rollout, "--token-file", other), 2)
    assert "does not have this run's token" in errors
    _, errors = finished(start(*policy), 2)
    assert "a live worker has the name policy-0: give this one another by --name" in errors
    earlier = subprocess.run([sys.executable, "-c", OF_AN_EARLIER_VERSION, *rollout], capture_output=True, text=True)
    assert earlier.returncode == 2
    versions = rf"version {PROTOCOL_VERSION - 1} .*, the peer has version {PROTOCOL_VERSION} \(cosmos-rl-core [\w.+]+\)"
    assert re.search(f"{versions}: install the same", earlier.stderr)
    _, errors = finished(start(*policy, "--name", "policy-1", "--ranks-per-node", "2"), 2)
    assert "this policy has 2 ranks, and that of the recipe 1: start it with --ranks-per-node 1" in errors
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) > steps, "another step")
    process.send_signal(signal.SIGINT)
    out, errors = finished(process, 130)
    assert "policy-0 was refused: a live worker has the name" in out
    assert re.search("policy-1 could not start, and the run continues without it: .*this policy has 2 ranks", out)
    assert "lost" not in out
    assert "has refused a connection: its peer has another token" in errors
    assert "has refused a connection: its peer has another version of the protocol" in errors
    for worker in good:
        finished(worker)


def test_a_policy_that_cannot_start_does_not_end_the_run(controller, start, monkeypatch, finished):
    process, run_dir, (policy, rollout) = controller()
    address = json.loads((run_dir / "controller.json").read_text())["address"]
    token = run_dir / "token"
    monkeypatch.setenv("COSMOS_RL_TOKEN", token.read_text().strip())
    token.rename(run_dir / "hidden")
    _, errors = finished(start("worker", "--role", "policy", "--controller", address), 2)
    assert "checkpoints need the run's directory" in errors
    (run_dir / "hidden").rename(token)
    workers = [start(*policy), start(*rollout)]
    out, _ = finished(process)
    assert "policy-0 could not start, and the run continues without it: checkpoints need" in out
    for worker in workers:
        finished(worker)


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--run", "nowhere"], "nowhere/controller.json is missing: there is no such directory", 2),
        ([], "give --run DIR or --controller tcp://host:port", 2),
        (["--controller", "tcp://127.0.0.1:9"], "the run's token is missing: set COSMOS_RL_TOKEN", 2),
        (["--controller", "127.0.0.1:9", "--token-file", "token"], "cannot read the token file token", 2),
    ],
)
def test_a_command_that_leads_nowhere_says_so(start, tmp_path, monkeypatch, arguments, message, code, finished):
    monkeypatch.delenv("COSMOS_RL_TOKEN", raising=False)
    _, errors = finished(start("worker", "--role", "rollout", *arguments, cwd=tmp_path), code)
    assert message in errors


def test_an_unreachable_controller_is_named(start, tmp_path, monkeypatch, finished):
    monkeypatch.setenv("COSMOS_RL_TOKEN", "00" * 32)
    _, errors = finished(start("worker", "--role", "rollout", "--controller", "tcp://127.0.0.1:9", cwd=tmp_path), 1)
    assert "cannot connect to tcp://127.0.0.1:9" in errors


def test_a_busy_port_is_named_and_without_workers_one_interrupt_ends_the_run(controller, start, tmp_path, finished):
    process, run_dir, _ = controller("--port", "0")
    port = json.loads((run_dir / "controller.json").read_text())["address"].rpartition(":")[2]
    second = start("controller", tmp_path / "run.toml", f"run.output_dir={tmp_path / 'other'}", "--port", port)
    _, errors = finished(second, 2)
    assert f"port {port} on 127.0.0.1 is in use" in errors
    process.send_signal(signal.SIGINT)
    finished(process, 130, timeout_s=20)


def test_a_policy_with_another_model_is_named_on_both_sides_and_the_run_goes_on(
    controller, start, wait_for, rows_of, tmp_path, monkeypatch, finished
):
    (tmp_path / "sized.py").write_text(SIZED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process, run_dir, (policy, rollout) = controller(
        run__domain="sized:DOMAIN", run__max_steps=10_000, policy__replicas=2, rollout__options={"delay_s": 0.02}
    )

    def steps():
        return len(rows_of(run_dir / "metrics.jsonl"))

    good, status = [start(*policy, "--name", "good"), start(*rollout)], run_dir / "status.json"
    wait_for(lambda: status.exists() and '"good"' in status.read_text(), "the policy whose model counts")
    for number in range(2):  # of the first mesh, and of one that has trained
        before = steps()
        with monkeypatch.context() as patch:
            patch.setenv("HIDDEN", "7")
            odd = start(*policy, "--name", f"odd-{number}")
        _, errors = finished(odd, 2)
        assert re.search(rf"odd-{number}: cannot train with good: model/\S+ is float32 \[.*7.*\] here", errors), errors
        wait_for(lambda: steps() > before + 2, "steps of the others")  # noqa: B023
    process.send_signal(signal.SIGINT)
    output, _ = finished(process, 130)
    for worker in good:
        finished(worker)
    said = " ".join(output.split())
    for number in range(2):
        assert f"odd-{number}: it cannot train with good: model/" in said
    assert [row["step"] for row in rows_of(run_dir / "metrics.jsonl")] == list(range(steps()))
