"""Measures the peak memory of networks and autoencoders by running them on fake tensors.

    with tensors_without_memory(), PeakBytes(beside=vae) as held:
        vae.decode(latents)
    held.peak

Only shapes are computed: a clip at its full size takes seconds. Workspace of kernels is not counted.
"""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cosmos_rl_wfm.models.base import Condition, Size
from cosmos_rl_wfm.models.codec import make_codec, to_clips, to_video
from cosmos_rl_wfm.models.networks.families import make_family
from cosmos_rl_wfm.models.weights import empty_network


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the outputs of operations within the context, while any tensor uses their storage."""

    def __init__(self, *, beside: nn.Module) -> None:
        """beside: a module whose parameters and buffers, and views of them, are not counted."""
        super().__init__()
        self._held = {id(tensor.untyped_storage()): 0 for tensor in [*beside.parameters(), *beside.buffers()]}
        self._now = 0
        self.peak = 0
        """Largest number of bytes in use at once."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        self.peak = max(self.peak, self._now)
        return found

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._held:
            self._held[key] = storage.nbytes()
            self._now += storage.nbytes()
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._now -= self._held.pop(key)


@contextmanager
def tensors_without_memory() -> Iterator[None]:
    """Within the context, tensors have only shapes and dtypes, no data."""
    with warnings.catch_warnings(), FakeTensorMode(), torch.no_grad():
        warnings.simplefilter("ignore")  # from code that reads the memory of its tensors
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecBytes:
    """Memory of an autoencoder."""

    weights: int
    encode: int
    """Peak beside the weights, to encode a clip."""
    decode: int
    """Peak beside the weights, to decode a clip into pixels."""


def codec_bytes(
    class_name: str, config: Mapping[str, Any], *, dtype: str, size: Size, latents: tuple[int, int, int, int]
) -> CodecBytes:
    """Return the memory of an autoencoder of diffusers for one clip of `size`, with latents [C, f, h, w]."""
    return _codec_bytes(class_name, json.dumps(config, sort_keys=True), dtype, size, latents)


@cache
def _codec_bytes(
    class_name: str, config: str, dtype: str, size: Size, latents: tuple[int, int, int, int]
) -> CodecBytes:
    with tensors_without_memory():
        vae = empty_network(class_name, json.loads(config), dtype=getattr(torch, dtype))
        codec = make_codec(vae)
        with PeakBytes(beside=vae) as decoding:
            to_video(codec.decode(torch.zeros(1, *latents)))
        with PeakBytes(beside=vae) as encoding:
            codec.encode(to_clips(torch.zeros(1, size.frames, size.height, size.width, 3, dtype=torch.uint8)))
    return CodecBytes(weights=bytes_of(vae), encode=encoding.peak, decode=decoding.peak)


def network_bytes(
    class_name: str,
    config: Mapping[str, Any],
    *,
    dtype: str,
    latents: tuple[int, int, int, int],
    samples: int,
    captions: int,
    text_length: int,
) -> int:
    """Return the bytes of a forward pass over `samples` beside the parameters, without gradients."""
    with tensors_without_memory():
        network = empty_network(class_name, config, dtype=getattr(torch, dtype))
        family = make_family(class_name, network.config)
        with PeakBytes(beside=network) as held:
            condition = Condition(
                text=torch.zeros(captions, text_length, family.text_width),
                text_mask=torch.ones(captions, text_length, dtype=torch.bool),
                pooled=None if family.pooled_width is None else torch.zeros(samples, family.pooled_width),
                text_rows=torch.zeros(samples, dtype=torch.int64),
            )
            family.velocity(network, torch.zeros(samples, *latents), torch.ones(samples), condition)
    return held.peak + sum(buffer.nbytes for buffer in network.buffers())  # such as tables of positions


def bytes_of(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers."""
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
