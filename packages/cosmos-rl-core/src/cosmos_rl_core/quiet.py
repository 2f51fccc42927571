"""Silences log lines of libraries at import that no user can act on."""

from __future__ import annotations

import logging


def quiet_torchao() -> None:
    """Keep torchao's log lines at import out of the log: CUDA kernels that it cannot load here."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
