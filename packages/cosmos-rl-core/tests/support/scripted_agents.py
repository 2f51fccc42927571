"""An engine whose turns are written down, and a chat format of characters, for the rollouts of agents."""

import asyncio
import json
from dataclasses import replace

import numpy as np

from cosmos_rl_core.episodes.interfaces import Opening
from cosmos_rl_core.errors import PromptError
from cosmos_rl_core.types import Prompt, ToolCall, Turn

STOP = ord("$")
PROMPT = Prompt(sample_id=3, row={"question": "2+2"}, origin="rows:4")


def codes(text):
    return np.array([ord(letter) for letter in text], np.int32)


class Scripted:
    """An engine that draws the next of `texts` for each call. One that ends with "…" is cut; None waits for ever."""

    def __init__(self, *texts, limit=None, version=5):
        self.texts, self.limit, self.version, self.progress = list(texts), limit, version, 0
        self.read = []
        """All terms before each turn that was drawn."""
        self.max_terms = []
        self.drawing = asyncio.Event()
        self.open_sessions = 0

    def open(self, opening):
        self.open_sessions += 1
        return _Session(self, opening)


class _Session:
    def __init__(self, engine, opening):
        self._engine, self.limit, self._terms = engine, engine.limit, opening.terms
        self._is_open = True

    async def extend(self, terms, *, sampling, seed):
        engine = self._engine
        assert self._is_open, "a session that was closed draws nothing"
        self._terms = np.concatenate([self._terms, terms])
        engine.read.append("".join(map(chr, self._terms)))
        engine.max_terms.append(sampling.max_terms)
        text = engine.texts.pop(0)
        if text is None or isinstance(text, asyncio.Event):
            engine.drawing.set()
            await (asyncio.Event() if text is None else text).wait()
            text = engine.texts.pop(0)
        if isinstance(text, Exception):
            raise text
        is_cut = text.endswith("…")
        drawn = codes(text.removesuffix("…") + ("" if is_cut else chr(STOP)))
        self._terms = np.concatenate([self._terms, drawn])
        return Turn(
            terms=drawn,
            logprobs=-np.arange(1, len(drawn) + 1, dtype=np.float32),
            versions=np.full(len(drawn), engine.version, np.int32),
            finish_reason="length" if is_cut else "stop",
        )

    def close(self):
        self._engine.open_sessions -= self._is_open
        self._is_open = False


class Letters:
    """A continuation: <role:content> for each message. "call NAME {...}" is a call."""

    def open(self, messages, *, tools=(), where=""):
        if any("\x00" in str(message.get("content")) for message in messages):
            raise PromptError(f"{where}: a message has a zero")
        text = "".join(f"[{tool['function']['name']}]" for tool in tools) + "".join(map(_written, messages)) + ">"
        return Opening(terms=codes(text), text=text)

    def extend(self, turn, messages):
        return codes("\n" + "".join(map(_written, messages)) + ">")

    def parse(self, turn, *, tools=()):
        text = "".join(map(chr, turn.terms)).removesuffix(chr(STOP))
        if tools and text.startswith("call "):
            _, name, arguments = text.split(" ", 2)
            call = ToolCall(name=name, arguments=json.loads(arguments))
            return replace(turn, text="", calls=(call,))
        return replace(turn, text=text)

    def arrays(self, branches):
        first, *others = branches
        arrays = {"prompt_tokens": first[0].terms, "tokens": np.concatenate([terms for _, terms in branches])}
        if others:
            arrays["branch_lengths"] = np.array([[len(o.terms), len(t)] for o, t in branches], np.int32)
            arrays["branch_prompts"] = np.concatenate([o.terms for o, _ in others])
        return arrays


def _written(message):
    return f"<{message['role']}:{message.get('content') or ''}"


def texts_of(rollout):
    """The prompt, and all terms after it, as text."""
    arrays = rollout.arrays
    return ["".join(map(chr, arrays[name])) for name in ("prompt_tokens", "tokens")]


def drawn_of(rollout):
    """The terms that are trained on, as text."""
    return "".join(map(chr, rollout.arrays["tokens"][rollout.loss_mask]))
