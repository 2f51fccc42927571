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


def matches(shown, printed):
    """Whether each line of the page was printed, in this order, whatever its numbers."""
    lines = iter(shape_of(line) for line in printed.splitlines())
    return [line for line in shown if not line.startswith("...") and shape_of(line) not in lines]


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
    printed, started = {}, False
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
            if named[1] == "demo.py" and not started:
                started = output("python demo.py")
        elif block.text.startswith("error:"):
            assert told_of_a_typo(tmp_path) == block.text
        elif block.language == "console":
            for command, *shown in (part.splitlines() for part in block.text.split("$ ")[1:]):
                if "dashboard" in command:
                    assert "http://127.0.0.1:" in address_of_dashboard(command, tmp_path)
                else:
                    assert matches(shown, output(command)) == []
    assert re.search(r"held-out reward_mean +[\d.]+ -> (1\.000|0\.9\d+)", started)
    before, after = re.findall(r"held-out reward_mean +([\d.]+) -> ([\d.]+)", printed["cosmos-rl run mine/minus.toml"])[
        0
    ]
    assert float(after) > float(before) + 0.2
    assert printed["python answer.py"].startswith("83<unk>36=")
