"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches of pictures and videos, placeholders, and positions in three dimensions.

    picture [H, W, 3] -> sides divisible by patch x merge -> patches [t h w, 3 x 2 x p x p], merged squares in order
    text <|image_pad|> -> one per merged square             positions of a square: (start + t, start + h, start + w)

Qwen3-VL writes the time of each step of a video as text, "<0.5 seconds>", and counts positions of each step anew;
Qwen2.5-VL spaces the steps by their seconds, Qwen2-VL by one. The checkpoint's limits of pixels are those of each frame
in Qwen2-VL and Qwen2.5-VL, and of the whole video in Qwen3-VL. Sources: transformers' processing and modeling files of
the families, arXiv:2409.12191 (M-RoPE), arXiv:2502.13923 (absolute time).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_core.errors import MediaError
from cosmos_rl_llm.config import MediaSection
from cosmos_rl_llm.media.files import ProcessorFiles
from cosmos_rl_llm.media.item import NO_LIMITS, Kind, MediaItem, VisionFamily
from cosmos_rl_llm.media.source import Fit, Video

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedConfig

START, END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVideoProcessing:
    """The processing of videos of a checkpoint."""

    least: int
    """Minimum pixels after resizing: of a frame, or in Qwen3-VL of the whole video."""
    most: int
    """Maximum pixels, likewise."""
    mean: Sequence[float]
    """[3], of the channels; `deviation` likewise."""
    deviation: Sequence[float]
    max_tokens: int | None
    """Tokens that limit a frame further, if the file has cap_pixels_per_frame."""

    @classmethod
    def of(cls, files: ProcessorFiles, *, whole: bool) -> Self:
        """Read the section for videos, or else the picture's, as transformers do. whole: of Qwen3-VL."""
        from transformers import image_utils

        section = files.section("video_preprocessor_config.json", "video_processor")
        section = section or files.section("preprocessor_config.json", "image_processor")
        size, side = section.get("size") or {}, 32 if whole else 28
        mean = image_utils.IMAGENET_STANDARD_MEAN if whole else image_utils.OPENAI_CLIP_MEAN
        deviation = image_utils.IMAGENET_STANDARD_STD if whole else image_utils.OPENAI_CLIP_STD
        return cls(
            least=section.get("min_pixels") or size.get("shortest_edge") or 128 * side**2,
            most=section.get("max_pixels") or size.get("longest_edge") or 768 * side**2,
            mean=section.get("image_mean") or mean,
            deviation=section.get("image_std") or deviation,
            max_tokens=section.get("max_video_tokens", 768 if whole else 128_000)
            if section.get("cap_pixels_per_frame")
            else None,
        )


