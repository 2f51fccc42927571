"""Runs networks and autoencoders on fake tensors: measures their peak memory, and tries calls of unlisted networks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.offload.swap import tensors_of
from cosmos_rl_core.plan.live_bytes import LiveBytes, tensors_without_memory
from cosmos_rl_wfm.models.base import ClipSize, Condition
from cosmos_rl_wfm.models.codec import clips_at_once, make_codec, to_clips, to_video
from cosmos_rl_wfm.models.networks.families import make_family
from cosmos_rl_wfm.models.networks.family import Family
from cosmos_rl_wfm.models.weights import empty_network, with_defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecBytes:
    """Memory of an autoencoder."""

    weights: int
    encode: int
    """Peak beside the weights, to encode as many clips as are taken together."""
    decode: int
    """Peak beside the weights, to decode as many clips as are taken together into pixels."""


_STEADY = 4
"""Latent frames from which on another one adds as much to the memory of an autoencoder as the one before."""


def codec_bytes(
    class_name: str,
    config: Mapping[str, Any],
    *,
    dtype: str,
    tiling: bool,
    size: ClipSize,
    latents: tuple[int, int, int, int],
) -> CodecBytes:
    """Return the memory of an autoencoder of diffusers for clips of `size`, with latents [C, f, h, w]."""
    return _codec_bytes(class_name, json.dumps(config, sort_keys=True), dtype, tiling, size, latents)


@cache
def _codec_bytes(
    class_name: str, config: str, dtype: str, tiling: bool, size: ClipSize, latents: tuple[int, int, int, int]
) -> CodecBytes:
    clips = clips_at_once(size.frames * size.height * size.width)
    with tensors_without_memory():
        vae = empty_network(class_name, json.loads(config), dtype=getattr(torch, dtype))
        codec = make_codec(vae, tiling=tiling)
        weights = sum(tensor.nbytes for tensor in [*vae.parameters(), *vae.buffers()])

        def peaks(latent_frames: int, *, encode: Any = codec.encode, decode: Any = codec.decode) -> tuple[int, int]:
            frames = 1 + (latent_frames - 1) * ((size.frames - 1) // max(1, latents[1] - 1))
            with LiveBytes(without=tensors_of(vae)) as encoding:
                encode(to_clips(torch.zeros(clips, frames, size.height, size.width, 3, dtype=torch.uint8)))
            with LiveBytes(without=tensors_of(vae)) as decoding:
                to_video(decode(torch.zeros(clips, latents[0], latent_frames, *latents[2:])))
            return encoding.peak, decoding.peak

        # A long clip is not run as a whole: from _STEADY latent frames on each further one adds the same, so that the
        # difference of the last two counts is extrapolated. Conversions to and from pixels take the clip at once, and
        # are measured at its full length.
        peak_bytes = peaks(min(latents[1], _STEADY))
        if more := max(0, latents[1] - _STEADY):
            pixels = torch.zeros(clips, 3, size.frames, size.height, size.width, dtype=vae.dtype)
            converted = peaks(latents[1], encode=lambda clips: clips, decode=lambda _: pixels.clone().float())
            grown = [now + more * (now - before) for now, before in zip(peak_bytes, peaks(_STEADY - 1), strict=True)]
            peak_bytes = [max(both) for both in zip(grown, converted, strict=True)]
    encode, decode = peak_bytes
    return CodecBytes(weights=weights, encode=encode, decode=decode)


def encoder_numbers(class_name: str, config: Mapping[str, Any]) -> int | None:
    """Return the number of parameters of an encoder of transformers; None if it has no class of that name."""
    return _encoder_numbers(class_name, json.dumps(config, sort_keys=True))


@cache
def _encoder_numbers(class_name: str, config: str) -> int | None:
    import transformers

    kind = getattr(transformers, class_name, None)
    if kind is None:
        return None
    with torch.device("meta"):
        encoder = kind(kind.config_class.from_dict(json.loads(config)))
    return sum(parameter.numel() for parameter in encoder.parameters())


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
        with LiveBytes(without=tensors_of(network)) as live:
            condition = Condition(
                text=torch.zeros(captions, text_length, family.text_width),
                text_mask=torch.ones(captions, text_length, dtype=torch.bool),
                pooled=None if family.pooled_width is None else torch.zeros(samples, family.pooled_width),
                text_rows=torch.zeros(samples, dtype=torch.int64),
            )
            family.velocity(network, torch.zeros(samples, *latents), torch.ones(samples), condition)
    return live.peak + sum(buffer.nbytes for buffer in network.buffers())  # such as tables of positions


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
            velocity = family.velocity(network, latents, torch.ones(1), _condition(family))
        except UserError:
            raise
        except _OF_A_NETWORK as error:
            raise UserError(
                f"model: {class_name} cannot be made from this configuration, or cannot be called with only latents, "
                f"times and text: {_words(error)}"
            ) from error
    if velocity.shape != latents.shape:
        raise UserError(
            f"model: {class_name} makes {list(velocity.shape)} of latents {list(latents.shape)}, where a velocity has "
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
