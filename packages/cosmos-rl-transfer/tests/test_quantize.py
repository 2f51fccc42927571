from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.content.quantize import (
    dequantize_fp8,
    dequantize_mxfp4,
    dequantize_nvfp4,
    fp8,
    fp8_block,
    fp8_channel,
    mxfp4,
    nvfp4,
    pack_e2m1,
    quantized,
    sender_quantizes,
    tiles_straddle,
    unpack_e2m1,
)
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.manifest import Box, Replicate, Shard, TensorLayout, shard_box, whole_box


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_e2m1_has_the_sixteen_values_of_the_specification():
    codes = torch.arange(16, dtype=torch.uint8)
    assert unpack_e2m1(codes)[::2].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_e2m1_rounds_ties_to_the_even_code_and_saturates():
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    assert unpack_e2m1(pack_e2m1(values)).tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    assert unpack_e2m1(pack_e2m1(-values)).tolist() == [0, -1, -1, -2, -2, -4, -4, -6]


def test_a_pair_has_its_first_value_in_the_low_bits():
    assert pack_e2m1(torch.tensor([0.5, -6.0])).tolist() == [0xF1]


@given(st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=32).filter(lambda v: len(v) % 2 == 0))
@settings(deadline=None)
def test_e2m1_finds_a_nearest_value(values):
    exact = torch.tensor(values)
    grid = unpack_e2m1(torch.arange(16, dtype=torch.uint8))[::2]
    nearest = (exact[:, None] - grid).abs().amin(1)
    assert torch.equal((exact - unpack_e2m1(pack_e2m1(exact))).abs(), nearest)


def test_mxfp4_by_hand():
    # largest magnitude 5: floor(log2 5) = 2, less the exponent 2 of e2m1's largest number: scale 2^0, byte 127
    block = torch.zeros(1, 32)
    block[0, :4] = torch.tensor([5.0, -3.0, 0.6, 0.2])
    pairs, scale = mxfp4(torch.cat((block, block * 8), 1))
    assert scale.tolist() == [[127, 130]]
    expected = torch.zeros(1, 32)
    expected[0, :4] = torch.tensor([4.0, -3.0, 0.5, 0.0])
    assert torch.equal(dequantize_mxfp4(pairs, scale), torch.cat((expected, expected * 8), 1))


def test_mxfp4_clips_what_lies_above_six_steps():
    pairs, scale = mxfp4(torch.full((1, 32), 7.9))
    assert scale.item() == 127
    assert dequantize_mxfp4(pairs, scale).unique().item() == 6


def test_mxfp4_of_zeros_and_of_what_is_not_finite():
    assert dequantize_mxfp4(*mxfp4(torch.zeros(2, 32))).abs().max() == 0
    assert dequantize_mxfp4(*mxfp4(torch.full((1, 32), torch.inf))).isnan().all()


def test_nvfp4_by_hand():
    # largest 12: tensor scale 12 / (448 * 6); the block that holds it has scale 448, values in steps of 2
    weight = torch.zeros(1, 32)
    weight[0, :3] = torch.tensor([12.0, -4.0, 1.0])
    weight[0, 16] = 3.0
    pairs, scale, tensor_scale = nvfp4(weight)
    assert tensor_scale.item() == pytest.approx(12 / 2688)
    assert scale.float().tolist() == [[448, 112]]
    found = dequantize_nvfp4(pairs, scale, tensor_scale)
    assert found[0, [0, 1, 2, 16]].tolist() == pytest.approx([12, -4, 1, 3])


def test_nvfp4_of_zeros():
    assert dequantize_nvfp4(*nvfp4(torch.zeros(2, 32))).abs().max() == 0


def test_fp8_by_hand():
    values, scale = fp8(torch.tensor([[896.0, -448.0], [2.0, 17.0]]))
    assert scale.tolist() == [2]
    assert values.float().tolist() == [[448, -224], [1, 8.5 - 0.5]]  # 8.5 lies between 8 and 9: ties to even
    assert dequantize_fp8(values, scale).tolist() == [[896, -448], [2, 16]]


def test_fp8_channel_scales_rows():
    values, scale = fp8_channel(torch.tensor([[448.0, 1.0], [4.48, 0.01]]))
    assert scale.shape == (2, 1)
    assert scale.flatten().tolist() == pytest.approx([1, 0.01])
    assert values.float().amax(1).tolist() == [448, 448]


def test_fp8_block_scales_tiles_and_the_ragged_rest():
    weight = randn(200, 130)
    weight[150, 129] = 4480
    values, scale = fp8_block(weight)
    assert (values.shape, scale.shape) == ((200, 130), (2, 2))
    assert scale[1, 1].item() == pytest.approx(10)
    assert scale[0, 0].item() == pytest.approx(weight[:128, :128].abs().max().item() / 448)
    assert (dequantize_fp8(values, scale) - weight).abs().max() <= 4480 / 448 * 16


