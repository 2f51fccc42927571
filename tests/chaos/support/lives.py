"""Runs in processes of their own, and what they leave behind. A module, as the processes import it."""

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import msgspec

from cosmos_rl_core.checkpoint.manifest import read_state
from cosmos_rl_core.control.journal import read_segment, segment_firsts, segment_path
from cosmos_rl_core.control.ledger import records
from cosmos_rl_core.launch.run import run

STEPS, PROMPTS = 40, 6
"""Of a run in which a worker dies at a named point."""
AT = 5
"""Step of the death."""
SUPPORT = str(Path(__file__).parent)
"""Folder of the dying domain, for all processes of a run."""


def live_to_the_end(tables):
    run(tables, resume="auto")


def live_until(tables, wanted, after_s):
    """Be killed `after_s` after `wanted` lines of metrics, by a thread that waits together with the run.

    Another process may get its turn on a busy machine only when the run is over.
    """
    metrics = Path(tables["run"]["output_dir"]) / "metrics.jsonl"

    def kill():
        while num_lines(metrics) < wanted:
            time.sleep(0.001)
        time.sleep(after_s)  # the moment is the point of the test
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    run(tables, resume="auto")


def must_have_trained_once(run_dir, *, prompts, group=4):
    """Every sample was trained once, at the step of a run that nobody disturbed; return the number of steps."""
    steps = [row["step"] for row in _rows(run_dir / "metrics.jsonl")]
    assert steps == list(range(len(steps)))
    for step in steps:
        samples = Counter(row["sample"] for row in _rows(run_dir / f"rollouts/step_{step:06d}.jsonl"))
        assert samples == dict.fromkeys(range(step * prompts, (step + 1) * prompts), group)
    assert read_state(run_dir / f"checkpoints/step_{len(steps)}").step == len(steps)
    return len(steps)


def _rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def processes_of(run_dir, *, name=""):
    """The workers of a run, from the process table: all, or those of a name."""
    token, found = str(run_dir / "token").encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if token in words and (not name or name.encode() in words):
                    found.append(int(entry.name))
    return found


def workers_of(run_dir, role):
    """The processes of a role by name, from the process table; not the ranks and forks of others."""
    token, found = str(run_dir / "token"), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                words = (entry / "cmdline").read_text().split("\0")
                if token in words and role in words and "--name" in words:
                    found[words[words.index("--name") + 1]] = int(entry.name)
    return found


def journal_of(run_dir):
    """The records of a run, which may still be active."""
    decoder = msgspec.msgpack.Decoder(records.AnyRecord)
    [first] = segment_firsts(run_dir / "journal")
    path = segment_path(run_dir / "journal", first)
    return [decoder.decode(body) for body, _ in read_segment(path, first=first, is_last=True)]


def weights_of(run_dir, steps=STEPS):
    """Weights and optimizer state of the checkpoint of a step."""
    from safetensors.torch import load_file

    from cosmos_rl_core.checkpoint.manifest import read_state

    folder = run_dir / "checkpoints" / f"step_{steps}"
    assert read_state(folder).step == steps
    files = sorted(folder.rglob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items() if not name.startswith("rng/")}


def must_have_equal_weights(digests):
    """The policies of a mesh have the same weights after a step, to the bit. Return the number of comparisons."""
    found = defaultdict(list)
    for file in digests.iterdir():
        for line in file.read_text().splitlines():
            epoch, step, digest = json.loads(line)
            found[epoch, step].append(digest)
    mixed = [key for key, each in found.items() if len(set(each)) > 1]
    assert not mixed, f"different weights in one mesh: {mixed}"
    return sum(len(each) - 1 for each in found.values())
