"""Eight and four bit weights: what a trainer publishes to an engine that computes with them.

    scheme       values      scale of                      tensors beside X.weight        checkpoints it is named as in
    fp8          e4m3        the tensor, float32           X.weight_scale [1]             "fp8"
    fp8_channel  e4m3        a row, float32                X.weight_scale [N, 1]          compressed-tensors
    fp8_block    e4m3        128 x 128, float32            X.weight_scale_inv             DeepSeek-V3
    mxfp4        e2m1 pairs  32 in a row, e8m0             X.weight_packed, X.weight_scale   compressed-tensors
    nvfp4        e2m1 pairs  16 in a row, e4m3; and float32 of the tensor                 ModelOpt
                                                           X.weight_scale, X.weight_scale_2

e4m3, e2m1, e8m0 and MXFP4 are those of the OCP Microscaling Formats specification v1.0 (section 5.3, table 7;
sections 5.4.1 and 6.3), values rounded to the nearest, ties to even. FP8 and NVFP4 scales are found as vLLM finds
them, so that both sides make the same bits of the same weights.

The sender quantises where no tile of one scale is cut by two of its shards (`tiles_straddle`): half or a quarter of
the bytes travel and the work is spread. Otherwise whole-precision weights travel and the engine quantises them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.manifest import Box, TensorLayout

Scheme = Literal["fp8", "fp8_channel", "fp8_block", "mxfp4", "nvfp4"]

BLOCKS: dict[Scheme, tuple[int, int] | None] = {
    "fp8": None, "fp8_channel": None, "fp8_block": (128, 128), "mxfp4": (1, 32), "nvfp4": (1, 16),
}  # fmt: skip
"""Rows and columns under one scale; None where it takes a reduction over the whole tensor or row."""

_E4M3_MAX = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between neighbours of _E2M1."""
_E2M1_EXPONENT = 2
"""Of the largest e2m1 number, 6 = 1.5 * 2^2."""
_E8M0_BIAS = 127
_LEAST_SCALE = 1 / (_E4M3_MAX * 512)
"""vLLM's floor for scales of tensors and rows."""
_LEAST_BLOCK = 1e-4
"""vLLM's floor for the largest magnitude of a 128 x 128 block."""
_NOT_LINEAR = ("embed", "lm_head", "norm", ".gate.", ".router.")


