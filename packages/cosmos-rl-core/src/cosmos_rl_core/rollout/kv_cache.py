"""The key-value cache of a transformers model: releases name the argument of `forward` differently."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature

from torch import nn


def cache_argument(model: nn.Module) -> str:
    """Return the name of the argument that takes a `Cache`: "cache" in transformers 5.24, "past_key_values" in 5.19."""
    return _cache_argument(type(model).forward)


@cache
def _cache_argument(forward: Callable[..., object]) -> str:
    return "cache" if "cache" in signature(forward).parameters else "past_key_values"
