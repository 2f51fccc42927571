"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches of pictures and videos, placeholders, and positions in three dimensions.

    picture [H, W, 3] -> sides divisible by patch x merge -> patches [t h w, 3 x 2 x p x p], merged squares in order
    text <|image_pad|> -> one per merged square             positions of a square: (start + t, start + h, start + w)

Qwen3-VL writes the time of each step of a video as text, "<0.5 seconds>", and counts positions of each step anew;
Qwen2.5-VL spaces the steps by their seconds, Qwen2-VL by one. Sources: transformers' processing and modeling files of
the families, arXiv:2409.12191 (M-RoPE), arXiv:2502.13923 (absolute time).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_core.errors import MediaError
from cosmos_rl_llm.config import MediaSection
from cosmos_rl_llm.media.files import ProcessorFiles
from cosmos_rl_llm.media.item import Item, Kind
from cosmos_rl_llm.media.source import Video

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedConfig

CHECKPOINTS = MediaSection()
"""Limits of the processing's files alone."""
START, END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"


@dataclass(frozen=True, kw_only=True)
class QwenVision:
    """Implements `VisionFamily`."""

    image_processor: Any
    """transformers' image processor of the checkpoint, in its form without torchvision."""
    video_pixels: tuple[int, int]
    """Minimum and maximum pixels of a whole video, after resizing."""
    token_ids: Mapping[str, int]
    """Of IMAGE and VIDEO, by kind."""
    files: Mapping[str, str]
    """Names and texts of the processing's files."""
    timestamps: bool
    """Whether the time of each step of a video is text (Qwen3-VL)."""
    tokens_per_second: float | None = None
    """Positions a second of video (Qwen2.5-VL); None: a step is one position."""
    two_way: bool = False

    @classmethod
    def of(cls, files: ProcessorFiles, config: PreTrainedConfig) -> Self:
        """Raises UserError for patches of another size than the model's."""
        tower, processor = config.vision_config, files.image_processor("Qwen2VL")
        for name, size in (
            ("patch_size", tower.patch_size),
            ("merge_size", tower.spatial_merge_size),
            ("temporal_patch_size", tower.temporal_patch_size),
        ):
            files.agree(name, getattr(processor, name), size)
        videos = files.section("video_preprocessor_config.json", "video_processor")
        size = videos.get("size") or {}
        return cls(
            image_processor=processor,
            video_pixels=(
                size.get("shortest_edge") or videos.get("min_pixels") or 128 * 32 * 32,
                size.get("longest_edge") or videos.get("max_pixels") or 768 * 32 * 32,
            ),
            token_ids={"image": config.image_token_id, "video": config.video_token_id},
            files=files.texts,
            timestamps=config.model_type.startswith("qwen3"),
            tokens_per_second=getattr(tower, "tokens_per_second", None),
        )

    @property
    def placeholders(self) -> Mapping[str, str]:
        return {"image": IMAGE, "video": f"{START}{VIDEO}{END}" if self.timestamps else VIDEO}

    @cached_property
    def patch(self) -> int:
        return int(self.image_processor.patch_size)

    @cached_property
    def merge(self) -> int:
        return int(self.image_processor.merge_size)

    @cached_property
    def frames_per_step(self) -> int:
        return int(self.image_processor.temporal_patch_size)

    def image(self, picture: Image, limits: MediaSection = CHECKPOINTS) -> Item:
        least, most = self.image_processor.size["shortest_edge"], self.image_processor.size["longest_edge"]
        most = limits.max_pixels or most
        size = {"shortest_edge": min(limits.min_pixels or least, most), "longest_edge": most}
        try:
            found = self.image_processor(picture, size=size, return_tensors="np")
        except ValueError as error:
            raise MediaError(f"a picture of {picture.width} x {picture.height} pixels: {error}") from error
        time, height, width = found["image_grid_thw"][0].tolist()
        return Item(kind="image", pixels=np.asarray(found["pixel_values"], np.float32), grid=(time, height, width))

    def video(self, video: Video, limits: MediaSection = CHECKPOINTS) -> Item:
        frames, times = video.frames, video.times
        if missing := -len(frames) % self.frames_per_step:
            frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
            times = np.concatenate([times, np.repeat(times[-1:], missing)])
        height, width = self._video_size(*frames.shape[:3], limits=limits)
        shaped = self._normalised(frames, height, width)
        steps = times.reshape(-1, self.frames_per_step)
        return Item(
            kind="video",
            pixels=patches(shaped, patch=self.patch, merge=self.merge, frames=self.frames_per_step),
            grid=(len(steps), height // self.patch, width // self.patch),
            seconds=self.frames_per_step / video.fps,
            times=tuple(((steps[:, 0] + steps[:, -1]) / 2).tolist()),
        )

    def expansion(self, item: Item) -> str:
        time, squares = item.grid[0], self._squares(item)
        if item.kind == "image":
            return IMAGE * squares
        if not self.timestamps:
            return VIDEO * (time * squares)
        return "".join(f"<{at:.1f} seconds>{START}{VIDEO * squares}{END}" for at in item.times)

    def positions(self, tokens: np.ndarray, items: Sequence[Item]) -> np.ndarray:
        shown = np.isin(tokens, list(self.token_ids.values()))
        found = np.empty((3, len(tokens)), dtype=np.int64)
        at = start = 0
        for block in self._blocks(items):
            size = block.shape[1]
            first = at + int(np.argmax(shown[at:]))
            if not shown[at:].any() or not shown[first : first + size].all():
                raise ValueError(f"{shown.sum()} placeholder tokens do not fit the {len(items)} pictures and videos")
            found[:, at:first] = np.arange(start, start + first - at)
            start += first - at
            found[:, first : first + size] = start + block
            start += int(block[1:].max()) + 1
            at = first + size
        found[:, at:] = np.arange(start, start + len(tokens) - at)
        return found

    def inputs(self, items: Sequence[Item]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for kind, pixels, grids in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            if of_kind := [item for item in items if item.kind == kind]:
                made[pixels] = torch.from_numpy(np.concatenate([item.pixels for item in of_kind]))
                made[grids] = torch.tensor([item.grid for item in of_kind])
        return made

    def vllm_inputs(self, items: Sequence[Item]) -> dict[str, Tensor]:
        return self.inputs(items)

    def blank(self, kind: Kind) -> Item:
        """Return the patches of one merged square."""
        width = 3 * self.frames_per_step * self.patch**2
        pixels = np.zeros((self.merge**2, width), np.float32)
        return Item(kind=kind, pixels=pixels, grid=(1, self.merge, self.merge), times=(0.0,) * (kind == "video"))

    def num_tokens(self, item: Item) -> int:
        """Return the number of the item's placeholder tokens."""
        return item.grid[0] * self._squares(item)

    def _squares(self, item: Item) -> int:
        """Merged squares of one step of the grid."""
        return item.grid[1] * item.grid[2] // self.merge**2

    def _blocks(self, items: Sequence[Item]) -> list[np.ndarray]:
        """Return the positions [3, n] of each run of placeholder tokens, from 0."""
        blocks: list[np.ndarray] = []
        for item in items:
            time, height, width = item.grid[0], item.grid[1] // self.merge, item.grid[2] // self.merge
            if item.kind == "video" and self.timestamps:
                blocks += [np.indices((1, height, width)).reshape(3, -1)] * time
                continue
            block = np.indices((time, height, width)).reshape(3, -1)
            if item.kind == "video" and self.tokens_per_second is not None:
                block[0] = (block[0] * (self.tokens_per_second * item.seconds)).astype(np.int64)
            blocks.append(block)
        return blocks

    def _video_size(self, count: int, height: int, width: int, *, limits: MediaSection) -> tuple[int, int]:
        """Return height and width of a video's frames: divisible, and within the limits of frame and whole video."""
        factor, (least, most) = self.patch * self.merge, self.video_pixels
        most = min(limits.total_pixels or most, count * (limits.max_pixels or most))
        least = min(count * limits.min_pixels if limits.min_pixels else least, most)
        if max(height, width) > 200 * min(height, width):
            raise MediaError(f"frames of {width} x {height} pixels: one side is more than 200 times the other")
        tall, wide = (max(factor, round(side / factor) * factor) for side in (height, width))
        if count * tall * wide > most:
            scale = math.sqrt(count * height * width / most)
            tall, wide = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
        elif count * tall * wide < least:
            scale = math.sqrt(least / (count * height * width))
            tall, wide = (math.ceil(side * scale / factor) * factor for side in (height, width))
        return tall, wide

    def _normalised(self, frames: np.ndarray, height: int, width: int) -> np.ndarray:
        """[T, H, W, 3] uint8 -> [T, 3, height, width] float32, as the image processor does with a picture."""
        from PIL import Image

        processor = self.image_processor
        resample = Image.Resampling(int(processor.resample))
        resized = [np.asarray(Image.fromarray(frame).resize((width, height), resample)) for frame in frames]
        mean, deviation = (np.asarray(each, np.float32) for each in (processor.image_mean, processor.image_std))
        scaled = np.stack(resized).astype(np.float32) * np.float32(processor.rescale_factor)
        return ((scaled - mean) / deviation).transpose(0, 3, 1, 2)


def patches(shown: np.ndarray, *, patch: int, merge: int, frames: int) -> np.ndarray:
    """[T, 3, H, W] -> [T H W / (frames patch^2), 3 frames patch^2]: `frames` of a step together, squares in order."""
    count, channels, height, width = shown.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    cut = shown.reshape(count // frames, frames, channels, rows, merge, patch, columns, merge, patch)
    return cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, channels * frames * patch * patch)
