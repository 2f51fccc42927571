"""Prompts with pictures are read beside the event loop of a rollout replica."""

import asyncio
import threading

import numpy as np
import pytest
from tiny_engine import TokenChat, tiny_model

from cosmos_rl_core.errors import MediaError
from cosmos_rl_core.types import Prompt, Sampling
from cosmos_rl_llm.config import LLMTorchOptions
from cosmos_rl_llm.data.chat import Encoded
from cosmos_rl_llm.engines.prompts import encode
from cosmos_rl_llm.engines.torch.engine import TorchEngine

SHOWN = Prompt(sample_id=0, row={"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]})
TEXT = Prompt(sample_id=1, row={"prompt": [{"role": "user", "content": "what ?"}]})


class Slow:
    """Encodes a prompt after `loop_ran` was set, which only the event loop does."""

    def __init__(self):
        self.loop_ran, self.begun, self.threads = threading.Event(), threading.Event(), []

    def __call__(self, row):
        self.threads.append(threading.current_thread())
        if row is SHOWN.row:
            self.begun.set()
            if not self.loop_ran.wait(20):
                raise AssertionError("the event loop waits for the picture")
        return Encoded(text="", tokens=np.array([3, 4, 5], np.int32))

    async def beat(self):
        await asyncio.to_thread(self.begun.wait, 20)
        self.loop_ran.set()


def test_the_loop_goes_on_while_a_picture_is_read():
    async def main():
        slow = Slow()
        chat = TokenChat(encoded=slow)
        found, _ = await asyncio.gather(encode(chat, SHOWN), slow.beat())
        assert found.tokens.tolist() == [3, 4, 5]
        assert slow.threads[0] is not threading.current_thread()
        await encode(chat, TEXT)
        assert slow.threads[1] is threading.current_thread()

    asyncio.run(main())


def test_an_error_of_the_row_is_raised():
    def damaged(row):
        raise MediaError("a.png: damaged")

    async def main():
        with pytest.raises(MediaError, match=r"a\.png: damaged"):
            await encode(TokenChat(encoded=damaged), SHOWN)

    asyncio.run(main())


def test_the_engine_generates_for_others_while_a_picture_is_read():

    async def main():
        slow = Slow()
        engine = TorchEngine(tiny_model(), TokenChat(encoded=slow), LLMTorchOptions(max_sequences=8))
        sampling = Sampling(max_terms=3)

        async def others():
            await asyncio.to_thread(slow.begun.wait, 20)
            await engine.generate(TEXT, num_samples=1, sampling=sampling, seed=1)
            slow.loop_ran.set()

        (_, rollouts), _ = await asyncio.gather(
            engine.generate(SHOWN, num_samples=2, sampling=sampling, seed=0), others()
        )
        assert len(rollouts) == 2
        await engine.close()

    asyncio.run(main())
