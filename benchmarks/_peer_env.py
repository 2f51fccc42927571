"""Environments of a comparison's two sides, made on demand and kept: .cache/NAME, ignored by git."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

TRL = "trl==1.16.0"
SB3 = "stable-baselines3==2.9.2"
PACKAGES = Path(__file__).resolve().parents[1] / "packages"
_LAST_LINES = 5


def peer_python(requirement: str, root: Path) -> Path | str:
    """Return the interpreter of an environment with a peer and our version of torch, or why there is none."""
    return _python([requirement], root, wanted=requirement)


def our_python(names: Sequence[str], root: Path) -> Path | str:
    """Return the interpreter of an environment with these packages of ours and what they require, or why not."""
    folders = [PACKAGES / name for name in names]
    contents = hashlib.sha256(b"".join((folder / "pyproject.toml").read_bytes() for folder in folders))
    editable = [part for folder in folders for part in ("--editable", str(folder))]
    return _python(editable, root, wanted=f"{' '.join(names)} {contents.hexdigest()[:8]}")


def _python(requirements: Sequence[str], root: Path, *, wanted: str) -> Path | str:
    python = root / "bin" / "python"
    torch = f"torch=={version('torch').partition('+')[0]}"
    stamp = root / ".installed"
    if stamp.exists() and stamp.read_text() == f"{wanted} {torch}":
        return python
    print(f"installing {wanted} and {torch} into {root} (once) ...", flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(root)],
        [*pip, torch],  # first and alone, so that pip's find-links may offer a build for the CPU
        [*pip, *requirements, torch],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            said = " / ".join((done.stderr or done.stdout).strip().splitlines()[-_LAST_LINES:])
            return f"{wanted} could not be installed into {root}: {said}"
    stamp.write_text(f"{wanted} {torch}")
    return python