@dataclass(frozen=True, kw_only=True)
class QwenVision(VisionFamily):
    """Patches of any number along time, height and width, with positions along the three."""

    videos: QwenVideoProcessing
    timestamps: bool
    """Whether the time of each step of a video is text (Qwen3-VL)."""
    tokens_per_second: float | None = None
    """Positions a second of video (Qwen2.5-VL); None: a step is one position."""

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
        timestamps = config.model_type.startswith("qwen3")
        return cls(
            image_processor=processor,
            videos=QwenVideoProcessing.of(files, whole=timestamps),
            token_ids={"image": config.image_token_id, "video": config.video_token_id},
            files=files.texts,
            timestamps=timestamps,
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

    def image(self, picture: Image, limits: MediaSection = NO_LIMITS) -> MediaItem:
        least, most = self.image_processor.size["shortest_edge"], self.image_processor.size["longest_edge"]
        most = limits.max_pixels or most
        size = {"shortest_edge": min(limits.min_pixels or least, most), "longest_edge": most}
        try:
            processed = self.image_processor(picture, size=size, return_tensors="np")
        except ValueError as error:
            raise MediaError(f"a picture of {picture.width} x {picture.height} pixels: {error}") from error
        time, height, width = processed["image_grid_thw"][0].tolist()
        return MediaItem(
            kind="image", pixels=np.asarray(processed["pixel_values"], np.float32), grid=(time, height, width)
        )

    def fit(self, limits: MediaSection) -> Fit:
        return partial(self._fit, limits=limits)

    def video(self, video: Video, limits: MediaSection = NO_LIMITS) -> MediaItem:
        stored = video.stored or video.frames.shape[1:3]
        resize = self._fit(len(video.frames), stored[0], stored[1], limits=limits)
        frames, times = [resize(frame) for frame in video.frames], video.times
        if missing := -len(frames) % self.frames_per_step:
            frames += frames[-1:] * missing
            times = np.concatenate([times, np.repeat(times[-1:], missing)])
        steps = times.reshape(-1, self.frames_per_step)
        pixels, (height, width) = self._patches(frames)
        return MediaItem(
            kind="video",
            pixels=pixels,
            grid=(len(steps), height, width),
            seconds=self.frames_per_step / video.fps,
            times=tuple(((steps[:, 0] + steps[:, -1]) / 2).tolist()),
        )

    def expansion(self, item: MediaItem) -> str:
        time, squares = item.grid[0], self._squares(item)
        if item.kind == "image":
            return IMAGE * squares
        if not self.timestamps:
            return VIDEO * (time * squares)
        return "".join(f"<{at:.1f} seconds>{START}{VIDEO * squares}{END}" for at in item.times)

    def positions(self, tokens: np.ndarray, items: Sequence[MediaItem]) -> np.ndarray:
        shown = np.isin(tokens, list(self.token_ids.values()))
        positions = np.empty((3, len(tokens)), dtype=np.int64)
        at = start = 0
        for block in self._blocks(items):
            size = block.shape[1]
            first = at + int(np.argmax(shown[at:]))
            if not shown[at:].any() or not shown[first : first + size].all():
                raise ValueError(f"{shown.sum()} placeholder tokens do not fit the {len(items)} pictures and videos")
            positions[:, at:first] = np.arange(start, start + first - at)
            start += first - at
            positions[:, first : first + size] = start + block
            start += int(block[1:].max()) + 1
            at = first + size
        positions[:, at:] = np.arange(start, start + len(tokens) - at)
        return positions

    def inputs(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for kind, pixels, grids in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            if of_kind := [item for item in items if item.kind == kind]:
                made[pixels] = torch.from_numpy(np.concatenate([item.pixels for item in of_kind]))
                made[grids] = torch.tensor([item.grid for item in of_kind])
        return made

    def blank(self, kind: Kind) -> MediaItem:
        """Return the patches of one merged square."""
        width = 3 * self.frames_per_step * self.patch**2
        pixels = np.zeros((self.merge**2, width), np.float32)
        return MediaItem(kind=kind, pixels=pixels, grid=(1, self.merge, self.merge), times=(0.0,) * (kind == "video"))

    def num_tokens(self, item: MediaItem) -> int:
        return item.grid[0] * self._squares(item)

    def _squares(self, item: MediaItem) -> int:
        """Merged squares of one step of the grid."""
        return item.grid[1] * item.grid[2] // self.merge**2

    def _blocks(self, items: Sequence[MediaItem]) -> list[np.ndarray]:
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

    def _fit(self, count: int, height: int, width: int, *, limits: MediaSection) -> Callable[[np.ndarray], np.ndarray]:
        from transformers.image_transforms import resize

        try:
            size = self._video_size(count, height, width, limits=limits)
        except ValueError as error:
            raise MediaError(f"frames of {width} x {height} pixels: {error}") from error
        resample = self.image_processor.resample
        return partial(resize, size=size, resample=resample, input_data_format="channels_last")

    def _video_size(self, count: int, height: int, width: int, *, limits: MediaSection) -> tuple[int, int]:
        """Return height and width of a video's frames: divisible, and within the limits of the recipe or checkpoint."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as frame_size
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as video_size

        factor = self.patch * self.merge
        least, most = self.videos.least, self._most(count)
        if self.timestamps and not limits.resizes:
            step = self.frames_per_step
            limited = {"factor": factor, "min_pixels": least, "max_pixels": most}
            return video_size(max(count, step), height, width, temporal_factor=step, **limited)
        shown = count + -count % self.frames_per_step
        total = limits.total_pixels or (most if self.timestamps else None)
        frame = limits.max_pixels or (None if self.timestamps else most)
        most = max(1, min(each for each in (frame, total and total // shown) if each is not None))
        least = limits.min_pixels or (least // shown if self.timestamps else least)
        return frame_size(height, width, factor=factor, min_pixels=min(least, most), max_pixels=most)

    def _most(self, count: int) -> int:
        """Maximum pixels of the checkpoint, of a frame or of the whole video, for a video of `count` frames."""
        videos, tokens, square = self.videos, self.videos.max_tokens, (self.patch * self.merge) ** 2
        if tokens is None:
            return videos.most
        if self.timestamps:
            return count * max(min(tokens * square, videos.most // count), int(videos.least * 1.05))
        share = int(tokens * square * 0.9) * self.frames_per_step // count
        return max(min(videos.most, share), int(videos.least * 1.05))

    def _patches(self, frames: list[np.ndarray]) -> tuple[np.ndarray, tuple[int, int]]:
        """[T H W 3] uint8 -> patches [n, 3 x 2 x p x p], and the numbers of patches along height and width.

        The image processor shows a picture in all frames of a step. Each frame here is a picture of one-frame patches,
        and those of a step's frames are then joined: [t, 2, h w, 3, p p] -> [t, h w, 3, 2, p p].
        """
        processed = self.image_processor(
            frames,
            do_resize=False,
            temporal_patch_size=1,
            image_mean=self.videos.mean,
            image_std=self.videos.deviation,
            input_data_format="channels_last",
            return_tensors="np",
        )
        _, height, width = processed["image_grid_thw"][0].tolist()
        by_frame = processed["pixel_values"].reshape(-1, self.frames_per_step, height * width, 3, self.patch**2)
        joined = by_frame.transpose(0, 2, 3, 1, 4).reshape(-1, 3 * self.frames_per_step * self.patch**2)
        return joined, (height, width)
