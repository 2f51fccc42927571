"""What `cosmos-rl status` shows, as a file written whole once a second."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cosmos_rl_core.control import waits

if TYPE_CHECKING:
    from cosmos_rl_core.control.server import Controller


def write_status(path: Path, controller: Controller, *, phase: str) -> None:
    """Replace `path` with the present members, sample counts and waits."""
    ledger = controller.ledger
    now = controller.clock()
    status = {
        "time": time.time(),
        "pid": os.getpid(),
        "phase": phase,
        "step": ledger.next_step,
        "version": ledger.version,
        "members": [
            {
                "name": peer.name,
                "role": peer.role,
                "state": ledger.members.by_name[peer.name].state.value,
                "age_s": round(now - peer.heard_at, 1),
                "progress": peer.progress,
            }
            for peer in controller.peers.by_name.values()
        ],
        "samples": ledger.counts(),
        "waits": waits.lines(ledger) + controller.waits(),
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(status))
    temporary.replace(path)
