"""The example in this package's README runs as it stands."""

from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_the_example_in_the_readme_learns(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    example = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    before, after = capsys.readouterr().out.splitlines()[-1].split(" -> ")
    assert float(before) < 0.5 < 0.9 < float(after)
