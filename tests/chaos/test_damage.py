"""Bytes that change in the journal of a live run (row 29)."""

import pytest
from lives import num_lines

from cosmos_rl_core.checkpoint.manifest import list_steps

pytestmark = [pytest.mark.ci, pytest.mark.timeout(400)]

STEPS, PROMPTS = 12, 4
CHANGES = {"run__max_steps": 10_000, "checkpoint__every_steps": 4, "rollout__options": {"delay_s": 0.02}}


def flip(path, place):
    """Change one bit of a byte."""
    with path.open("r+b") as file:
        file.seek(place)
        [value] = file.read(1)
        file.seek(place)
        file.write(bytes([value ^ 1]))


def trained(run_dir, rows_of, steps):
    files = (run_dir / "rollouts" / f"step_{step:06d}.jsonl" for step in range(steps))
    return [{row["sample"] for row in rows_of(file)} for file in files]


def continued(run_dir, recipe, start, finished, rows_of):
    """Continue from the newest checkpoint, to the end; every sample is trained once."""
    steps = max(list_steps(run_dir / "checkpoints")) + 4
    process = start("run", recipe, "--resume", "auto", f"run.max_steps={steps}")
    finished(process)
    assert set().union(*trained(run_dir, rows_of, steps)) == set(range(steps * PROMPTS))


def test_a_journal_with_a_flipped_bit_is_refused_with_the_remedy(
    controller, start, wait_for, rows_of, finished, tmp_path
):
    process, run_dir, (policy, rollout) = controller(**CHANGES, elastic__controller_wait_s=0.0)
    workers = [start(*policy), start(*rollout)]
    wait_for(lambda: num_lines(run_dir / "metrics.jsonl") >= 6, "six steps")
    process.kill()
    process.wait()
    for worker in workers:
        worker.communicate(timeout=60)
    [segment] = (run_dir / "journal").glob("*.journal")
    flip(segment, segment.stat().st_size // 2)
    _, errors = finished(start("controller", tmp_path / "run.toml"), 2)
    assert f"{segment}: record " in errors
    assert "is damaged: continue from the newest checkpoint with --resume auto" in errors
    assert "Traceback" not in errors
    continued(run_dir, tmp_path / "run.toml", start, finished, rows_of)
