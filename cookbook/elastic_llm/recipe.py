"""Start a controller, policies and rollout workers; kill, add and drain some of them; watch the run go on.

python cookbook/elastic_llm/recipe.py [--dir runs/elastic_llm] [--only-prepare] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from cosmos_rl_core import run
from cosmos_rl_llm import write_sums, write_tiny_model

HERE = Path(__file__).parent
COMMAND = Path(sys.executable).with_name("cosmos-rl")
WAIT_S = 300.0


class Show:
    """The processes of one run, and its metrics."""

    def __init__(self, directory: Path, *overrides: str) -> None:
        self.run_dir = directory / "grpo"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._logs = directory / "terminals"
        self._logs.mkdir(exist_ok=True)
        self._begun = time.monotonic()
        self._command = ("controller", HERE / "run.toml", f"run.output_dir={self.run_dir}", *overrides)
        self.controller = self.start("controller", *self._command, "--overwrite")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._begun:6.1f} s  step {self.steps():2}  {text}", flush=True)

    def start(self, name: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
        with (self._logs / f"{name}.log").open("wb") as log:
            return subprocess.Popen([COMMAND, *arguments], stdout=log, stderr=subprocess.STDOUT)

    def join(self, role: str, name: str) -> None:
        self.say(f"{name} starts")
        self.workers[name] = self.start(name, "worker", "--role", role, "--name", name, "--run", self.run_dir)

    def kill(self, name: str) -> None:
        before, killed = self.steps(), time.monotonic()
        self.workers[name].kill()
        self.wait(lambda: self.steps() > before + 1)  # the step in work may have been committed already
        self.say(f"{name} was killed; two steps were done within {time.monotonic() - killed:.1f} s")

    def kill_controller(self) -> None:
        before, killed = self.steps(), time.monotonic()
        self.controller.kill()
        self.controller.wait()
        self.controller = self.start("controller-again", *self._command)
        self.wait(lambda: self.steps() > before + 1)
        self.say(
            f"the controller was killed and started again; two steps were done within {time.monotonic() - killed:.1f} s"
        )

    def scale(self, *wanted: str) -> None:
        done = subprocess.run([COMMAND, "scale", self.run_dir, *wanted], check=True, capture_output=True, text=True)
        for line in done.stdout.splitlines():
            self.say(f"scale {' '.join(wanted)}: {line}")

    def steps(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def ready(self) -> list[str]:
        members = json.loads((self.run_dir / "status.json").read_text())["members"]
        return [member["name"] for member in members if member["state"] == "ready"]

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if self.controller.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the run has ended or stands still: see {self._logs}")
            time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/elastic_llm"))
    parser.add_argument("--seed", type=int, default=0, help="of both runs")
    parser.add_argument("--only-prepare", action="store_true", help="write model and data, for three terminals")
    parser.add_argument("overrides", nargs="*", help="section.key=value for the GRPO run")
    arguments = parser.parse_args()
    directory: Path = arguments.dir
    paths = prepare(directory, seed=arguments.seed)
    if arguments.only_prepare:
        return
    show = Show(directory, f"run.seed={arguments.seed}", *paths, *arguments.overrides)
    try:
        play(show)
    finally:
        for process in (show.controller, *show.workers.values()):
            process.kill()


def prepare(directory: Path, *, seed: int) -> list[str]:
    """Write sums and a model, warm it up so that some answers are right, and return the recipe's keys for both."""
    train, test = write_sums(directory / "data")
    base = write_tiny_model(directory / "base", num_layers=2)
    overrides = [f"run.output_dir={directory / 'sft'}", f"model.path={base}", f"data.path={train}"]
    warm_up = run(
        HERE.parent / "llm_quickstart" / "sft.toml",
        [*overrides, f"run.seed={seed}", "run.max_steps=100"],
        overwrite=True,
    )
    if warm_up.interrupted:  # by Ctrl-C or SIGTERM, which ends one run
        raise SystemExit(130)
    assert warm_up.checkpoint is not None
    return [f"model.path={warm_up.checkpoint / 'policy'}", f"data.path={train}", f"eval.data.path={test}"]


def play(show: Show) -> None:
    show.wait((show.run_dir / "controller.json").exists)
    show.join("policy", "policy-a")
    show.join("policy", "policy-b")
    show.join("rollout", "rollout-a")
    show.join("rollout", "rollout-b")
    show.wait(lambda: show.steps() >= 8)
    show.kill("policy-a")
    show.join("policy", "policy-c")
    show.wait(lambda: "policy-c" in show.ready())
    show.say("policy-c is ready, with the state of policy-b")
    show.kill_controller()
    show.kill("policy-b")
    show.kill("rollout-a")
    show.join("rollout", "rollout-c")
    show.wait(lambda: "rollout-c" in show.ready())
    show.say("rollout-c is ready")
    show.scale("rollout=1")
    last = show.steps() + 10
    show.wait(lambda: show.steps() >= last)
    show.say("Ctrl-C at the controller: the policy finishes its step, saves, and all workers leave")
    show.controller.send_signal(signal.SIGINT)
    show.controller.wait(WAIT_S)
    finish(show)


def finish(show: Show) -> None:
    metrics = [json.loads(line) for line in (show.run_dir / "metrics.jsonl").open()]
    steps = [path.read_text().splitlines() for path in (show.run_dir / "rollouts").glob("step_*.jsonl")]
    samples = [{json.loads(line)["sample"] for line in step} for step in steps]
    show.say(f"{len(metrics)} steps, of {sum(map(len, samples))} samples; {len(set().union(*samples))} different ones")
    first, last = (fmean(line["reward_mean"] for line in part) for part in (metrics[:5], metrics[-5:]))
    show.say(f"reward {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
