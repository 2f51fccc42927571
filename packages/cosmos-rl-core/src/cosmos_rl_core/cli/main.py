"""The entry point of `cosmos-rl`: Ctrl-C while the command line is imported ends it as Ctrl-C in a command does."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process."""
    try:
        from cosmos_rl_core.cli.app import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201 - typer is not imported yet
        sys.exit(130)
