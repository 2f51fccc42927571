"""Checks with one forward pass on fake tensors that a network accepts the call of its family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.models.base import Condition
from cosmos_rl_wfm.models.dry_run import tensors_without_memory
from cosmos_rl_wfm.models.networks.families import make_family
from cosmos_rl_wfm.models.networks.family import Family
from cosmos_rl_wfm.models.weights import empty_network, with_defaults

_TOKENS = 8
_PLACES = 8
"""Tokens along each side of the latents that are tried."""
_OF_A_NETWORK = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
    ZeroDivisionError,
)
"""Errors that networks of diffusers raise for unsupported inputs or configurations."""


def try_forward(class_name: str, config: Mapping[str, Any]) -> None:
    """Build the network at its own size and call it once; nothing is allocated and nothing is computed.

    Raises UserError, with the network's own message, where it cannot be called with only latents, times and text, or
    does not return a velocity.
    """
    with tensors_without_memory():
        try:
            family = make_family(class_name, with_defaults(class_name, config))
            network = empty_network(class_name, config, dtype=torch.float32)
            latents = torch.zeros(1, *_smallest(family))
            found = family.velocity(network, latents, torch.ones(1), _condition(family))
        except UserError:
            raise
        except _OF_A_NETWORK as error:
            raise UserError(
                f"model: {class_name} cannot be made from this configuration, or cannot be called with only latents, "
                f"times and text: {_words(error)}"
            ) from error
    if found.shape != latents.shape:
        raise UserError(
            f"model: {class_name} makes {list(found.shape)} of latents {list(latents.shape)}, where a velocity has "
            "their shape: it is no flow-matching network of them"
        )


def _smallest(family: Family) -> tuple[int, int, int, int]:
    frames, rows, columns = family.patch
    return family.channels, 1 if family.only_images else 2 * frames, _PLACES * rows, _PLACES * columns


def _condition(family: Family) -> Condition:
    return Condition(
        text=torch.zeros(1, _TOKENS, family.text_width),
        text_mask=torch.ones(1, _TOKENS, dtype=torch.bool),
        pooled=None if family.pooled_width is None else torch.zeros(1, family.pooled_width),
    )


def _words(error: Exception) -> str:
    """The first line of the error's message, or its class name where that is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
