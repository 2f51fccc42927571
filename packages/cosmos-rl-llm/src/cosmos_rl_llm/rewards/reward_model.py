"""Score of a response by a reward model: a directory of transformers' sequence classification with one output.

prompt + response -> the reward model's own tokenizer and chat template -> score at the last token, [G]
                                                                 -> scores at the ends of steps -> min, mean or last
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
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
from cosmos_rl_llm.data.spans import STEPS, steps_of
from cosmos_rl_llm.model.checkpoint import check_reward_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cosmos_rl_llm.data.chat import Chat


class RewardModelReward(Strict):
    """Score of a reward model: `await reward(group)`. The model is loaded at the first group.

    The whole text is encoded as in training with algorithm.name = "reward_model": of a chat the rendered messages, of
    plain text prompt and response with the end-of-sequence token. A text longer than the model's context is an error of
    its sample, as are pictures.

    With `step_separator` the model is of steps, as trained with algorithm.name = "process_reward_model": the score of a
    step is the probability that it is right, and a response without steps has the score 0.
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
    step_separator: str | None = Field(default=None, min_length=1)
    """Text between steps, as data.step_separator in training. Not set: the model scores whole texts."""
    over_steps: Literal["min", "mean", "last"] = "min"
    """Score of a response by those of its steps."""
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
            texts = [self._encoded(chat, plain, text) for text in responses]
            longest = max(len(tokens) for tokens, _ in texts)
            if chat.max_length is not None and longest > chat.max_length:
                raise SampleError(
                    f"a text of {longest} tokens, and the reward model {self.path} takes {chat.max_length}"
                )
            starts = range(0, len(texts), self.batch_size)
            scores = [each for start in starts for each in _scores(model, texts[start : start + self.batch_size])]
        return [self.scale * self._of_steps(each) for each in scores]

    def _encoded(self, chat: Chat, row: Mapping[str, Any], response: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and the places of those that are scored."""
        if self.step_separator is not None and not response.strip():
            return chat.encode_prompt(row).tokens, np.zeros(0, np.int64)
        if self.step_separator is not None:
            steps = [[step, True] for step in steps_of(response, self.step_separator)]
            return chat.encode_steps({**row, STEPS: steps})
        tokens = chat.encode_answers({**row, "response": response or " "}).tokens
        return tokens, np.array([len(tokens) - 1])

    def _of_steps(self, scores: np.ndarray) -> float:
        if self.step_separator is None:
            return float(scores[0])
        if not len(scores):
            return 0.0
        right = 1 / (1 + np.exp(-scores.astype(np.float64)))
        return float({"min": right.min(), "mean": right.mean(), "last": right[-1]}[self.over_steps])

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


def _scores(model: PreTrainedModel, texts: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """Texts of different lengths, right-padded, with the places to score -> scores there, float32."""
    import torch

    from cosmos_rl_llm.model.causal_lm import score_layer

    lengths = torch.tensor([len(tokens) for tokens, _ in texts])
    rows = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
    for row, (tokens, _) in zip(rows, texts, strict=True):
        row[: len(tokens)] = torch.from_numpy(tokens)
    mask = (torch.arange(rows.shape[1]) < lengths[:, None]).long()
    layer = score_layer(model)
    assert layer is not None
    with torch.inference_mode():
        hidden = model.base_model(rows.to(model.device), attention_mask=mask.to(model.device)).last_hidden_state
        scores = layer(hidden).squeeze(-1).float().cpu().numpy()
    return [row[places] for row, (_, places) in zip(scores, texts, strict=True)]
