"""The example in this package's README runs as it stands."""

import json
from pathlib import Path


def test_the_example_in_the_readme_scores_an_answer(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    example = text.split("```python\n")[1].split("```")[0]
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "6 x 7?", "answer": "42"}) + "\n")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == "[1.0]\n"
