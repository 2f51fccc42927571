"""The transformer blocks of a network: what is recomputed, compiled, offloaded and gathered as one."""

from __future__ import annotations

from torch import nn

from cosmos_rl_core.errors import UserError


def transformer_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the blocks of a diffusers transformer, in the order they run.

    They are those members of its module lists whose classes it declares indivisible (`_no_split_modules`); for a
    network that declares none, the members of its longest list. Raises UserError for a network without a list.
    """
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    declared = set(getattr(network, "_no_split_modules", None) or ())
    if blocks := [block for members in lists for block in members if type(block).__name__ in declared]:
        return blocks
    if not lists:
        raise UserError(
            f"{type(network).__name__} has no list of transformer blocks, so that it can neither be sharded nor "
            "recomputed by blocks; choose one of diffusers' transformers"
        )
    return list(max(lists, key=len))
