"""The vision of a checkpoint: the family by its model_type, the processing by the checkpoint's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from cosmos_rl_core.errors import UserError
from cosmos_rl_llm.media.item import VisionFamily
from cosmos_rl_llm.media.qwen import QwenVision

FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
QWEN = ("qwen2_5_vl", "qwen3_vl")


def find_family(source: str, config: PreTrainedConfig) -> VisionFamily:
    """Return the family of a vision-language model. Raises UserError for one that is not supported."""
    if config.model_type not in QWEN:
        raise UserError(
            f"model.path = {source!r}: pictures of {config.model_type} are not supported, only of {', '.join(QWEN)}"
        )
    if find_spec("PIL") is None:
        raise UserError(
            "a vision-language model needs a package that is not installed: pip install 'cosmos-rl-core[media]'"
        )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    directory = Path(source)
    pictures = _section(directory, "preprocessor_config.json", "image_processor")
    videos = _section(directory, "video_preprocessor_config.json", "video_processor")
    if not pictures:
        raise UserError(f"model.path = {source!r} has no preprocessor_config.json, which says how pictures are resized")
    size = videos.get("size") or {}
    least = size.get("shortest_edge") or videos.get("min_pixels") or 128 * 32 * 32
    most = size.get("longest_edge") or videos.get("max_pixels") or 768 * 32 * 32
    return QwenVision(
        image_processor=Qwen2VLImageProcessorPil(**_known(pictures)),
        video_pixels=(least, most),
        files={name: (directory / name).read_text(encoding="utf-8") for name in FILES if (directory / name).is_file()},
        token_ids={"image": config.image_token_id, "video": config.video_token_id},
        timestamps=config.model_type.startswith("qwen3"),
        tokens_per_second=getattr(config.vision_config, "tokens_per_second", 1.0),
    )


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that name classes."""
    return {key: value for key, value in values.items() if not key.endswith(("_type", "_class"))}


def _section(directory: Path, name: str, key: str) -> Mapping[str, Any]:
    """Return a processor's file, or its section of the file that newer checkpoints have for all."""
    for file, section in ((name, None), ("processor_config.json", key)):
        path = directory / file
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            values = found if section is None else found.get(section)
            if values:
                return values
    return {}
