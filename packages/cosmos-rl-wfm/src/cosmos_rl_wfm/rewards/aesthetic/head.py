"""The small classifier of the aesthetic reward: one safetensors file with its layers and the kind of their features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from cosmos_rl_core.errors import UserError

Features = Literal["statistics", "clip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
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


def load_head(path: Path) -> Head:
    """Read a head from the file of `Head.save`.

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
    wanted = {"mean", "scale"} | {f"layers.{i}.{part}" for i in range(number) for part in ("weight", "bias")}
    if set(tensors) != wanted or not number or metadata.get("features") not in get_args(Features):
        raise UserError(f"{path} is not an aesthetic head: train one with cosmos_rl_wfm.train_aesthetic")
    return Head(
        features="clip" if metadata["features"] == "clip" else "statistics",
        model=metadata.get("model", ""),
        num_frames=int(metadata.get("num_frames", "1")),
        mean=tensors["mean"],
        scale=tensors["scale"],
        layers=tuple((tensors[f"layers.{i}.weight"], tensors[f"layers.{i}.bias"]) for i in range(number)),
    )
