"""What a newcomer does first: the example in this package's README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.ci
def test_the_example_in_the_readme_learns_to_reach_the_square(tmp_path, monkeypatch, capsys):
    example = README.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    found = re.search(r"reward (-?[\d.]+) -> ([\d.]+)\n$", capsys.readouterr().out)
    assert found
    assert float(found[2]) > float(found[1]) + 0.5
    assert list((tmp_path / "runs/reach/media").rglob("*.mp4"))
