"""The dashboard over a large run: 20,000 steps of 40 metrics, 200,000 rollouts in 20,000 files, spans of 4 processes.

    .venv/bin/python benchmarks/dashboard.py [--quick]

A fresh server process for each round. With the package playwright and a Chromium the times are those of the browser,
from the request to the drawn view; otherwise those of the requests that the view makes. --quick: a tenth of the steps.
Needs the extra `dashboard`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path

from _metrics import Figure, report

STEPS, ROLLOUTS_A_STEP, METRICS, ROUNDS = 20_000, 10, 40, 3
VIEWS = {"curves": "canvas", "rollouts": "article", "timeline": "canvas", "members": "table"}
"""View -> element that shows that it is drawn."""
REQUESTS = {
    "curves": ("overview", "curves"),
    "rollouts": ("rollouts/files", "rollouts?step=0"),
    "timeline": ("timeline",),
    "members": ("members",),
}
PAINT_S, MEMORY_MB = 1.0, 300


def write_run(path: Path, *, steps: int) -> None:
    """Write a run of so many steps, as a run leaves it."""
    for folder in ("rollouts", "spans", "logs"):
        (path / folder).mkdir(parents=True)
    (path / "resolved.toml").write_text(f'[run]\nname = "large"\ndomain = "llm"\nmax_steps = {steps}\n')
    random_state = random.Random(0)
    with (path / "metrics.jsonl").open("w") as metrics:
        for step in range(steps):
            row = {"step": step, "policy_version": step + 1, "time_s": 2.0 * step, "terms": 1000.0}
            row |= {"reward_mean": step / steps + 0.1 * random_state.random(), "loss": random_state.gauss(0.0, 1.0)}
            names = (f"metric_{i:02d}" for i in range(METRICS - len(row)))
            row |= {name: math.sin(step / (i + 5)) + random_state.random() for i, name in enumerate(names)}
            metrics.write(json.dumps(row) + "\n")
            write_rollouts(path / "rollouts" / f"step_{step:06d}.jsonl", step)
    for process in ("policy-0", "rollout-0", "rollout-1", "rollout-2"):
        with (path / "spans" / f"{process}.jsonl").open("w") as spans:
            for step in range(steps):
                for name, dur in (("wait for batch", 0.9), ("forward_backward", 1.0), ("publish", 0.1)):
                    at, args = 1e9 + 2.0 * step, {"step": step}
                    line = {"name": name, "at": at, "dur": dur, "track": "compute", "args": args}
                    spans.write(json.dumps(line) + "\n")
    member = {"name": "policy-0", "role": "policy", "state": "ready", "age_s": 0.1, "version": steps}
    status = {"time": time.time(), "phase": "finished", "step": steps, "version": steps, "members": [member]}
    (path / "status.json").write_text(json.dumps({**status, "samples": {"committed": steps}, "waits": []}))


def write_rollouts(path: Path, step: int) -> None:
    lines = []
    for i in range(ROLLOUTS_A_STEP):
        reward = float(i % 2)
        line = {"sample": step, "response": f"answer {i} " * 20, "reward": reward, "rewards": {"exact": reward}}
        line |= {"advantage": 0.5, "versions": [step, step], "finish_reason": "stop", "num_terms": 60}
        lines.append(json.dumps(line | ({"prompt": f"question {step % 100}"} if i == 0 else {})))
    path.write_text("\n".join(lines) + "\n")


class Server:
    """A process of `cosmos-rl dashboard`."""

    def __init__(self, run_dir: Path) -> None:
        command = [str(Path(sys.executable).with_name("cosmos-rl")), "dashboard", str(run_dir), "--port", "0"]
        started = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        found = re.search(r"(http://\S+)/\?token=(\S+)", self._process.stdout.readline())
        assert found is not None, "the dashboard printed no address"
        self.start_s = time.perf_counter() - started
        self.base, self.token = found[1], found[2]

    def peak_mb(self) -> float:
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) / 1000

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def browser() -> Iterator[Callable[[Server], dict[str, float]] | None]:
    """Yield a function that times each view in a browser; None without one."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        chromium = None
    if chromium is None:
        yield None
        return
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])

        def timed(server: Server) -> dict[str, float]:
            context = opened.new_context()
            page = context.new_page()
            page.set_default_timeout(120_000)
            found = {}
            for number, (view, element) in enumerate(VIEWS.items()):
                place = f"/?token={server.token}" if number == 0 else "/"
                begun = time.perf_counter()
                page.goto(f"{server.base}{place}#/run/large/{view}")
                page.locator(f"main {element}").first.wait_for(state="visible")
                found[view] = time.perf_counter() - begun
            begun = time.perf_counter()
            page.goto(f"{server.base}/#/run/large/rollouts?step=7")
            page.get_by_role("button", name="Through time").first.click()
            page.get_by_role("region", name="One prompt through time").get_by_role("link").last.wait_for()
            found["prompt"] = time.perf_counter() - begun
            context.close()
            return found

        yield timed
        opened.close()


def requested(server: Server) -> dict[str, float]:
    """Time the requests of each view."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    opener.open(f"{server.base}/?token={server.token}").read()
    found = {}
    for view, paths in {**REQUESTS, "prompt": (f"prompt?prompt={urllib.parse.quote('question 7')}",)}.items():
        begun = time.perf_counter()
        for path in paths:
            opener.open(f"{server.base}/api/run/large/{path}").read()
        found[view] = time.perf_counter() - begun
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, one round")
    quick = parser.parse_args().quick
    steps, rounds = (STEPS // 10, 1) if quick else (STEPS, ROUNDS)
    times: dict[str, list[float]] = {}
    starts, peaks = [], []
    with tempfile.TemporaryDirectory() as folder, browser() as in_browser:
        run_dir = Path(folder) / "large"
        write_run(run_dir, steps=steps)
        for _ in range(rounds):
            server = Server(run_dir)
            try:
                for view, seconds in (in_browser or requested)(server).items():
                    times.setdefault(view, []).append(seconds)
                starts.append(server.start_s)
                peaks.append(server.peak_mb())
            finally:
                server.close()
    how = "from the request to the drawn view, in Chromium" if in_browser else "of the requests alone"
    size = f"{steps:,} steps, {steps * ROLLOUTS_A_STEP:,} rollouts; {how}"
    median = {view: statistics.median(found) for view, found in times.items()}
    first = f"first paint: {next(iter(VIEWS))}"
    paint = f"<= {PAINT_S}"
    start, peak = statistics.median(starts), statistics.median(peaks)
    metrics = [
        Figure(metric="start of the server, until it prints its address", value=start, unit="s"),
        Figure(metric=first, value=median["curves"], unit="s", target=paint, note=size),
        *(
            Figure(metric=f"view: {view}", value=median[view], unit="s", target=paint)
            for view in VIEWS
            if view != "curves"
        ),
        Figure(metric="one prompt through all steps, the first time", value=median["prompt"], unit="s"),
        Figure(metric="peak memory of the server", value=peak, unit="MB", target=f"<= {MEMORY_MB}"),
    ]
    report("dashboard", metrics)


if __name__ == "__main__":
    main()
