"""Score of a response by a served language or vision-language model, which sees the pictures of the prompt."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import random
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from pydantic import Field, PrivateAttr, field_validator

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup

if TYPE_CHECKING:
    import httpx


QUESTION = (
    "Question: {question}\n\nReference answer: {answer}\n\nAnswer of a student: {response}\n\n"
    "How good is the student's answer, from 0 (wrong) to 10 (right)? Reply with the number alone."
)
_FIELD = re.compile(r"\{(question|answer|response)\}")


class _Reply(msgspec.Struct):
    """The part of an answer of /chat/completions that is read."""

    class Choice(msgspec.Struct):
        class JudgeMessage(msgspec.Struct):
            content: str | None = None

        message: JudgeMessage

    choices: list[Choice]


class JudgeReward(Strict):
    """Number in the reply of a served model divided by `best`, in [0, 1]: `await reward(group)`.

    The server has OpenAI's /chat/completions, such as `vllm serve`. A reply without a number, or with one outside of
    0 to `best`, is an error of the sample, never a score.
    """

    url: str = Field(pattern="^https?://")
    """Address up to the version: "http://127.0.0.1:8000/v1"."""
    model: str
    """Name of the model at the server."""
    question: str = QUESTION
    """Text for the model; {question} is the prompt's, {answer} the reference answer, {response} what is judged."""
    best: float = Field(default=10.0, gt=0)
    """Number of the best response."""
    media: bool = True
    """Send the pictures of the prompt, and frames of its videos."""
    max_frames: int = Field(default=8, ge=1)
    """Maximum number of frames of a video."""
    max_tokens: int = Field(default=16, ge=1)
    """Maximum length of the reply; the last number of it counts."""
    key_variable: str = ""
    """Environment variable with the server's key; empty: no key."""
    at_once: int = Field(default=8, ge=1)
    """Maximum number of concurrent requests of one group."""
    deadline_s: float = Field(default=50.0, gt=0)
    """Maximum wait for a reply, including retries. [reward] timeout_s should be longer."""
    _random: random.Random = PrivateAttr(default_factory=random.Random)

    @field_validator("question")
    @classmethod
    def _has_response(cls, question: str) -> str:
        if "{response}" not in question:
            raise ValueError("must contain {response}")
        return question

    async def __call__(self, group: RolloutGroup) -> list[float]:
        import httpx

        pictures = await asyncio.to_thread(self._pictures, group) if self.media else []
        room = asyncio.Semaphore(self.at_once)
        async with httpx.AsyncClient(headers=self._headers(), timeout=self.deadline_s, trust_env=False) as client:

            async def score(response: str) -> float:
                async with room:
                    text = self._text(group, response)
                    return self._number(await self._ask(client, [*pictures, {"type": "text", "text": text}]))

            return list(await asyncio.gather(*(score(rollout.text) for rollout in group.rollouts)))

    async def _ask(self, client: httpx.AsyncClient, content: list[dict[str, Any]]) -> str:
        from cosmos_rl_core.reward.client import Retry, RewardServiceError

        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        retry = Retry(client, deadline_s=self.deadline_s, rng=self._random)
        async with retry.deadline():
            address = f"{self.url.rstrip('/')}/chat/completions"
            answer = await retry.post(address, purpose="to answer", accept={200}, json=body)
        try:
            reply = msgspec.json.decode(answer.content, type=_Reply)
        except msgspec.DecodeError as error:
            raise RewardServiceError(f"{self.url} returned an invalid reply: {error}") from error
        if not reply.choices or not reply.choices[0].message.content:
            raise RewardServiceError(f"{self.url} returned an empty reply")
        return reply.choices[0].message.content

    def _number(self, reply: str) -> float:
        numbers = re.findall(r"-?\d+(?:\.\d+)?", reply)
        if not numbers or not 0 <= float(numbers[-1]) <= self.best:
            raise ValueError(f"the judge {self.model} replied {reply[:80]!r}, no number from 0 to {self.best:g}")
        return float(numbers[-1]) / self.best

    def _headers(self) -> dict[str, str]:
        if not self.key_variable:
            return {}
        if self.key_variable not in os.environ:
            raise UserError(f"the environment variable {self.key_variable} with the judge's key is not set")
        return {"Authorization": f"Bearer {os.environ[self.key_variable]}"}

    def _text(self, group: RolloutGroup, response: str) -> str:
        row = group.prompt.row
        if "{answer}" in self.question and not row.get("answer"):
            raise UserError("the judge's question has {answer}, and the row has none; name it in data.answer_column")
        values = {"question": _question(row), "answer": str(row.get("answer", "")), "response": response}
        return _FIELD.sub(lambda match: values[match[1]], self.question)

    def _pictures(self, group: RolloutGroup) -> list[dict[str, Any]]:
        """Parts of a message with the pictures of the prompt, and evenly spaced frames of its videos."""
        shown = []
        for array in group.rollouts[0].media.values():
            frames = array[None] if array.ndim == 3 else array
            chosen = np.linspace(0, len(frames) - 1, min(len(frames), self.max_frames)).round().astype(int)
            shown += [{"type": "image_url", "image_url": {"url": _png(frames[place])}} for place in chosen]
        return shown


def _question(row: Mapping[str, Any]) -> str:
    """The text of the prompt's last message."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1]["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _png(frame: np.ndarray) -> str:
    """uint8 [H, W, 3] -> a data: URL."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame).save(file, format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
