"""verifiers 0.1 and 0.2: SingleTurnEnv, MultiTurnEnv, ToolEnv and what is derived from them.

    verifiers' own rollout(...)  --get_response(prompt)-->  _respond   asked: what is new in the prompt
                                 <------- Response -------             answered: the model's turn

The environment runs its own loop with a client of ours, so that all that it overrides is in effect. From 0.3 on these
classes are gone, and 0.4 runs agents against an endpoint; train those with the endpoint of a rollout replica.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from cosmos_rl_core.episodes.interfaces import Environment, Message, Observation
from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.types import Turn
from cosmos_rl_llm.environments import imported

REQUIREMENT = "verifiers<0.3"


class Verifiers(Environment):
    """An example of an environment's data set: the row's "index", or all of it as the row's "example"."""

    def __init__(self, *, env: str, args: Mapping[str, Any] | None = None) -> None:
        """env: a module with `load_environment`, as of `verifiers.load_environment`. args: passed to it."""
        self._types = imported("verifiers.types", requirement=REQUIREMENT)
        self._env = _environment(env, json.dumps(dict(args or {})))
        self._asked: asyncio.Queue[tuple[list[Message], Sequence[Any]]] = asyncio.Queue()
        self._answered: asyncio.Queue[tuple[str, Turn]] = asyncio.Queue()
        self._known: list[Message] = []
        """The history, as the environment last sent it, with the model's answer."""
        self._rollout: asyncio.Task[Any] | None = None

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        example = row.get("example") or _example(self._env, row["index"])
        client = _client(imported("verifiers.clients", requirement=REQUIREMENT).Client, self._respond)
        self._rollout = asyncio.create_task(self._env.rollout(dict(example), client, "policy", {}))
        return await self._observe()

    async def step(self, said: str, turn: Turn) -> Observation:
        self._answered.put_nowait((said, turn))
        return await self._observe()

    async def close(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.gather(self._rollout, return_exceptions=True)

    async def _respond(self, prompt: Sequence[Any], tools: Sequence[Any] | None) -> Any:
        """Return the model's answer to a prompt, once it has one."""
        messages = [message.model_dump(exclude_none=True) for message in prompt]
        self._asked.put_nowait((messages, tools or ()))
        said, turn = await self._answered.get()
        calls = [
            self._types.ToolCall(id=call.id or f"call_{i}", name=call.name, arguments=json.dumps(dict(call.arguments)))
            for i, call in enumerate(turn.calls)
        ]
        message = self._types.ResponseMessage(
            content=said,
            reasoning_content=turn.reasoning or None,
            tool_calls=calls or None,
            finish_reason="length" if turn.finish_reason == "length" else "tool_calls" if calls else "stop",
            is_truncated=turn.finish_reason == "length",
        )
        self._known = [*messages, {"role": "assistant", "content": said}]
        return self._types.Response(id="", created=0, model="policy", message=message)

    async def _observe(self) -> Observation:
        """Wait for the next prompt, or for the end of the rollout and its reward."""
        assert self._rollout is not None
        asking = asyncio.create_task(self._asked.get())
        await asyncio.wait([asking, self._rollout], return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            asking.cancel()
            return await self._end(self._rollout.result())
        messages, tools = asking.result()
        if not self._known:
            self.tools = [{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in tools]
        count = len(self._known)
        is_same = _keys(messages[:count]) == _keys(self._known)
        return Observation(messages[count:]) if is_same else Observation(history=messages)

    async def _end(self, state: Mapping[str, Any]) -> Observation:
        if state["error"] is not None:
            raise SampleError(f"verifiers: {state['error']!r}")
        await self._env.rubric.score_rollout(state)
        metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        return Observation(reward=float(state["reward"]), done=True, metrics=metrics)


def _keys(messages: Sequence[Message]) -> list[tuple[str, Any]]:
    """Of messages, what makes them the same: a content that is absent is an empty one."""
    return [(message["role"], message.get("content") or "") for message in messages]


def _client(base: type[Any], respond: Any) -> Any:
    """Return a client of verifiers whose only method is `respond`."""

    async def get_response(_: Any, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **__: Any) -> Any:
        return await respond(prompt, tools)

    unused = dict.fromkeys(base.__abstractmethods__)
    return type("PolicyClient", (base,), {**unused, "__init__": lambda _: None, "get_response": get_response})()


@lru_cache(maxsize=16)
def _environment(env: str, args: str) -> Any:
    load = imported("verifiers.utils.env_utils", requirement=REQUIREMENT).load_environment
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}  # it sets its own
    try:
        return load(env, **json.loads(args))
    except (TypeError, ValueError, AttributeError, ImportError, RuntimeError) as error:
        raise UserError(f"verifiers environment {env!r} with {args}: {error}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _example(env: Any, index: int) -> Mapping[str, Any]:
    examples = env.get_dataset()
    return examples[index % len(examples)]
