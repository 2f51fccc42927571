"""Tiny vision-language models with random weights, and pictures, videos and prompts for them. For tests."""

from __future__ import annotations

import copy
import io
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from cosmos_rl_llm.media.item import MediaItem, VisionFamily, expand_spans, view_of
from cosmos_rl_llm.media.source import Video
from cosmos_rl_llm.media.tiles import VIDEO
from cosmos_rl_llm.media.vision import find_family

SIGNS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220)}
WORDS = [
    "<pad>",
    "<eos>",
    "<unk>",
    *SIGNS,
    "<user>",
    "<bot>",
    *COLOURS,
    "what",
    "colour",
    "?",
    "<",
    ">",
    ".",
    "seconds",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
]
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<bot>' }} {% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %} {{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ ' <eos>' if m.role == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)
_IDS = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 6}
_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "out_hidden_size": 48,
}
_TEXT = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
_ROPE = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0}
_QWEN = {**_IDS, "vision_start_token_id": 3, "vision_end_token_id": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.1,
}
_PLAIN = {**_TEXT, "model_type": "qwen3", "head_dim": 12}
_TILED = {"text_config": _PLAIN, "image_token_id": WORDS.index("<image>"), "pad_token_id": 0, "bos_token_id": None}
_IDEFICS = {**_TILED, "text_config": {**_TEXT, "model_type": "llama", "head_dim": 32}}  # as vLLM wants it
_INTERN = {**_SIGLIP, "image_size": [16, 16], "patch_size": [4, 4], "num_channels": 3}
CONFIGS: dict[str, dict[str, object]] = {
    "qwen2_vl": {
        "text_config": {**_TEXT, "rope_parameters": _ROPE},
        "vision_config": {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": _TEXT["hidden_size"],
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **_QWEN,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _ROPE},
        "vision_config": {**_TOWER, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 4},
        **_QWEN,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "head_dim": 12, "rope_parameters": {**_ROPE, "mrope_interleaved": True}},
        "vision_config": {**_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        **_QWEN,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            "head_dim": 12,
            "rope_parameters": {**_ROPE, "mrope_interleaved": True},
        },
        "vision_config": {**_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        **_QWEN,
    },
    "idefics3": {"vision_config": _SIGLIP, "scale_factor": 2, **_IDEFICS},
    "smolvlm": {"vision_config": _SIGLIP, "scale_factor": 2, **_IDEFICS},
    "internvl": {"vision_config": _INTERN, **_TILED, "image_token_id": WORDS.index("<IMG_CONTEXT>")},
    "llava": {"vision_config": {**_SIGLIP, "model_type": "clip_vision_model"}, **_TILED},
    "gemma3": {
        "text_config": {
            **_TEXT,
            "model_type": "gemma3_text",
            "head_dim": 12,
            "query_pre_attn_scalar": 12,
            "sliding_window": 3,  # shorter than a picture
            "sliding_window_pattern": 2,
        },
        "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_id": WORDS.index("<image_soft_token>"),
        "boi_token_id": WORDS.index("<start_of_image>"),
        "eoi_token_id": WORDS.index("<end_of_image>"),
        "initializer_range": 0.1,
    },
}
NAMES = tuple(CONFIGS)
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
WITH_VIDEOS = (*QWEN, "smolvlm", "internvl")
_QWEN_PROCESSING = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}
_IDEFICS_PROCESSING = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
PROCESSING: dict[str, dict[str, object]] = {
    **dict.fromkeys(QWEN, _QWEN_PROCESSING),
    "idefics3": {"image_processor_type": "Idefics3ImageProcessor", **_IDEFICS_PROCESSING},
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessorFast",
        "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 32}},
        **_IDEFICS_PROCESSING,
    },
    "internvl": {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 16, "width": 16}},
    "llava": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "crop_size": 16},
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
}
"""The image processor's file of each family."""


