"""docs/recipes.md says what the models say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_all_keys_is_current():
    command = [sys.executable, ROOT / "scripts/recipe_reference.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
