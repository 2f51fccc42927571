"""uv.lock pins versions and holds no address: it works with any index."""

from __future__ import annotations

import re
from pathlib import Path

LOCK = (Path(__file__).parents[2] / "uv.lock").read_text()


def test_the_lock_names_no_address():
    assert "://" not in LOCK


def test_the_lock_names_no_path_of_a_machine():
    assert re.findall(r'= "(?:/|~|[A-Za-z]:\\)[^"]*"', LOCK) == []


def test_the_lock_still_pins_versions():
    assert 'name = "pydantic"' in LOCK
    assert len(re.findall(r'^version = "[0-9][^"]*"$', LOCK, flags=re.MULTILINE)) > 20
