"""Families whose tower takes pictures of one size: Idefics3 and SmolVLM, InternVL, Llava, Gemma 3.

    picture [H, W, 3] -> tiles [n, 3, S, S] -> n times the same number of tokens; positions count as those of text

    Idefics3, SmolVLM   rows x columns of tiles and the whole picture; rows and columns are written between the tokens
    InternVL            tiles that fit the picture's proportions, and the whole picture, in one run of tokens
    both, of a video    each frame is one tile, with its time (SmolVLM) or number (InternVL) as text
    Llava               one tile, the middle of the picture
    Gemma 3             one tile, the whole picture; its tokens attend to each other in both directions

Sources: transformers' processing and modeling files of the families; arXiv:2408.12637 (Idefics3), arXiv:2504.05299
(SmolVLM), arXiv:2404.16821 (InternVL), arXiv:2304.08485 (Llava), arXiv:2503.19786 (Gemma 3).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_core.errors import MediaError, UserError
from cosmos_rl_llm.config import MediaSection
from cosmos_rl_llm.media.files import ProcessorFiles
from cosmos_rl_llm.media.item import KINDS, NO_LIMITS, Kind, MediaItem, VisionFamily
from cosmos_rl_llm.media.source import Fit, Video, unresized

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class TiledVision(VisionFamily):
    """Pictures in tiles of one size, which count as text does."""

    kind: str
    """The model_type, for messages."""
    tile: tuple[int, int]
    """Height and width that the tower takes."""
    tokens_per_tile: int
    frame_options: Mapping[str, Any] | None = None
    """Options with which the image processor makes one tile of each frame of a video; None: no videos."""

    @property
    @abstractmethod
    def sign(self) -> str:
        """The text of the placeholder token, which the chat template writes once for a picture."""

    @property
    def placeholders(self) -> Mapping[str, str]:
        return {kind: self.sign if kind == "image" else VIDEO for kind in self.token_ids}

    def image(self, picture: Image, limits: MediaSection = NO_LIMITS) -> MediaItem:
        self._check(limits)
        try:
            pixels, grid = self._tiles(picture)
        except ValueError as error:
            raise MediaError(f"a picture of {picture.width} x {picture.height} pixels: {error}") from error
        if pixels.shape[2:] != self.tile:
            raise MediaError(
                f"a picture of {picture.width} x {picture.height} pixels becomes tiles of {pixels.shape[3]} x "
                f"{pixels.shape[2]}, and {self.kind} takes {self.tile[1]} x {self.tile[0]}"
            )
        return MediaItem(kind="image", pixels=pixels.astype(np.float32), grid=grid)

    def fit(self, limits: MediaSection) -> Fit:
        self._check(limits)
        if self.frame_options is None:
            raise MediaError(f"videos of {self.kind} are not supported")
        return unresized

    def video(self, video: Video, limits: MediaSection = NO_LIMITS) -> MediaItem:
        from PIL import Image

        self.fit(limits)
        assert self.frame_options is not None
        frames = [Image.fromarray(frame) for frame in video.frames]
        tiles = self.image_processor(frames, return_tensors="np", **self.frame_options)["pixel_values"]
        return MediaItem(
            kind="video",
            pixels=tiles.reshape(len(frames), 3, *self.tile).astype(np.float32),
            times=tuple(video.times.tolist()),
            duration=video.duration,
        )

    def num_tokens(self, item: MediaItem) -> int:
        return len(item.pixels) * self.tokens_per_tile

    def inputs(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        if not items:
            return {}
        return {"pixel_values": torch.from_numpy(np.concatenate([item.pixels for item in items]))}

    def blank(self, kind: Kind) -> MediaItem:
        """Return one black tile, or nearly: transformers leaves tiles of zeros out."""
        return MediaItem(kind=kind, pixels=np.full((1, 3, *self.tile), -1.0, np.float32), grid=(1, 0, 0))

    def _check(self, limits: MediaSection) -> None:
        """Raise UserError if the recipe resizes pictures."""
        if limits.resizes:
            raise UserError(
                f"data.media.min_pixels, max_pixels, total_pixels: {self.kind} takes pictures in tiles of one size; "
                "remove them"
            )

    def _tiles(self, picture: Image) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Return tiles [n, 3, S, S], and 1 with the rows and columns in which they lie."""
        return self.image_processor(picture, return_tensors="np")["pixel_values"], (1, 1, 1)


