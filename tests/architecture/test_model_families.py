"""docs/families.md is what comes out when every causal language model of transformers is tried, on one rank and two."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AXES = ("dp_shard", "tp", "cp", "pp", "ep")
KINDS = ("axk1", "gemma3n_text", "gpt_neox", "lfm2_moe", "qwen2_moe", "qwen3", "zamba2")
"""For each axis at least one that is right and one that is refused."""


def families(*arguments):
    command = [sys.executable, ROOT / "scripts/model_families.py", "--check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_family_of_transformers_is_right_or_refused_and_the_page_is_current():
    families()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_families_over_two_ranks_of_each_axis_are_right_or_refused_as_the_page_says():
    families(*(f"--over={axis}" for axis in AXES), *KINDS)