@pytest.mark.parametrize("quantise", [fp8, fp8_channel, fp8_block])
def test_fp8_is_within_half_a_step_of_three_bits(quantise):
    weight = randn(256, 256)
    values, scale = quantise(weight)
    step = dequantize_fp8(torch.full_like(values, 2.0**-6), scale)  # below its smallest normal number steps are even
    assert ((dequantize_fp8(values, scale) - weight).abs() <= weight.abs() / 16 + step / 16).all()


def test_a_shard_with_the_whole_amax_gives_the_bits_of_the_whole():
    weight = randn(64, 64)
    whole, scale = fp8(weight)
    half, same_scale = fp8(weight[:32], amax=weight.abs().amax())
    assert torch.equal(whole[:32].view(torch.uint8), half.view(torch.uint8)) and torch.equal(scale, same_scale)


@given(rows=st.integers(1, 400), parts=st.integers(1, 5))
@settings(deadline=None)
def test_tiles_straddle_where_an_inner_edge_is_no_multiple(rows, parts):
    shape = (rows, 256)
    boxes = [shard_box(shape, mesh_shape=(parts,), placements=(Shard(0),), coordinate=(i,)) for i in range(parts)]
    inner = {edge for box in boxes for edge in (box.offset[0], box.end[0]) if 0 < edge < rows}
    cut = [tiles_straddle(box, (128, 128), shape=shape) for box in boxes]
    assert any(cut) == any(edge % 128 for edge in inner)


@pytest.mark.parametrize(("parts", "expected"), [(2, True), (4, True), (8, False)])
def test_the_sender_quantises_unless_shards_cut_tiles(parts, expected):
    shape = (512, 256)
    spec = WeightSpec(name="x.weight", shape=shape, dtype="bfloat16")
    cut = {
        rank: shard_box(shape, mesh_shape=(parts,), placements=(Shard(0),), coordinate=(rank,)) for rank in range(parts)
    }
    assert sender_quantizes(TensorLayout(spec, cut), "fp8_block") is expected
    assert sender_quantizes(TensorLayout(spec, cut), "fp8") is False
    copies = {
        rank: shard_box(shape, mesh_shape=(2,), placements=(Replicate(),), coordinate=(rank,)) for rank in range(2)
    }
    assert sender_quantizes(TensorLayout(spec, copies), "fp8")


def test_shards_on_tile_edges_quantise_to_the_bits_of_the_whole():
    weight = randn(512, 256)
    values, scale = fp8_block(weight)
    parts = [fp8_block(part) for part in weight.chunk(4)]
    assert torch.equal(torch.cat([v.view(torch.uint8) for v, _ in parts]), values.view(torch.uint8))
    assert torch.equal(torch.cat([s for _, s in parts]), scale)


def test_a_whole_tensor_never_straddles():
    assert not tiles_straddle(whole_box((200, 130)), (128, 128), shape=(200, 130))
    assert tiles_straddle(Box((0, 0), (100, 130)), (128, 128), shape=(200, 130))


@pytest.mark.parametrize(
    ("scheme", "names"),
    [
        ("fp8", ["a.weight", "a.weight_scale"]),
        ("fp8_channel", ["a.weight", "a.weight_scale"]),
        ("fp8_block", ["a.weight", "a.weight_scale_inv"]),
        ("mxfp4", ["a.weight_packed", "a.weight_scale"]),
        ("nvfp4", ["a.weight", "a.weight_scale", "a.weight_scale_2"]),
    ],
)
def test_quantized_names_values_and_scales_and_leaves_the_rest(scheme, names):
    rest = {"norm.weight": randn(64), "embed_tokens.weight": randn(8, 64), "mlp.gate.weight": randn(4, 64)}
    found = quantized({"a.weight": randn(32, 64), **rest}, scheme)
    assert list(found) == [*names, *rest]
    assert all(found[name] is rest[name] for name in rest)


def test_rows_that_do_not_split_into_blocks_are_refused():
    with pytest.raises(LayoutError, match=r"a\.weight: 40 columns are no multiple of 32"):
        quantized({"a.weight": randn(2, 40)}, "mxfp4")


def test_mxfp4_has_the_bits_of_torchao():
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    weight = randn(16, 128) * torch.logspace(-6, 6, 16)[:, None]
    scale, pairs = mx.to_mx(weight, torch.float4_e2m1fn_x2, 32)
    ours, our_scale = mxfp4(weight)
    assert torch.equal(our_scale, scale.view(torch.uint8)) and torch.equal(ours, pairs.view(torch.uint8))