VIDEO = "<video>"
"""Text that the chat template writes for a video, of families that take them."""


class IdeficsVision(TiledVision):
    """Idefics3 and SmolVLM: the place of each tile is text, and the whole picture comes last.

    SmolVLM also takes videos: their length, and the time of each frame, are text.
    """

    @classmethod
    def of(cls, files: ProcessorFiles, config: PreTrainedConfig) -> Self:
        tower, processor = config.vision_config, files.image_processor("Idefics3", "SmolVLM")
        size = int(tower.image_size)
        files.agree("max_image_size", processor.max_image_size["longest_edge"], size)
        sampling = files.section("preprocessor_config.json", "image_processor").get("video_sampling") or {}
        videos = files.section("video_preprocessor_config.json", "video_processor")
        edge = sampling.get("video_size") or videos.get("size") or {"longest_edge": size}
        return cls(
            kind=files.kind,
            image_processor=processor,
            tile=(size, size),
            tokens_per_tile=int((size // tower.patch_size) ** 2 / config.scale_factor**2),
            token_ids=dict.fromkeys(KINDS if files.kind == "smolvlm" else ("image",), config.image_token_id),
            files=files.texts,
            frame_options={"do_image_splitting": False, "size": edge} if files.kind == "smolvlm" else None,
        )

    @property
    def sign(self) -> str:
        return "<image>"

    def expansion(self, item: MediaItem) -> str:
        _, rows, columns = item.grid
        fence, tokens = "<fake_token_around_image>", self.sign * self.tokens_per_tile
        if item.kind == "video":
            length = timedelta(seconds=int(item.duration + _ROUNDING))
            frames = [
                f"\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:{fence}<global-img>{tokens}{fence}"
                for time in item.times
            ]
            return (
                f"You are provided the following series of {in_words(len(frames))} frames from a {length} [H:MM:SS] "
                f"video.\n{''.join(frames)}\n\n"
            )
        lines = [
            "".join(f"{fence}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        before = "".join([*lines, "\n"]) if lines else ""
        return f"{before}{fence}<global-img>{tokens}{fence}"

    def inputs(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        return {name: tiles[None] for name, tiles in super().inputs(items).items()}

    def vllm_inputs(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        (tiles,) = self.inputs(items)["pixel_values"]
        return {
            "pixel_values": tiles,
            "pixel_attention_mask": torch.ones(len(tiles), *self.tile, dtype=torch.int64),
            "num_patches": torch.tensor([len(item.pixels) for item in items]),
        }

    def _tiles(self, picture: Image) -> tuple[np.ndarray, tuple[int, int, int]]:
        cut = self.image_processor(picture, return_tensors="np", return_row_col_info=True)
        return cut["pixel_values"][0], (1, int(cut["rows"][0][0]), int(cut["cols"][0][0]))


_ROUNDING = 1e-3
"""Seconds by which times of frames are rounded in files."""
_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """Return a number as English text: "twenty-one", "one hundred and five"; from a thousand on as digits."""
    if number >= 1000:
        return str(number)
    hundreds, rest = divmod(number, 100)
    if hundreds:
        return f"{_SMALL[hundreds]} hundred" + (f" and {in_words(rest)}" if rest else "")
    if number < len(_SMALL):
        return _SMALL[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_SMALL[ones]}" if ones else "")


class InternVision(TiledVision):
    """InternVL, in transformers' form ("InternVL3-1B-hf")."""

    @classmethod
    def of(cls, files: ProcessorFiles, config: PreTrainedConfig) -> Self:
        tower, processor = config.vision_config, files.image_processor("GotOcr2")
        height, width = _sides(tower.image_size)
        files.agree("size", (processor.size["height"], processor.size["width"]), (height, width))
        patch = _sides(tower.patch_size)
        return cls(
            kind=files.kind,
            image_processor=processor,
            tile=(height, width),
            tokens_per_tile=int((height // patch[0]) * (width // patch[1]) * config.downsample_ratio**2),
            token_ids={kind: config.image_token_id for kind in KINDS},
            files=files.texts,
            frame_options={"crop_to_patches": False},
        )

    @property
    def sign(self) -> str:
        return "<IMG_CONTEXT>"

    def expansion(self, item: MediaItem) -> str:
        if item.kind == "image":
            return f"<img>{self.sign * self.num_tokens(item)}</img>"
        tokens = self.sign * self.tokens_per_tile
        return "\n".join(f"Frame{number + 1}: <img>{tokens}</img>" for number in range(len(item.pixels)))

    def vllm_inputs(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        sizes = torch.tensor([len(item.pixels) for item in items])
        return {
            **self.inputs(items),
            "image_num_patches": sizes,
            "image_token_id": torch.tensor(self.token_ids["image"]),
        }

    def _tiles(self, picture: Image) -> tuple[np.ndarray, tuple[int, int, int]]:
        # transformers' own processor crops too, whatever the file says
        return self.image_processor(picture, return_tensors="np", crop_to_patches=True)["pixel_values"], (1, 1, 1)


class LlavaVision(TiledVision):
    """Llava 1.5 with a tower of CLIP or SigLIP."""

    @classmethod
    def of(cls, files: ProcessorFiles, config: PreTrainedConfig) -> Self:
        """Raises UserError for another tower."""
        tower = config.vision_config
        if tower.model_type not in ("clip_vision_model", "siglip_vision_model"):
            raise UserError(
                f"model.path = {files.source!r}: pictures of llava with {tower.model_type} are not supported, only "
                "with clip_vision_model and siglip_vision_model"
            )
        processor = files.image_processor("CLIP", "Siglip", "Llava")
        crops = getattr(processor, "do_center_crop", False)
        shown = processor.crop_size if crops else processor.size
        height, width = _sides(tower.image_size)
        files.agree("crop_size" if crops else "size", (shown["height"], shown["width"]), (height, width))
        summary = int(tower.model_type == "clip_vision_model")  # a token of the whole picture, before the others
        dropped = int(config.vision_feature_select_strategy == "default")
        return cls(
            kind=files.kind,
            image_processor=processor,
            tile=(height, width),
            tokens_per_tile=(height // tower.patch_size) * (width // tower.patch_size) + summary - dropped,
            token_ids={"image": config.image_token_id},
            files=files.texts,
        )

    @property
    def sign(self) -> str:
        return "<image>"

    def expansion(self, item: MediaItem) -> str:
        return self.sign * self.num_tokens(item)


class GemmaVision(TiledVision):
    """Gemma 3 without pan and scan, which transformers' processor leaves off too unless a caller asks for it."""

    @classmethod
    def of(cls, files: ProcessorFiles, config: PreTrainedConfig) -> Self:
        processor, side = files.image_processor("Gemma3"), int(config.vision_config.image_size)
        files.agree("size", (processor.size["height"], processor.size["width"]), (side, side))
        return cls(
            kind=files.kind,
            image_processor=processor,
            tile=(side, side),
            tokens_per_tile=config.mm_tokens_per_image,
            token_ids={"image": config.image_token_id},
            files=files.texts,
            two_way=True,
        )

    @property
    def sign(self) -> str:
        return "<start_of_image>"

    def expansion(self, item: MediaItem) -> str:
        return f"\n\n{self.sign}{'<image_soft_token>' * self.num_tokens(item)}<end_of_image>\n\n"

    def _tiles(self, picture: Image) -> tuple[np.ndarray, tuple[int, int, int]]:
        return self.image_processor(picture, return_tensors="np", do_pan_and_scan=False)["pixel_values"], (1, 1, 1)


def _sides(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width of a configuration's size."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
