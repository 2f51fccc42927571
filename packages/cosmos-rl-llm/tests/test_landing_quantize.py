"""The quantisers of cosmos-rl-transfer against those of vLLM that run on CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from cosmos_rl_transfer.content.quantize import dequantize_nvfp4, fp8, fp8_block, fp8_channel, nvfp4, unpack_e2m1

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_of_tensors_and_rows(dtype):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    weight = randn(64, 96, dtype=dtype)
    for shape, quantise in ((GroupShape.PER_TENSOR, fp8), (GroupShape.PER_TOKEN, fp8_channel)):
        with set_current_vllm_config(VllmConfig()):
            theirs, scale = QuantFP8(static=False, group_shape=shape).forward_native(weight)
        ours, our_scale = quantise(weight)
        assert same_bits(ours, theirs) and same_bits(our_scale, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 384), (200, 130)])
def test_fp8_of_blocks(shape, dtype):
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = randn(*shape, dtype=dtype)
    with torch.compiler.set_stance("force_eager"):
        theirs, scale = per_block_cast_to_fp8(weight, [128, 128], use_ue8m0=False)
    ours, our_scale = fp8_block(weight)
    assert same_bits(ours, theirs) and same_bits(our_scale.contiguous(), scale)


def test_nvfp4():
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype, ref_nvfp4_quant

    weight = randn(32, 128)
    pairs, scale, tensor_scale = nvfp4(weight)
    values, their_scale = ref_nvfp4_quant(weight, 2688 / weight.abs().amax(), 16)
    assert torch.equal(scale.float(), their_scale)
    assert torch.equal(unpack_e2m1(pairs), values)
    theirs = dequantize_to_dtype(pairs, scale, tensor_scale, torch.float32, swizzle=False)
    assert torch.equal(dequantize_nvfp4(pairs, scale, tensor_scale), theirs)