def make(name: str, *, seed: int = 0, num_layers: int = 2, wide: bool = False) -> PreTrainedModel:
    """A model with a tower of two layers and a decoder of `num_layers`. wide: heads of 32, as vLLM wants them."""
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[name])
    config["text_config"]["num_hidden_layers"] = num_layers
    if wide:
        _widen(config["text_config"], config["vision_config"])
    built = AutoConfig.for_model(name, **config)
    model = AutoModelForImageTextToText.from_config(built, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and not parameter.any():  # Gemma 3's projector, which would show nothing
                parameter.normal_(std=0.1)
    return model


def _widen(text: dict[str, object], tower: dict[str, object]) -> None:
    old = text["hidden_size"]
    text |= {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"head_dim": 32} if "head_dim" in text else {}
    if "moe_intermediate_size" in text:
        text |= {"moe_intermediate_size": 96, "norm_topk_prob": True}  # the second as published
    if "rope_parameters" in text:
        text["rope_parameters"]["mrope_section"] = [4, 6, 6]
    key = "hidden_size" if "embed_dim" in tower else "out_hidden_size"  # of Qwen2-VL, of Qwen2.5-VL and Qwen3-VL
    if tower.get(key) == old:
        tower[key] = 64


def write_processing(directory: Path, name: str = "qwen3_vl") -> None:
    """Write the tokenizer with its chat template, and the image processor's file."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=[word for word in WORDS[3:] if word[0] == "<" and word[1:]],
    )
    sign = CONFIGS[name].get("boi_token_id", CONFIGS[name]["image_token_id"])
    fast.chat_template = TEMPLATE.replace(SIGNS[2], WORDS[sign]).replace(SIGNS[3], SIGNS[3] if name in QWEN else VIDEO)
    fast.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSING[name]))
    if name in ("idefics3", "smolvlm"):  # read by transformers' processor, which vLLM makes
        (directory / "processor_config.json").write_text(json.dumps({"image_seq_len": 4}))
    videos = {"size": {"shortest_edge": 64, "longest_edge": 8192}}
    videos |= {"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD}  # as of pictures
    (directory / "video_preprocessor_config.json").write_text(json.dumps(videos))


def family_of(model: PreTrainedModel, directory: Path) -> VisionFamily:
    write_processing(directory, model.config.model_type)
    return find_family(str(directory), model.config)


def picture(height: int, width: int, *, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def square(colour: tuple[int, int, int], *, dark_rows: int) -> Image.Image:
    """16 x 16 pixels of a colour, the first rows at half its brightness."""
    shade = np.full((16, 16, 3), colour, np.uint8)
    shade[:dark_rows] //= 2
    return Image.fromarray(shade)


def video(*, frames: int = 5, seed: int = 0) -> Video:
    """Frames of 24 x 32 pixels, two a second."""
    shown = np.random.default_rng(seed).integers(0, 255, (frames, 24, 32, 3), dtype=np.uint8)
    return Video(frames=shown, times=np.arange(frames) / 2, fps=2.0, duration=frames / 2)


def mp4(*, frames: int = 24, rate: int = 8, shown: np.ndarray | None = None) -> bytes:
    """A file with frames of 24 x 32 pixels that grow brighter, or that are all `shown`."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        for number in range(frames):
            shade = np.full((24, 32, 3), 10 * number, np.uint8) if shown is None else shown
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shade, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def turned(data: bytes, turns: int, *, mirrored: bool = False) -> bytes:
    """An mp4 file that players turn by `turns` clockwise quarter turns, as of a phone that was held sideways.

    mirrored: left and right are exchanged before.
    """
    a, b = [(1, 0), (0, 1), (-1, 0), (0, -1)][turns % 4]
    first = -1 if mirrored else 1
    matrix = struct.pack(">9i", first * a << 16, first * b << 16, 0, -b << 16, a << 16, 0, 0, 0, 1 << 30)
    at = data.index(b"tkhd") + 4 + 40  # after the box's type, in version 0 (ISO/IEC 14496-12, 8.3.2)
    return data[:at] + matrix + data[at + len(matrix) :]


def prompt(items: Sequence[MediaItem], family: VisionFamily, directory: Path) -> tuple[np.ndarray, object]:
    """Tokens [prompt] of a chat that shows `items`, and their view."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    signs = [family.placeholders[item.kind].removeprefix(SIGNS[0]).removesuffix(SIGNS[1]) for item in items]
    signs = [f"{SIGNS[0]}{sign}{SIGNS[1]}" for sign in signs]
    (text,) = expand_spans([f"<user> {' '.join(signs)} what colour ? <bot> "], items, family)
    tokens = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    return tokens, view_of(tokens, items, family)


def plain_logprobs(
    model: PreTrainedModel, family: VisionFamily, tokens: np.ndarray, response: np.ndarray, items: Sequence[MediaItem]
) -> torch.Tensor:
    """Log-probabilities [T] of transformers' own forward pass, over the tokens that may be sampled."""
    logits = plain_logits(model, family, tokens, response, items)
    return logits.log_softmax(-1).gather(1, torch.from_numpy(response.astype(np.int64))[:, None])[:, 0]


def plain_logits(
    model: PreTrainedModel, family: VisionFamily, tokens: np.ndarray, response: np.ndarray, items: Sequence[MediaItem]
) -> torch.Tensor:
    """Logits [T, V] of transformers' own forward pass at each token of a response, low for those never sampled."""
    ids = torch.from_numpy(np.concatenate([tokens, response[:-1]]).astype(np.int64))[None]
    inputs, positions = family.inputs(items), None
    if items and hasattr(model.model, "get_rope_index"):
        kinds = torch.where(ids == 5, 1, torch.where(ids == 6, 2, 0)).int()
        videos = [item.seconds for item in items if item.kind == "video"]
        spaced = {"second_per_grid_ts": torch.tensor(videos)} if model.config.model_type == "qwen2_5_vl" else {}
        positions, _ = model.model.get_rope_index(
            ids, kinds, inputs.get("image_grid_thw"), inputs.get("video_grid_thw"), **spaced
        )
    if family.two_way:
        inputs["token_type_ids"] = (ids == family.token_ids["image"]).int()
    logits = model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), **inputs).logits[0]
    logits = logits[len(tokens) - 1 :].clone()
    logits[:, list(family.token_ids.values())] -= 1e4
    return logits
