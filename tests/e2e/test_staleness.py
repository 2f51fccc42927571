"""The bound on staleness holds while three replicas generate at different speeds, and asynchrony makes use of it."""

import sys

import pytest

from cosmos_rl_core import run

UNEVEN = """
from cosmos_rl_core.testing.tiny import Tiny

class Uneven(Tiny):
    def __init__(self):
        self.delays = iter([0.0, 0.01, 0.04])

    def build_engine(self, model, *, data, name, options):
        return super().build_engine(model, data=data, name=name, options={"delay_s": next(self.delays)})

DOMAIN = Uneven()
"""
STEPS = 15


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_step_trains_on_terms_older_than_the_bound(max_staleness, tmp_path, bandit, one_thread, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / f"uneven{max_staleness}.py").write_text(UNEVEN)
    tables = bandit(
        tmp_path / "run",
        run__domain=f"uneven{max_staleness}:DOMAIN",
        run__placement="inline",
        run__max_steps=STEPS,
        rollout__replicas=3,
        sync__max_staleness=max_staleness,
    )
    result = run(tables, python_path=[str(tmp_path)])
    seen = [line["staleness_max"] for line in result.metrics]
    assert len(seen) == STEPS
    assert max(seen) <= max_staleness
    assert (max(seen) > 0) == (max_staleness > 0)
