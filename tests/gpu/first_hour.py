"""The first hour on a machine with GPUs: steps in order, each in a process of its own; `make gpu-first-hour`.

    .venv/bin/python tests/gpu/first_hour.py                    all steps that this machine can perform
    .venv/bin/python tests/gpu/first_hour.py --minutes 45       as many as fit, those that prove most a minute first
    .venv/bin/python tests/gpu/first_hour.py --steps 0 3 4
    .venv/bin/python tests/gpu/first_hour.py --rehearse         tiny sizes, on a pretend GPU or the CPU

Prints the versions of driver, NCCL, torch and vLLM, and ends there if they cannot work together. Writes gpu.json and
gpu.md into benchmarks/out after every step. Exit code 1 if a step failed or missed a target, 2 for wrong versions.

A machine that can install nothing runs it from the checkout: `python3 tests/gpu/first_hour.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "support"), str(HERE.parent / "shared")]

from gpu_software import ROOT, Software, read_software, use_checkout  # noqa: E402

OUT = ROOT / "benchmarks" / "out"
if find_spec("cosmos_rl_core") is None:
    use_checkout(OUT / "checkout")

import torch  # noqa: E402
from gpu_hour import Hour, Skipped, Step  # noqa: E402
from gpu_steps import BY_NUMBER, STEPS, perform  # noqa: E402

from cosmos_rl_core.processes import kill_tree  # noqa: E402

REHEARSAL_GPU = torch.device("cuda", 0)
WRONG_VERSIONS = 2
Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The minutes of the hour. `clock` counts seconds from its start."""

    minutes: float | None
    """None: without an end."""
    clock: Callable[[], float]

    def seconds_of(self, step: Step) -> float:
        """Return the longest time that the step may take."""
        return step.timeout_s if self.minutes is None else min(step.timeout_s, 60 * self.minutes - self.clock())

    def refusal(self, step: Step) -> str:
        """Return why there is no time for the step; "" if there is."""
        if self.minutes is None or 60 * step.minutes <= 60 * self.minutes - self.clock():
            return ""
        left = max(0.0, self.minutes - self.clock() / 60)
        return f"no time left: it takes about {step.minutes:g} min, and {left:.1f} of {self.minutes:g} are left"


def main(arguments: Sequence[str] | None = None) -> int:
    """Perform the steps, or with --result one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="*", choices=sorted(BY_NUMBER), help="numbers; default: all")
    parser.add_argument("--minutes", type=float, help="skip steps that would take longer, by name; default: none")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, without a GPU")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of gpu.json and gpu.md")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    chosen = [step for step in STEPS if given.steps is None or step.number in given.steps]
    if given.result is not None:
        given.result.write_text(json.dumps(_performed(chosen[0], rehearse=given.rehearse)))
        return 0
    begun = time.monotonic()
    software = read_software(vllm=not given.rehearse)
    print(software.describe(), flush=True)
    if not given.rehearse and (problems := software.problems()):
        print("\n".join(["", "The first hour ends here:", *problems]), flush=True)
        return WRONG_VERSIONS
    limit = Limit(minutes=given.minutes, clock=lambda: time.monotonic() - begun)
    results: list[Result] = []
    for result in performed_in_order(chosen, software, limit=limit, rehearse=given.rehearse, run=_in_process):
        results.append(result)
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "gpu.json").write_text(json.dumps(results, indent=2) + "\n")
        (given.out / "gpu.md").write_text(page(results, software))
    print(f"written: {given.out / 'gpu.json'}, {given.out / 'gpu.md'}")
    return int(any(result["outcome"] in ("failed", "missed") for result in results))


def performed_in_order(
    steps: Sequence[Step], software: Software, *, limit: Limit, rehearse: bool, run: Callable[..., Result]
) -> Iterator[Result]:
    """Yield the result of each step; those that the machine cannot perform, or the time does not allow, are skipped.

    run: performs one, as `_in_process`.
    """
    for step in steps:
        print(f"== {step.title}", flush=True)
        if reason := step.missing(software, rehearsal=rehearse) or limit.refusal(step):
            result = {"outcome": "skipped", "reason": reason, "numbers": [], "notes": [], "seconds": 0.0}
        else:
            result = run(step, rehearse=rehearse, timeout_s=limit.seconds_of(step))
        print(f"   {result['outcome']} {result.get('reason', '')}", flush=True)
        yield {"step": step.number, "name": step.name, **result}


def _in_process(step: Step, *, rehearse: bool, timeout_s: float) -> Result:
    """The result of a step in a process of its own: an error on a GPU ends all later work of its process."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--steps", str(step.number), "--result", str(file)]
        process = subprocess.Popen([*command, *(["--rehearse"] if rehearse else [])], start_new_session=True)
        reason = ""
        try:
            process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            reason = f"took more than {timeout_s:.0f} s"
            kill_tree(process.pid)  # runs have sessions of their own
            process.wait()
        result = {"outcome": "failed", "reason": reason or f"its process ended with {process.returncode}"}
        result |= {"numbers": [], "notes": []} | (json.loads(file.read_text()) if file.exists() else {})
    return result | {"seconds": round(time.monotonic() - begun, 1)}


def _performed(step: Step, *, rehearse: bool) -> Result:
    """The result of a step in this process."""
    with tempfile.TemporaryDirectory() as folder:
        hour = Hour(device=REHEARSAL_GPU, directory=Path(folder), rehearsal=rehearse)
        outcome, reason = "passed", ""
        try:
            perform(step, hour)
        except Skipped as skipped:
            outcome, reason = "skipped", str(skipped)
        except Exception:  # it is the result
            outcome, reason = "failed", traceback.format_exc()
        else:
            if reason := hour.missed():
                outcome = "missed"
    return {"outcome": outcome, "reason": reason, **hour.result()}


def page(results: Sequence[Result], software: Software) -> str:
    """The results as Markdown: the versions, a table of steps, then the numbers of each."""
    lines = ["# The first hour on GPUs", "", "```", software.describe(), "```"]
    lines += ["", "| step | outcome | seconds |", "|---|---|---|"]
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
            expects = " ".join(BY_NUMBER[result["step"]].expects.split())
            lines += ["", expects, "", "```", result["reason"].strip()[-4000:], "```"]
        elif result.get("reason"):
            lines += ["", result["reason"]]
        for note in result["notes"]:
            lines += ["", "```", note.strip(), "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
