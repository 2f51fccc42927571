"""An endpoint over a tiny model or over written turns, with a chat template of characters."""

import contextlib
import json
import re
from dataclasses import replace

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cosmos_rl_core.episodes.agent_config import AgentSection
from cosmos_rl_core.episodes.agents import AgentGenerator
from cosmos_rl_core.types import Prompt, ToolCall, Turn
from cosmos_rl_core.wire.http_server import serving
from cosmos_rl_core.wire.listening import Address
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.data.continuation import ChatContinuation
from cosmos_rl_llm.endpoint.app import AgentApp
from cosmos_rl_llm.model.causal_lm import make_model

TOKEN = "token-of-the-endpoint"
PROMPT = Prompt(sample_id=0, row={"question": "2+2", "answer": 4}, origin="rows:1")
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
STOP = 2
TEMPLATE = (
    "{%- if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}call {{ call.function.name }} {{ call.function.arguments | tojson }}"
    "{%- endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


LETTERS = "\n" + "".join(map(chr, range(32, 127)))


def make_tokenizer(letters=LETTERS):
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    return fast


class CallsContinuation(ChatContinuation):
    """Reads "call NAME {...}" as a call; without tools it is a text."""

    def parse(self, turn, *, tools=()):
        turn = super().parse(turn, tools=tools)
        found = re.match(r"(.*?)call (\w+) (\{.*\})", turn.text)
        if not tools or found is None:
            return turn
        text, name, arguments = found.groups()
        return replace(turn, text=text, calls=(ToolCall(name=name, arguments=json.loads(arguments)),))


def make_chat(max_length=1024, letters=LETTERS):
    return Chat(tokenizer=make_tokenizer(letters), end_ids=frozenset({STOP}), max_length=max_length)


class WrittenEngine:
    """Draws the next of `texts`, as tokens of the chat; an event in its place is waited for first."""

    def __init__(self, chat, *texts, version=5):
        self.chat, self.texts, self.version, self.progress = chat, list(texts), version, 0
        self.drawn, self.cancelled = [], 0
        self.limit = chat.max_length

    def open(self, opening):
        return _Session(self, opening.terms)


class _Session:
    def __init__(self, engine, terms):
        self._engine, self._terms, self.limit = engine, terms, engine.limit

    async def extend(self, terms, *, sampling, seed):
        engine = self._engine
        self._terms = np.concatenate([self._terms, terms])
        before = self._terms.tolist()
        while not isinstance(text := engine.texts.pop(0), str):
            engine.drawing.set()
            try:
                await text.wait()
            except BaseException:
                engine.cancelled += 1
                raise
        tokens = [*engine.chat.tokenizer(text, add_special_tokens=False)["input_ids"], STOP]
        is_cut = len(tokens) > sampling.max_terms
        drawn = np.array(tokens[: sampling.max_terms], np.int32)
        self._terms = np.concatenate([self._terms, drawn])
        engine.drawn.append((before, drawn.tolist()))
        return Turn(
            terms=drawn,
            logprobs=np.linspace(-1, -0.5, len(drawn)).astype(np.float32),
            versions=np.full(len(drawn), engine.version, np.int32),
            finish_reason="length" if is_cut else "stop",
        )

    def close(self):
        pass


class Recording:
    """A torch engine that notes every turn it draws, for comparisons with what is trained."""

    def __init__(self, engine):
        self.engine, self.drawn = engine, []

    def open(self, opening):
        return _Recorded(self.engine.open(opening), opening.terms, self.drawn)


class _Recorded:
    def __init__(self, session, terms, drawn):
        self._session, self._terms, self._drawn, self.limit = session, terms, drawn, session.limit

    async def extend(self, terms, *, sampling, seed):
        self._terms = np.concatenate([self._terms, terms])
        turn = await self._session.extend(terms, sampling=sampling, seed=seed)
        self._drawn.append((self._terms.tolist(), turn.terms.tolist(), turn.logprobs.tolist()))
        self._terms = np.concatenate([self._terms, turn.terms])
        return turn

    def close(self):
        self._session.close()


def tiny_model(chat, *, seed=0):
    config = {
        "model_type": "qwen3",
        "vocab_size": len(chat.tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": chat.max_length,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
    }
    return make_model(config, dtype=torch.float32, seed=seed)


class Service:
    """The address of an endpoint and what is behind it."""

    def __init__(self, url, agents, log):
        self.url, self.agents, self.log = url, agents, log

    def headers(self, key=TOKEN, **more):
        return {"authorization": f"Bearer {key}", **more}


@contextlib.asynccontextmanager
async def endpoint(engine, *, chat=None, continuation=None, needs_reward=True, **section):
    """Serve the agents of an engine."""
    chat = chat or engine.chat
    agents = AgentGenerator(
        engine,
        continuation or CallsContinuation(chat),
        AgentSection.model_validate(section),
        needs_reward=needs_reward,
    )
    log = []
    app = AgentApp(agents, decode=chat.decode_prompt, model="tiny", token=TOKEN, log=log.append)
    async with serving(app.asgi, Address(host="127.0.0.1"), allow_remote=False, log=log.append) as url:
        agents.base_url = f"{url}/v1"
        try:
            yield Service(url, agents, log)
        finally:
            agents.close()
