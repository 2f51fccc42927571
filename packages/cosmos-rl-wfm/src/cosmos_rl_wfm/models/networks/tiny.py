"""The families' classes at sizes that run on any CPU in milliseconds: for mock runs and tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cosmos_rl_wfm.models.config import FamilyName

_NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "wan": {
        "patch_size": [1, 2, 2],
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 32,
        "freq_dim": 32,
        "ffn_dim": 48,
        "num_layers": 2,
        "rope_max_seq_len": 64,
    },
    "cosmos": {
        "in_channels": 17,
        "out_channels": 16,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "mlp_ratio": 2.0,
        "text_embed_dim": 32,
        "adaln_lora_dim": 4,
        "max_size": [16, 64, 64],
        "patch_size": [1, 2, 2],
        "rope_scale": [1.0, 3.0, 3.0],
        "concat_padding_mask": True,
        "extra_pos_embed_type": None,
        "use_crossattn_projection": True,
        "crossattn_proj_in_channels": 48,
        "encoder_hidden_states_channels": 32,
    },
    "sd3": {
        "sample_size": 16,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": 32,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 32,
        "qk_norm": "rms_norm",
    },
    "sana": {
        "in_channels": 4,
        "out_channels": 4,
        "patch_size": 1,
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": 32,
        "sample_size": 32,
    },
    "sana_video": {
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 12,
        "cross_attention_dim": 24,
        "caption_channels": 32,
        "mlp_ratio": 2.5,
        "sample_size": 8,
        "patch_size": [1, 2, 2],
    },
}

_WAN_VAE = {"base_dim": 3, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
_KL_VAE = {
    "block_out_channels": [4, 4],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 1,
    "scaling_factor": 1.5,
    "shift_factor": 0.06,
}
_DC_VAE = {
    "latent_channels": 4,
    "attention_head_dim": 2,
    "encoder_block_types": "ResBlock",
    "decoder_block_types": "ResBlock",
    "encoder_block_out_channels": [8, 8],
    "decoder_block_out_channels": [8, 8],
    "encoder_layers_per_block": [1, 1],
    "decoder_layers_per_block": [1, 1],
    "encoder_qkv_multiscales": [[], []],
    "decoder_qkv_multiscales": [[], []],
    "scaling_factor": 0.4,
}
_VAES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "wan": ("AutoencoderKLWan", _WAN_VAE),
    "cosmos": ("AutoencoderKLWan", _WAN_VAE),
    "sd3": ("AutoencoderKL", _KL_VAE),
    "sana": ("AutoencoderDC", _DC_VAE),
    "sana_video": ("AutoencoderKLWan", _WAN_VAE),
}


def tiny_network(family: FamilyName, *, codec: str = "vae") -> dict[str, Any]:
    """Return the arguments of a family's network; with codec "pixels" its channels are colours."""
    config = dict(_NETWORKS[family])
    if codec == "pixels":
        config |= {"in_channels": 4 if family == "cosmos" else 3, "out_channels": 3}
    return config


def tiny_vae(family: FamilyName) -> tuple[str, dict[str, Any]]:
    """Return class and arguments of a family's autoencoder."""
    name, config = _VAES[family]
    return name, dict(config)
