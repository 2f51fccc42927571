"""Makes the test support of cosmos-rl-transfer importable: fault trials, the plan oracle, sample weights."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "packages/cosmos-rl-transfer/tests/support"))
