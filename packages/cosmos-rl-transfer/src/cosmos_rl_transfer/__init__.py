"""Weights from any trainer layout to any rollout layout, verified on arrival.

The planner is `cosmos_rl_transfer.plan.plan`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cosmos_rl_transfer.errors import (
        AuthenticationError,
        LayoutError,
        PeerLost,
        TransferError,
        WeightMismatch,
    )
    from cosmos_rl_transfer.layout import Box, Manifest, Replicate, Shard
    from cosmos_rl_transfer.plan import Plan
    from cosmos_rl_transfer.publisher import Publisher
    from cosmos_rl_transfer.subscriber import Subscriber

_HOME = {
    "AuthenticationError": "errors",
    "LayoutError": "errors",
    "PeerLost": "errors",
    "TransferError": "errors",
    "WeightMismatch": "errors",
    "Box": "layout",
    "Manifest": "layout",
    "Replicate": "layout",
    "Shard": "layout",
    "Plan": "plan",
    "Publisher": "publisher",
    "Subscriber": "subscriber",
}

__all__ = [
    "AuthenticationError",
    "Box",
    "LayoutError",
    "Manifest",
    "Plan",
    "Publisher",
    "PeerLost",
    "Replicate",
    "Shard",
    "Subscriber",
    "TransferError",
    "WeightMismatch",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that a bare import does not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