def fp8(weight: Tensor, *, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return e4m3 values [N, K] and their scale float32 [1].

    `amax`: the largest magnitude of the whole tensor, where `weight` is a shard of it.
    """
    largest = weight.abs().amax() if amax is None else amax
    scale = (largest.float().reshape(1) / _E4M3_MAX).clamp(min=_LEAST_SCALE)
    return _e4m3(weight.float() * scale.reciprocal()), scale


def fp8_channel(weight: Tensor, *, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return e4m3 values [N, K] and a scale a row, float32 [N, 1]. `amax` [N, 1] as in `fp8`."""
    largest = weight.abs().amax(-1, keepdim=True) if amax is None else amax
    scale = (largest.float() / _E4M3_MAX).clamp(min=_LEAST_SCALE)
    return _e4m3(weight.float() * scale.reciprocal()), scale


def fp8_block(weight: Tensor, *, block: tuple[int, int] = (128, 128)) -> tuple[Tensor, Tensor]:
    """Return e4m3 values [N, K] and a scale a block, float32 [ceil(N / 128), ceil(K / 128)]; the last may be ragged."""
    rows, columns = weight.shape
    tiles = _tiled(weight.float(), block)
    scale = tiles.abs().amax((1, 3), keepdim=True).clamp(min=_LEAST_BLOCK) / _E4M3_MAX
    values = _e4m3(tiles * (1.0 / scale))
    whole = (tiles.shape[0] * block[0], tiles.shape[2] * block[1])
    return values.view(whole)[:rows, :columns].contiguous(), scale[:, 0, :, 0].contiguous()


def dequantize_fp8(values: Tensor, scale: Tensor, *, block: tuple[int, int] = (128, 128)) -> Tensor:
    """Return the float32 weights of `fp8`, `fp8_channel` or `fp8_block`, told apart by the shape of `scale`."""
    rows, columns = values.shape
    if scale.numel() == 1 or scale.shape == (rows, 1):
        return values.float() * scale
    return values.float() * scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return e2m1 pairs uint8 [..., K / 2] and e8m0 scales uint8 [..., K / 32].

    A block's scale is the power of two that puts its largest magnitude under 8; what is then above 6 becomes 6.
    """
    groups = _grouped(weight.float(), 32)
    largest = groups.abs().amax(-1)
    exponent = (torch.frexp(largest).exponent - 1 - _E2M1_EXPONENT).clamp(-_E8M0_BIAS, _E8M0_BIAS)
    exponent = torch.where(largest > 0, exponent, -_E8M0_BIAS)
    scale = torch.where(largest.isfinite(), exponent + _E8M0_BIAS, 255).to(torch.uint8)  # 255 is e8m0's NaN
    values = torch.ldexp(groups, -exponent[..., None])
    return pack_e2m1(values.flatten(-2)), scale


def dequantize_mxfp4(pairs: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 weights [..., K] of `mxfp4`."""
    groups = _grouped(unpack_e2m1(pairs), 32)
    exponent = scale.to(torch.int32) - _E8M0_BIAS
    weights = torch.ldexp(groups, exponent[..., None])
    return torch.where((scale == 255)[..., None], torch.nan, weights).flatten(-2)


def nvfp4(weight: Tensor, *, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return e2m1 pairs uint8 [..., K / 2], e4m3 scales [..., K / 16] and the tensor's scale float32 [].

    A weight is value * block scale * tensor scale. `amax` as in `fp8`.
    """
    largest = (weight.abs().amax() if amax is None else amax).float().reshape(())
    spread = torch.where(largest > 0, _E4M3_MAX * _E2M1[-1] / largest, 1.0)
    groups = _grouped(weight.float(), 16)
    scale = _e4m3(spread * (groups.abs().amax(-1) * (1 / _E2M1[-1])))
    step = scale.float() * (1.0 / spread)
    inverse = torch.where(step > 0, 1.0 / step, 0.0)
    return pack_e2m1((groups * inverse[..., None]).flatten(-2)), scale, 1.0 / spread


def dequantize_nvfp4(pairs: Tensor, scale: Tensor, tensor_scale: Tensor) -> Tensor:
    """Return the float32 weights [..., K] of `nvfp4`."""
    return (_grouped(unpack_e2m1(pairs), 16) * (scale.float() * tensor_scale)[..., None]).flatten(-2)


def pack_e2m1(values: Tensor) -> Tensor:
    """Round float32 [..., K] to e2m1 and return pairs uint8 [..., K / 2], the first of a pair in the low bits."""
    ties = torch.tensor(_E2M1_TIES, device=values.device)
    magnitude = values.abs()
    code = torch.bucketize(magnitude, ties)  # a tie goes down; codes are in the order of their values
    odd_tie = (code % 2 == 1) & (magnitude == ties[code.clamp(max=len(_E2M1_TIES) - 1)])
    code = code + odd_tie + 8 * torch.signbit(values)
    return (code[..., ::2] | code[..., 1::2] << 4).to(torch.uint8)


def unpack_e2m1(pairs: Tensor) -> Tensor:
    """Return the float32 values [..., K] of pairs uint8 [..., K / 2]."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=pairs.device)
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    return table[codes.int()]


def tiles_straddle(box: Box, block: tuple[int, int], *, shape: Sequence[int]) -> bool:
    """Say whether a box of a tensor of `shape` cuts a tile of one scale; tiles lie in the last two dims."""
    edges = zip((*box.offset[-2:], *box.end[-2:]), block * 2, tuple(shape[-2:]) * 2)
    return any(at % tile and at != size for at, tile, size in edges)


def sender_quantizes(layout: TensorLayout, scheme: Scheme) -> bool:
    """Say whether every rank of a trainer can quantise its part of a tensor alone."""
    block, boxes = BLOCKS[scheme], layout.boxes.values()
    if block is None:
        return all(box.shape == layout.spec.shape for box in boxes)
    return not any(tiles_straddle(box, block, shape=layout.spec.shape) for box in boxes)


def is_linear(name: str, weight: Tensor) -> bool:
    """Say whether a tensor is the matrix of a linear layer, which engines quantise; routers are left as they are."""
    return name.endswith(".weight") and weight.ndim == 2 and not any(part in name for part in _NOT_LINEAR)


def quantized(
    weights: Mapping[str, Tensor], scheme: Scheme, *, chosen: Callable[[str, Tensor], bool] = is_linear
) -> dict[str, Tensor]:
    """Return what to publish: `chosen` weights as values and scales, by the names of the table above; others as given.

    DTensors become DTensors, all ranks of their mesh calling this together. The result holds copies, which stay as
    they are while training goes on. Raises LayoutError for a weight whose rows do not split into blocks, or whose
    shards cut tiles.
    """
    from cosmos_rl_transfer.content.quantize_shards import is_sharded, quantized_shards

    published: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not chosen(name, weight):
            published[name] = weight
        elif is_sharded(weight):
            published |= quantized_shards(name, weight, scheme)
        else:
            published |= named(name, weight.detach(), scheme)
    return published


def named(name: str, weight: Tensor, scheme: Scheme, *, amax: Tensor | None = None) -> dict[str, Tensor]:
    """Return the values and scales of one weight by name; `amax` as in `fp8` and `fp8_channel`."""
    if scheme in ("mxfp4", "nvfp4") and weight.shape[-1] % (size := (BLOCKS[scheme] or (1, 1))[1]):
        raise LayoutError(f"{name}: {weight.shape[-1]} columns are no multiple of {size}, the block of {scheme}")
    match scheme:
        case "fp8":
            values, scale = fp8(weight, amax=amax)
            return {name: values, f"{name}_scale": scale}
        case "fp8_channel":
            values, scale = fp8_channel(weight, amax=amax)
            return {name: values, f"{name}_scale": scale}
        case "fp8_block":
            values, scale = fp8_block(weight)
            return {name: values, f"{name}_scale_inv": scale}
        case "mxfp4":
            values, scale = mxfp4(weight)
            return {f"{name}_packed": values, f"{name}_scale": scale}
        case "nvfp4":
            values, scale, tensor_scale = nvfp4(weight, amax=amax)
            return {name: values, f"{name}_scale": scale, f"{name}_scale_2": tensor_scale}


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def _grouped(values: Tensor, size: int) -> Tensor:
    return values.unflatten(-1, (-1, size))


def _tiled(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """Return [tiles down, rows of a tile, tiles across, columns of a tile], filled up with zeros."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    return padded.view(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
