"""docs/families.md is what comes out when every causal language model of transformers is tried."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_family_of_transformers_is_right_or_refused_and_the_page_is_current():
    command = [sys.executable, ROOT / "scripts/model_families.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
