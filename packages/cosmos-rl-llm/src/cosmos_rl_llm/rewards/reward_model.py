"""Score of a response by a reward model: a directory of transformers' sequence classification with one output.

prompt + response -> the reward model's own tokenizer and chat template -> score at the last token, [G]
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PrivateAttr, field_validator

from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.imports import quiet_torchao
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_llm.config import LLMDataConfig
from cosmos_rl_llm.model.checkpoint import check_reward_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cosmos_rl_llm.data.chat import Chat


class RewardModelReward(Strict):
    """Score of a reward model: `await reward(group)`. The model is loaded at the first group.

    The whole text is encoded as in training with algorithm.name = "reward_model": of a chat the rendered messages, of
    plain text prompt and response with the end-of-sequence token. A text longer than the model's context is an error of
    its sample, as are pictures.
    """

    loads_model: ClassVar[bool] = True

    path: str
    """Directory of the model, with its tokenizer."""
    chat_template: str | None = None
    """As in [data], for the reward model's tokenizer; "none" for plain text. Not set: its own."""
    device: str = "auto"
    """Device, such as "cuda:1" or "cpu"; "auto" is the current GPU, or the CPU if there is none."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the model."""
    batch_size: int = Field(default=16, ge=1)
    """Maximum number of responses in one pass."""
    scale: float = Field(default=1.0, gt=0)
    """Factor of the scores."""
    _turn: Lock = PrivateAttr(default_factory=Lock)
    _loaded: tuple[PreTrainedModel, Chat] | None = PrivateAttr(default=None)

    @field_validator("path")
    @classmethod
    def _scores(cls, path: str) -> str:
        if Path(path).expanduser().is_dir():
            check_reward_model(Path(path).expanduser())
        return path

    async def __call__(self, group: RolloutGroup) -> list[float]:
        texts = [rollout.text for rollout in group.rollouts]
        return await asyncio.to_thread(self.score, group.prompt.row, texts)

    def score(self, row: Mapping[str, Any], responses: list[str]) -> list[float]:
        """Return the score of each response to a row's prompt, one pass for `batch_size` of them."""
        with self._turn:  # tokenizers are not safe for two threads at once
            model, chat = self._loaded = self._loaded or self._load()
            plain = {key: row[key] for key in ("prompt", "tools") if key in row}
            texts = [chat.encode_answers({**plain, "response": text or " "}).tokens for text in responses]
            longest = max(map(len, texts))
            if chat.max_length is not None and longest > chat.max_length:
                raise SampleError(
                    f"a text of {longest} tokens, and the reward model {self.path} takes {chat.max_length}"
                )
            starts = range(0, len(texts), self.batch_size)
            scores = [_scores(model, texts[start : start + self.batch_size]) for start in starts]
        return [self.scale * float(score) for score in np.concatenate(scores)]

    def _load(self) -> tuple[PreTrainedModel, Chat]:
        quiet_torchao()
        import torch

        from cosmos_rl_llm.build import load_chat
        from cosmos_rl_llm.model.causal_lm import load_model

        model = load_model(self.path, dtype=getattr(torch, self.dtype), scores=True, new_head=False).eval()
        cuda = torch.cuda.is_available()
        device = ("cuda" if cuda else "cpu") if self.device == "auto" else self.device
        model.to(device)  # pyright: ignore[reportArgumentType] transformers wraps it without `self`
        data = LLMDataConfig(path=self.path, chat_template=self.chat_template)  # rows of the run, of no file
        return model, load_chat(self.path, data, max_length=None)


def _scores(model: PreTrainedModel, texts: list[np.ndarray]) -> np.ndarray:
    """Right-padded texts of different lengths -> the score at the last token of each, [n] float32."""
    import torch

    from cosmos_rl_llm.model.causal_lm import score_layer

    lengths = torch.tensor([len(tokens) for tokens in texts])
    rows = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
    for row, tokens in zip(rows, texts, strict=True):
        row[: len(tokens)] = torch.from_numpy(tokens)
    mask = (torch.arange(rows.shape[1]) < lengths[:, None]).long()
    layer = score_layer(model)
    assert layer is not None
    with torch.inference_mode():
        hidden = model.base_model(rows.to(model.device), attention_mask=mask.to(model.device)).last_hidden_state
        scores = layer(hidden[torch.arange(len(texts)), lengths - 1]).squeeze(-1)
    return scores.float().cpu().numpy()
