"""Weights from any trainer layout to any rollout layout, verified on arrival.

layout      the part of each tensor that each rank holds
planning    the transfers between ranks, and their volume beside the least possible
content     the bytes of a bucket: packed, hashed, encoded
wire        the messages between two processes
transports  shared memory, TCP, NIXL and collectives for buckets
publish     the trainer's side
pull        the engine's side
testing     the conformance suite of transports
doctor      a test of the transports of a machine, with their speed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cosmos_rl_core.imports import lazy_exports

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
    from cosmos_rl_transfer.planning.plan import TransferPlan, plan
    from cosmos_rl_transfer.planning.topology import Topology
    from cosmos_rl_transfer.publish.publisher import Publisher
    from cosmos_rl_transfer.pull.sources import published_specs
    from cosmos_rl_transfer.pull.subscriber import Subscriber
    from cosmos_rl_transfer.pull.two_phase import ReplicaMember, ReplicaSubscriber

_HOMES = {
    "errors": (
        "AuthenticationError",
        "LayoutError",
        "PeerLost",
        "TransferError",
        "WeightMismatch",
    ),
    "layout.box": (
        "Box",
        "whole_box",
    ),
    "layout.manifest": (
        "Manifest",
        "TensorLayout",
    ),
    "layout.placement": (
        "Replicate",
        "Shard",
    ),
    "planning.plan": (
        "TransferPlan",
        "plan",
    ),
    "planning.topology": ("Topology",),
    "publish.publisher": ("Publisher",),
    "pull.sources": ("published_specs",),
    "pull.subscriber": ("Subscriber",),
    "pull.two_phase": (
        "ReplicaMember",
        "ReplicaSubscriber",
    ),
}
"""Public names by the module that defines them."""

__all__ = [
    "AuthenticationError",
    "Box",
    "LayoutError",
    "Manifest",
    "PeerLost",
    "Publisher",
    "ReplicaMember",
    "ReplicaSubscriber",
    "Replicate",
    "Shard",
    "Subscriber",
    "TensorLayout",
    "Topology",
    "TransferError",
    "TransferPlan",
    "WeightMismatch",
    "plan",
    "published_specs",
    "whole_box",
]

if not TYPE_CHECKING:  # a type checker uses the imports above, and so reports a misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
