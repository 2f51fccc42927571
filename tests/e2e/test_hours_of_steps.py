"""As many steps as a run of an hour has: no process keeps memory or files open for the steps that are done."""

import json
import os
from pathlib import Path

import pytest

from cosmos_rl_core.processes import process_tree, resident_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]

MORE_BYTES = 6 * 2**20
"""Growth that is noise: the metrics of 8,000 steps, if they are kept, are 16 MB."""
MORE_FILES = 4


@pytest.mark.parametrize(
    ("sync", "warm", "last"),
    [({"backend": "cosmos_rl_core.testing.file_sync:FileSync"}, 1_500, 9_600), ({}, 200, 1_200)],
    ids=["files", "transfer"],
)
def test_memory_and_open_files_stay_the_same_over_thousands_of_steps(
    tmp_path, bandit, write_recipe, start, wait_for, sync, warm, last
):
    run_dir = tmp_path / "run"
    changes = {"run__max_steps": 1_000_000, "checkpoint__every_steps": 500, "logging__rollouts_every": 0}
    changes |= {"policy__prompts_per_step": 2, "rollout__group_size": 2}
    process = start("run", write_recipe(tmp_path / "recipe.toml", bandit(run_dir, **changes) | {"sync": sync}))

    def has_reached(step):
        assert process.poll() is None
        status = run_dir / "status.json"
        return status.exists() and json.loads(status.read_bytes())["step"] >= step

    def sample():
        return {pid: (resident_bytes(pid), len(os.listdir(f"/proc/{pid}/fd"))) for pid in process_tree(process.pid)}

    wait_for(lambda: has_reached(warm), f"step {warm}", timeout_s=1200)
    before = sample()
    wait_for(lambda: has_reached(last), f"step {last}", timeout_s=3600)
    after = sample()
    grown = {
        Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[-80:]: (
            after[pid][0] - before[pid][0],
            after[pid][1] - before[pid][1],
        )
        for pid in before.keys() & after.keys()
    }
    assert len(grown) >= 3  # the command, the policy, the rollouts
    assert all(num_bytes < MORE_BYTES and files <= MORE_FILES for num_bytes, files in grown.values()), grown
