"""The entry point of `cosmos-rl`: signals while the command line is imported end it as they do in a command."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line of this process."""
    if os.getpid() == 1:  # of a container: Linux drops signals to it for which it has no handler
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    try:
        from cosmos_rl_core.cli.app import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201 - typer is not imported yet
        sys.exit(130)
