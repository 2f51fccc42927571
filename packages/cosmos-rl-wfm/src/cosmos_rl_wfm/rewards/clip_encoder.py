"""Frames and texts in the common space of a CLIP or SigLIP model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.rewards.pretrained import Pretrained


class ClipEncoder:
    """A model with `get_image_features` and `get_text_features`; vectors have length 1."""

    def __init__(self, options: Pretrained) -> None:
        dtype = getattr(torch, options.dtype)
        model: Any = options.load(lambda source: AutoModel.from_pretrained(source, dtype=dtype))
        if not callable(getattr(model, "get_text_features", None)):
            raise UserError(f"model = {options.model!r} is a {type(model).__name__}; a CLIP or SigLIP model is needed")
        self._model = model.eval().requires_grad_(False).to(options.torch_device())
        self._images: Any = options.load(AutoImageProcessor.from_pretrained)
        self._words: Any = options.load(AutoTokenizer.from_pretrained)
        self._batch_size = options.batch_size

    @torch.inference_mode()
    def images(self, frames: Sequence[np.ndarray]) -> np.ndarray:
        """N frames, uint8 [H, W, 3] each -> float32 [N, E]."""
        parts = []
        for start in range(0, len(frames), self._batch_size):
            batch = list(frames[start : start + self._batch_size])
            pixels = self._images(batch, return_tensors="pt", input_data_format="channels_last")
            pixels = pixels.to(self._model.device, self._model.dtype)
            parts.append(_unit(self._model.get_image_features(**pixels).pooler_output))
        return np.concatenate(parts)

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """N texts -> float32 [N, E]; texts above the model's length limit are truncated."""
        config = self._model.config
        is_siglip = config.model_type.startswith("siglip")  # trained on texts padded to one length, without a mask
        tokens = self._words(
            list(texts),
            padding="max_length" if is_siglip else True,
            max_length=config.text_config.max_position_embeddings,
            truncation=True,
            return_tensors="pt",
        ).to(self._model.device)
        mask = None if is_siglip else tokens["attention_mask"]
        return _unit(self._model.get_text_features(tokens["input_ids"], attention_mask=mask).pooler_output)


def _unit(vectors: torch.Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(vectors.float(), dim=-1).cpu().numpy()
