"""Keep names, versions, dependencies and markers of a uv.lock; drop everything that names an index or a file."""

import re
import sys
from pathlib import Path


def neutral(text: str) -> str:
    text = re.sub(r'source = \{ registry = "[^"]*" \}', 'source = { registry = "." }', text)
    text = re.sub(r"^sdist = .*\n", "", text, flags=re.M)
    text = re.sub(r"^wheels = \[\n(?:.*\n)*?\]\n", "", text, flags=re.M)
    text = re.sub(r"^\[package\.metadata[^\n]*\]\n(?:(?!\[)[^\n]*\n)*", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(neutral(path.read_text()))
