"""Aesthetic quality of a clip, by a small classifier fitted to human scores: reward, features and classifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
from pydantic import Field, PrivateAttr, field_validator

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_wfm.rewards.pixels import flicker, motion, saturation
from cosmos_rl_wfm.rewards.pretrained import Exclusive, Pretrained
from cosmos_rl_wfm.rewards.video import group_videos, luma, sample_frames

if TYPE_CHECKING:
    from cosmos_rl_wfm.rewards.models import ClipEncoder

Features = Literal["statistics", "clip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AestheticHead:
    """10 sigmoid(f((x - mean) / scale)), with f one linear layer or several with ReLU between."""

    features: Features
    """Kind of x: metrics of the pixels, or the mean vector of the frames in the space of a CLIP model."""
    model: str
    """The CLIP model, by name or folder; empty for metrics of the pixels."""
    num_frames: int
    """Input frames of the CLIP model per clip."""
    mean: np.ndarray
    """[D] float32."""
    scale: np.ndarray
    """[D] float32, positive."""
    layers: tuple[tuple[np.ndarray, np.ndarray], ...]
    """(weight [out, in], bias [out]) float32 each; the last has one output."""

    def score(self, x: np.ndarray) -> np.ndarray:
        """[N, D] -> [N] in [0, 10].

        Raises:
            UserError: x has another width.
        """
        if x.shape[1] != len(self.mean):
            raise UserError(f"the head takes {len(self.mean)} features and got {x.shape[1]}; train it again")
        hidden = (x.astype(np.float64) - self.mean) / self.scale
        *inner, (weight, bias) = self.layers
        for inner_weight, inner_bias in inner:
            hidden = np.maximum(hidden @ inner_weight.T + inner_bias, 0.0)
        logit = (hidden @ weight.T + bias)[:, 0]
        return 5.0 + 5.0 * np.tanh(logit / 2)  # 10 sigmoid(logit), without overflow

    def save(self, path: Path) -> None:
        """Write the head to a safetensors file."""
        from safetensors.numpy import save_file

        tensors = {"mean": self.mean, "scale": self.scale}
        for number, (weight, bias) in enumerate(self.layers):
            tensors |= {f"layers.{number}.weight": weight, f"layers.{number}.bias": bias}
        metadata = {"features": self.features, "model": self.model, "num_frames": str(self.num_frames)}
        path.parent.mkdir(parents=True, exist_ok=True)
        contiguous = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}
        save_file(contiguous, path, metadata=metadata)


def load_head(path: Path) -> AestheticHead:
    """Read a head from the file of `AestheticHead.save`.

    Raises:
        UserError: the file is not an aesthetic head.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from error
    number = sum(name.endswith(".weight") for name in tensors)
    expected = {"mean", "scale"} | {f"layers.{i}.{part}" for i in range(number) for part in ("weight", "bias")}
    if set(tensors) != expected or not number or metadata.get("features") not in get_args(Features):
        raise UserError(f"{path} is not an aesthetic head: train one with cosmos_rl_wfm.train_aesthetic")
    return AestheticHead(
        features="clip" if metadata["features"] == "clip" else "statistics",
        model=metadata.get("model", ""),
        num_frames=int(metadata.get("num_frames", "1")),
        mean=tensors["mean"],
        scale=tensors["scale"],
        layers=tuple((tensors[f"layers.{i}.weight"], tensors[f"layers.{i}.bias"]) for i in range(number)),
    )


BINS = 8
"""Bins of the histogram of brightness."""


def pixel_features(videos: Sequence[np.ndarray]) -> np.ndarray:
    """N clips, uint8 [F, H, W, 3] each -> float32 [N, D]: brightness, colour, edges and movement."""
    return np.stack([_metrics(video) for video in videos])


def clip_features(encoder: ClipEncoder, videos: Sequence[np.ndarray], *, num_frames: int) -> np.ndarray:
    """N clips -> float32 [N, E]: the mean over `num_frames` frames of their vectors of length 1."""
    clips = [sample_frames(video, num_frames) for video in videos]
    vectors = encoder.images([frame for clip in clips for frame in clip])
    ends = np.cumsum([len(clip) for clip in clips])[:-1]
    return np.stack([part.mean(axis=0) for part in np.split(vectors, ends)])


def _metrics(video: np.ndarray) -> np.ndarray:
    y = luma(video)
    histogram = np.histogram(y, bins=BINS, range=(0.0, 1.0))[0] / y.size
    edges = [float(np.abs(np.diff(y, axis=axis)).mean()) if y.shape[axis] > 1 else 0.0 for axis in (1, 2)]
    metrics = [
        *video.mean(axis=(0, 1, 2)) / 255,
        float(y.std(axis=(1, 2)).mean()),
        saturation(video),
        *edges,
        motion(video) if len(video) > 1 else 0.0,
        flicker(video) if len(video) > 2 else 0.0,
        *histogram,
    ]
    return np.asarray(metrics, np.float32)


Describe = Callable[[Sequence[np.ndarray]], np.ndarray]
"""N clips, uint8 [F, H, W, 3] each -> float32 [N, D]."""


class AestheticReward(Strict):
    """Score of a head over metrics of the pixels or CLIP vectors, in [0, 10]."""

    loads_model: ClassVar[bool] = True

    head: str
    """Safetensors file made by `cosmos_rl_wfm.train_aesthetic`; it names its features and CLIP model."""
    device: str = "auto"
    """Device of the CLIP model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the CLIP model."""
    batch_size: int = Field(default=32, ge=1)
    """Maximum frames in one pass of the CLIP model."""
    _loaded: Exclusive[tuple[AestheticHead, Describe]] = PrivateAttr()

    @field_validator("head")
    @classmethod
    def _exists(cls, head: str) -> str:
        if not Path(head).expanduser().is_file():
            raise ValueError("there is no such file")
        return head

    def model_post_init(self, context: Any, /) -> None:
        self._loaded = Exclusive(self._load)

    def __call__(self, group: RolloutGroup) -> list[float]:
        videos = group_videos(group)
        with self._loaded.use() as (head, describe):
            return head.score(describe(videos)).tolist()

    def _load(self) -> tuple[AestheticHead, Describe]:
        head = load_head(Path(self.head).expanduser())
        if head.features == "statistics":
            return head, pixel_features
        options = Pretrained(model=head.model, device=self.device, dtype=self.dtype, batch_size=self.batch_size)
        return head, clip_describe(options, num_frames=head.num_frames)


def clip_describe(options: Pretrained, *, num_frames: int) -> Describe:
    """Load a CLIP model and return the function from clips to its vectors."""
    from cosmos_rl_wfm.rewards.models import ClipEncoder  # torch and transformers

    encoder = ClipEncoder(options)
    return lambda videos: clip_features(encoder, videos, num_frames=num_frames)
