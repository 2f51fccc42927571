"""Selects the family of a network by its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.models.classes import network_class
from cosmos_rl_wfm.models.networks.cosmos import Cosmos
from cosmos_rl_wfm.models.networks.family import Family
from cosmos_rl_wfm.models.networks.flow_transformer import FlowTransformer, Sana, StableDiffusion3
from cosmos_rl_wfm.models.networks.wan import Wan


def make_family(class_name: str, config: Mapping[str, Any]) -> Family:
    """Bind the family of a network's class to the network's configuration, defaults of the class included.

    Raises UserError for a network whose call is not supported.
    """
    row = network_class(class_name)
    name = "flow" if row is None else row.family
    if name == "wan":
        return Wan(config)
    if name == "cosmos":
        return Cosmos(config)
    import diffusers

    network = getattr(diffusers, class_name, None)
    if network is None:
        raise UserError(f"model: diffusers {diffusers.__version__} has no model class {class_name!r}")
    kinds = {"sd3": StableDiffusion3, "sana": Sana, "sana_video": Sana}
    return kinds.get(name, FlowTransformer)(config, network=network)
