"""What libraries say when they are imported and no user can act on."""

from __future__ import annotations

import logging


def quiet_torchao() -> None:
    """Keep out of the log what torchao says when it is imported: CUDA kernels that it cannot load here."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
