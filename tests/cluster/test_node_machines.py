"""`cosmos-rl node` on three machines: network namespaces with addresses of their own, default bind and ports."""

import secrets
from collections import Counter

import pytest
from separate_machines import SeparateMachines, missing

from cosmos_rl_core.checkpoint.manifest import read_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, PROMPTS, GROUP = 8, 4, 4


def test_three_machines_train_to_the_end_at_addresses_that_they_find_themselves(
    tmp_path, bandit, write_recipe, monkeypatch, rows_of
):
    if reason := missing():
        pytest.skip(reason)
    run_dir = tmp_path / "run" / "directory"
    (tmp_path / "run").mkdir()
    tables = bandit(
        run_dir,
        run__max_steps=STEPS,
        policy__num_nodes=2,
        policy__ranks_per_node=1,
        rollout__replicas=2,
        checkpoint__path=str(tmp_path / "saved"),
        sync__transport="tcp",
        rollout__spool={"threshold_bytes": 0},
        logging__sinks=["console", "jsonl"],
    )
    recipe = write_recipe(tmp_path / "run.toml", tables)
    monkeypatch.setenv("COSMOS_RL_TOKEN", secrets.token_hex(32))
    with SeparateMachines(tmp_path / "logs", hidden=tmp_path / "run", number=3) as machines:
        head = machines.first.address
        nodes = [
            machine.start(f"node-{index}", "node", recipe, "--nodes", 3, "--node", index, "--head", head)
            for index, machine in enumerate(machines.all)
        ]
        codes = [node.wait(timeout=400) for node in nodes]
    logs = [(tmp_path / "logs" / f"node-{index}").read_text() for index in range(3)]
    assert codes == [0, 0, 0], "\n".join(logs)
    assert all(f"connected to tcp://{head}:29601" in log for log in logs[::2])
    assert "network interfaces: gloo cable0" in logs[1]
    rows = rows_of(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert rows[-1]["members"] == 3
    files = (run_dir / "rollouts" / f"step_{step:06d}.jsonl" for step in range(STEPS))
    counts = Counter(row["sample"] for file in files for row in rows_of(file))
    assert len(counts) == STEPS * PROMPTS and set(counts.values()) == {GROUP}
    assert read_state(tmp_path / "saved" / f"step_{STEPS}").step == STEPS
