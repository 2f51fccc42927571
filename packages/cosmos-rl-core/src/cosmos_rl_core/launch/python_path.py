"""Where "module:attribute" names of a recipe are looked up."""

from __future__ import annotations

import sys
from pathlib import Path


def import_from(recipe: Path) -> tuple[str, str]:
    """Let "module:attribute" name a file beside the recipe or in the current directory; return the two."""
    beside, here = str(recipe.resolve().parent), str(Path.cwd())
    sys.path.insert(0, beside)
    sys.path.append(here)
    return beside, here
