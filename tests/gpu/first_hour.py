"""The first hour on a machine with GPUs: steps in order, each in a process of its own; `make gpu-first-hour`.

    .venv/bin/python tests/gpu/first_hour.py                    all steps that this machine can perform
    .venv/bin/python tests/gpu/first_hour.py --steps 0 3 4
    .venv/bin/python tests/gpu/first_hour.py --rehearse         tiny sizes, on a pretend GPU or the CPU

Writes gpu.json and gpu.md into benchmarks/out after every step. Exit code 1 if a step failed or missed a target.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "support"), str(HERE.parent / "shared")]

import torch  # noqa: E402
from gpu_hour import ROOT, Hour, Skipped, Step  # noqa: E402
from gpu_steps import STEPS, perform  # noqa: E402

OUT = ROOT / "benchmarks" / "out"
REHEARSAL_GPU = torch.device("cuda", 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Perform the steps, or with --result one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="*", choices=range(len(STEPS)), help="numbers; default: all")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, without a GPU")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of gpu.json and gpu.md")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    chosen = [step for step in STEPS if given.steps is None or step.number in given.steps]
    if given.result is not None:
        given.result.write_text(json.dumps(_performed(chosen[0], rehearse=given.rehearse)))
        return 0
    results = []
    for step in chosen:
        print(f"== {step.title}", flush=True)
        results.append({"step": step.number, "name": step.name, **_in_process(step, rehearse=given.rehearse)})
        print(f"   {results[-1]['outcome']} {results[-1].get('reason', '')}", flush=True)
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "gpu.json").write_text(json.dumps(results, indent=2) + "\n")
        (given.out / "gpu.md").write_text(page(results))
    print(f"written: {given.out / 'gpu.json'}, {given.out / 'gpu.md'}")
    return int(any(result["outcome"] in ("failed", "missed") for result in results))


def _in_process(step: Step, *, rehearse: bool) -> dict[str, Any]:
    """The result of a step in a process of its own: an error on a GPU ends all later work of its process."""
    if not rehearse and (reason := step.missing()):
        return {"outcome": "skipped", "reason": reason, "numbers": [], "notes": [], "seconds": 0.0}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--steps", str(step.number), "--result", str(file)]
        process = subprocess.Popen([*command, *(["--rehearse"] if rehearse else [])], start_new_session=True)
        reason = ""
        try:
            process.wait(timeout=step.timeout_s)
        except subprocess.TimeoutExpired:
            reason = f"took more than {step.timeout_s:g} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found = {"outcome": "failed", "reason": reason or f"its process ended with {process.returncode}"}
        found |= {"numbers": [], "notes": []} | (json.loads(file.read_text()) if file.exists() else {})
    return found | {"seconds": round(time.monotonic() - begun, 1)}


def _performed(step: Step, *, rehearse: bool) -> dict[str, Any]:
    """The result of a step in this process."""
    with tempfile.TemporaryDirectory() as folder:
        hour = Hour(device=REHEARSAL_GPU, directory=Path(folder), rehearsal=rehearse)
        outcome, reason = "passed", ""
        try:
            perform(step, hour)
            hour.judge()
        except Skipped as skipped:
            outcome, reason = "skipped", str(skipped)
        except AssertionError as missed:
            outcome, reason = "missed", str(missed)
        except Exception:  # it is the result
            outcome, reason = "failed", traceback.format_exc()
    return {"outcome": outcome, "reason": reason, **hour.result()}


def page(results: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown: a table of steps, then the numbers of each."""
    lines = ["# The first hour on GPUs", "", "| step | outcome | seconds |", "|---|---|---|"]
    lines += [f"| {r['step']} {r['name']} | {r['outcome']} | {r['seconds']:g} |" for r in results]
    for result in results:
        lines += ["", f"## {result['step']} {result['name']}: {result['outcome']}"]
        if result["numbers"]:
            lines += ["", "| number | value | unit | target | met |", "|---|---|---|---|---|"]
        for number in result["numbers"]:
            met = {None: "", True: "yes", False: "NO"}[number["met"]]
            cells = (number["metric"], f"{number['value']:,.4g}", number["unit"], number["target"], met)
            lines.append(f"| {' | '.join(cells)} |")
        if result["outcome"] in ("failed", "missed"):
            expects = " ".join(STEPS[result["step"]].expects.split())
            lines += ["", expects, "", "```", result["reason"].strip()[-4000:], "```"]
        elif result.get("reason"):
            lines += ["", result["reason"]]
        for note in result["notes"]:
            lines += ["", "```", note.strip(), "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
