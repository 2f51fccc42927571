"""Weights from any trainer layout to any rollout layout, verified on arrival.

layout      who holds which part of which tensor
planning    who sends what to whom, and how near that is to the least possible
content     the bytes of a bucket: packed, hashed, encoded
wire        what two processes say to each other
transports  how buckets travel
publish     the trainer's side
pull        the engine's side
testing     the conformance suite of transports
doctor      which transports work on a machine, and how fast
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
    from cosmos_rl_transfer.layout.box import Box, whole_box
    from cosmos_rl_transfer.layout.manifest import Manifest, TensorLayout
    from cosmos_rl_transfer.layout.placement import Replicate, Shard
    from cosmos_rl_transfer.planning.plan import Plan, plan
    from cosmos_rl_transfer.planning.topology import Topology
    from cosmos_rl_transfer.publish.publisher import Publisher
    from cosmos_rl_transfer.pull.sources import published_specs
    from cosmos_rl_transfer.pull.subscriber import Subscriber
    from cosmos_rl_transfer.pull.two_phase import ReplicaMember, ReplicaSubscriber

_HOME = {
    "AuthenticationError": "errors",
    "LayoutError": "errors",
    "PeerLost": "errors",
    "TransferError": "errors",
    "WeightMismatch": "errors",
    "Box": "layout.box",
    "whole_box": "layout.box",
    "Manifest": "layout.manifest",
    "TensorLayout": "layout.manifest",
    "Replicate": "layout.placement",
    "Shard": "layout.placement",
    "Plan": "planning.plan",
    "Topology": "planning.topology",
    "plan": "planning.plan",
    "Publisher": "publish.publisher",
    "published_specs": "pull.sources",
    "Subscriber": "pull.subscriber",
    "ReplicaMember": "pull.two_phase",
    "ReplicaSubscriber": "pull.two_phase",
}

__all__ = [
    "AuthenticationError",
    "Box",
    "LayoutError",
    "Manifest",
    "PeerLost",
    "Plan",
    "Publisher",
    "ReplicaMember",
    "ReplicaSubscriber",
    "Replicate",
    "Shard",
    "Subscriber",
    "TensorLayout",
    "Topology",
    "TransferError",
    "WeightMismatch",
    "plan",
    "published_specs",
    "whole_box",
]


if not TYPE_CHECKING:  # a type checker takes the imports above, and so sees a misspelt name

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used, so that a bare import does not import torch."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
