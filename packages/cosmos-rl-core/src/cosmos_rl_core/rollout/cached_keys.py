"""The keys and values of earlier tokens that a model of transformers takes, which its versions name differently."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature

from torch import nn


def cache_argument(model: nn.Module) -> str:
    """Return the argument of `model.forward` for a transformers `Cache`: "cache", "past_key_values" in older ones."""
    return _cache_argument(type(model).forward)


@cache
def _cache_argument(forward: Callable[..., object]) -> str:
    return "cache" if "cache" in signature(forward).parameters else "past_key_values"
