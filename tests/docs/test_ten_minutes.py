"""docs/ten_minutes.md, from its first line to its last: its files are written and its commands run, in its order."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks_of

BIN = Path(sys.executable).parent
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def programs(command):
    """The words of a command, with the programs of this environment."""
    name, *rest = shlex.split(command)
    return [str(BIN / name), *rest]


def address_of_dashboard(command, directory):
    """Start the dashboard, read its first line, and end it as Ctrl-C does."""
    server = subprocess.Popen(
        [*programs(command), "--port", "0"], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert server.stdout is not None
    printed = next((line for line in server.stdout if "http://" in line), "")
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=60)
    return printed


def shape_of(line):
    """A line without its numbers."""
    return NUMBER.sub("#", line).strip()


def tolerance(line, number):
    """How far a number of a line may be from the page's: rewards and answers differ from processor to processor.

    The last bits of a product decide when the warm-up's loss falls (cookbook/llm_quickstart), so its effect is wide.
    """
    if "wall time" in line:
        return float("inf")
    if "held-out" in line or line.lstrip().startswith("reward ") or "on held-out rows" in line:
        return 0.35
    if line.lstrip().startswith("loss "):
        return max(0.1, 0.8 * number)
    if line.isdigit() or "<eos>" in line:  # a number that the model generates
        return float("inf")
    return (0.1 if "trained terms" in line else 0.02) * number  # answers are as long as the model makes them


def same_numbers(shown, printed):
    """Whether two lines of one shape have the same numbers, each within its tolerance."""
    pairs = zip(numbers_of(shown), numbers_of(printed), strict=True)
    return all(abs(page - run) <= tolerance(shown, page) for page, run in pairs)


def numbers_of(line):
    return [float(number.replace(",", "")) for number in NUMBER.findall(line)]


def missing_lines(shown, printed):
    """The page's lines that were not printed, in this order, with numbers within their tolerance."""
    lines = iter(printed.splitlines())
    return [
        line
        for line in shown
        if not line.startswith("...")
        and not any(shape_of(line) == shape_of(other) and same_numbers(line, other) for other in lines)
    ]


def test_a_page_with_numbers_of_another_run_is_noticed():
    shown = "  held-out reward_mean  0.740 -> 1.000\n  steps 350\n  wall time  96.0 s".splitlines()
    assert missing_lines(shown, "  held-out reward_mean  0.800 -> 0.990\n  steps 350\n  wall time  9.1 s") == []
    assert missing_lines(shown[:1], "  held-out reward_mean  0.165 -> 0.900") == shown[:1]
    assert missing_lines(shown[1:2], "  steps 450") == shown[1:2]


def told_of_a_typo(directory):
    """The report of check --deep on a reward with a typo."""
    rewards = directory / "mine/my_rewards.py"
    right = rewards.read_text()
    rewards.write_text(right.replace('row["answer"]', 'row["answr"]'))
    command = programs("cosmos-rl check --deep mine/minus.toml")
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300)
    rewards.write_text(right)
    assert done.returncode == 2
    return done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_page_from_top_to_bottom(tmp_path):
    printed, started = {}, ""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

    def output(command):
        done = subprocess.run(
            programs(command), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        printed[command] = done.stdout
        return done.stdout

    for block in blocks_of(ROOT / "docs/ten_minutes.md"):
        if named := re.match(r"# ([\w/]+\.(?:py|toml))\n", block.text):
            (tmp_path / named[1]).parent.mkdir(exist_ok=True)
            (tmp_path / named[1]).write_text(block.text)
            if named[1] == "demo.py":
                started = output("python demo.py")
        elif block.text.startswith("...\nsft: done"):
            assert missing_lines(block.text.splitlines(), started) == [], started
        elif block.text.startswith("error:"):
            assert told_of_a_typo(tmp_path) == block.text
        elif block.language == "console":
            for command, *shown in (part.splitlines() for part in block.text.split("$ ")[1:]):
                if "dashboard" in command:
                    assert "http://127.0.0.1:" in address_of_dashboard(command, tmp_path)
                else:
                    assert missing_lines(shown, output(command)) == [], printed[command]
    assert re.search(r"held-out reward_mean +[\d.]+ -> (1\.000|0\.9\d+)", started)
    before, after = re.findall(r"held-out reward_mean +([\d.]+) -> ([\d.]+)", printed["cosmos-rl run mine/minus.toml"])[
        0
    ]
    assert float(after) > float(before) + 0.2
    assert printed["python answer.py"].startswith("83<unk>36=")
