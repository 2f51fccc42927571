import subprocess
import sys
from pathlib import Path

import pytest

import cosmos_rl_transfer


def test_the_example_in_the_readme_runs():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    exec(compile(example, "README.md", "exec"), {})


def test_a_bare_import_does_not_import_torch():
    code = "import sys, cosmos_rl_transfer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("name", cosmos_rl_transfer.__all__)
def test_every_public_name_is_there(name):
    assert getattr(cosmos_rl_transfer, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Publihser'"):
        _ = cosmos_rl_transfer.Publihser
