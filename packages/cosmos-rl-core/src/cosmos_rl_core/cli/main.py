"""The entry point of `cosmos-rl`: a run's workers begin to import before this process imports its command line."""

from __future__ import annotations

import sys
from contextlib import nullcontext

NO_RUN = {"--help", "--dry-run"}
"""Options with which `cosmos-rl run` starts no workers."""


def main() -> None:
    """Run the command line of this process. Ctrl-C before it has a command ends it as Ctrl-C in a command does."""
    try:
        _main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201 - typer is not imported yet
        sys.exit(130)


def _main() -> None:
    begins = sys.argv[1:2] == ["run"] and not NO_RUN.intersection(sys.argv)
    if begins:
        from cosmos_rl_core.workers.fork_server import opened
    with opened() if begins else nullcontext() as forks:
        from cosmos_rl_core.cli.app import main as run_command_line

        run_command_line(forks=forks)
