"""Cosmos networks and pipelines of diffusers in environments without torchvision.

They use torchvision for two small functions: to resize the padding mask to the latents, and to convert an image to a
tensor. CPU builds of torchvision are not on PyPI, and nothing else here needs it.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

_NETWORK = "diffusers.models.transformers.transformer_cosmos"
_PIPELINE = "diffusers.pipelines.cosmos.pipeline_cosmos2_5_predict"
_LOCK = threading.Lock()
_inside = 0
"""Calls in progress, over all threads: the stand-ins are removed when the last one ends."""


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Give diffusers' Cosmos modules stand-ins for torchvision; nothing changes where it is installed."""
    global _inside
    from diffusers.utils import is_torchvision_available

    if is_torchvision_available():
        yield
        return
    modules = [(importlib.import_module(_NETWORK), "transforms"), (importlib.import_module(_PIPELINE), "torchvision")]
    with _LOCK:
        _inside += 1
        for module, name in modules:
            setattr(module, name, _TRANSFORMS if name == "transforms" else _TORCHVISION)
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                for module, name in modules:
                    delattr(module, name)


def _resize(image: Tensor, size: Sequence[int], interpolation: Any = None) -> Tensor:
    """[..., C, H, W] -> [..., C, *size] by the nearest pixel, the only mode that Cosmos uses."""
    assert interpolation in (None, _NEAREST)
    return F.interpolate(image, size=tuple(size), mode="nearest")


def _to_tensor(image: Image) -> Tensor:
    """A PIL image -> float32 [C, H, W] in [0, 1]."""
    pixels = np.asarray(image, dtype=np.float32) / 255.0
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)


_NEAREST = "nearest"
_TRANSFORMS = SimpleNamespace(
    functional=SimpleNamespace(resize=_resize, to_tensor=_to_tensor),
    InterpolationMode=SimpleNamespace(NEAREST=_NEAREST),
)
_TORCHVISION = SimpleNamespace(transforms=_TRANSFORMS)
