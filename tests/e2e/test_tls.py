"""Runs with [tls]: workers that have nothing but the address, the token and the certificate, and a new controller."""

import json

import pytest

pytestmark = pytest.mark.ci

STEPS, PROMPTS = 10, 4
ENCRYPTED = {"tls__enabled": True, "tls__weights": True, "sync__transport": "tcp"}
SPOOLED = {"rollout__spool": {"threshold_bytes": 0}}


def mode_of(path):
    return path.stat().st_mode & 0o777


def test_a_run_over_tls_refuses_workers_without_its_certificate(
    controller, start, wait_for, rows_of, finished, tmp_path, monkeypatch
):
    """Two policies, whose mesh meets at the controller, and a rollout worker; groups are pulled from its spool."""
    process, run_dir, _ = controller(
        run__max_steps=10_000, checkpoint__path=str(tmp_path / "saved"), policy__replicas=2, **ENCRYPTED, **SPOOLED
    )
    contact = json.loads((run_dir / "controller.json").read_text())
    assert len(contact["ca"]) == 64
    assert {mode_of(run_dir / name) for name in ("tls.pem", "tls_controller.pem")} == {0o600}
    monkeypatch.setenv("COSMOS_RL_TOKEN", (run_dir / "token").read_text().strip())
    (run_dir / "token").unlink()  # by which a worker recognises the run's directory
    join = ("--controller", contact["address"])
    _, errors = finished(start("worker", "--role", "rollout", *join), 2)
    assert "the run uses TLS: give this process the content of tls.pem" in errors

    monkeypatch.setenv("COSMOS_RL_TLS", (run_dir / "tls.pem").read_text())
    workers = [start("worker", "--role", "policy", "--name", f"policy-{i}", *join) for i in range(2)]
    workers.append(start("worker", "--role", "rollout", "--name", "elsewhere", *join))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= STEPS, f"{STEPS} steps")
    out, _ = finished(start("scale", run_dir, "rollout=1"))
    assert out == "ready: 2 policy, 1 rollout\n"
    process.send_signal(2)
    _, errors = finished(process, 130)
    assert "has refused a connection: the peer does not use TLS" in errors
    for worker in workers:
        finished(worker)
    steps = [line["step"] for line in rows_of(run_dir / "metrics.jsonl")]
    assert steps == list(range(len(steps)))


def test_the_next_controller_keeps_the_certificates(controller, start, wait_for, rows_of, finished, tmp_path):
    process, run_dir, (policy, rollout) = controller(run__max_steps=20, **ENCRYPTED)
    workers = [start(*policy), start(*rollout)]
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 5, "five steps")
    kept = [(run_dir / name).read_text() for name in ("tls.pem", "tls_controller.pem", "token")]
    process.kill()
    process.wait()
    finished(start("controller", tmp_path / "run.toml"))
    for worker in workers:
        finished(worker)
    assert [(run_dir / name).read_text() for name in ("tls.pem", "tls_controller.pem", "token")] == kept
    assert [line["step"] for line in rows_of(run_dir / "metrics.jsonl")] == list(range(20))


def test_a_new_run_without_tls_removes_the_certificates_of_the_last_one(controller, start, finished, tmp_path):
    process, run_dir, _ = controller(**ENCRYPTED)
    process.kill()
    process.wait()
    assert (run_dir / "tls.pem").exists()
    again = start("controller", tmp_path / "run.toml", "--overwrite", "tls.enabled=false", "tls.weights=false")
    for line in again.stdout:
        if "on other machines by --controller" in line:
            break
    assert not list(run_dir.glob("tls*.pem"))
    assert json.loads((run_dir / "controller.json").read_text())["ca"] == ""
    again.send_signal(2)
    finished(again, 130)
