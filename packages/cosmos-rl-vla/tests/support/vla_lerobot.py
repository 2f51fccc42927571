"""lerobot's client call by call, and its classes of messages, without lerobot."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from cosmos_rl_vla.serving.lerobot import SERVICE
from cosmos_rl_vla.serving.lerobot_wire import BEGIN, END, MESSAGES

HELPERS = "lerobot.async_inference.helpers"


@dataclass
class TimedAction:
    timestamp: float
    timestep: int
    action: object


@dataclass
class TimedObservation:
    timestamp: float
    timestep: int
    observation: dict
    must_go: bool = False


@dataclass
class RemotePolicyConfig:
    policy_type: str
    pretrained_name_or_path: str
    lerobot_features: dict
    actions_per_chunk: int
    device: str = "cpu"
    rename_map: dict = field(default_factory=dict)


@contextmanager
def lerobot_helpers() -> Iterator[None]:
    """Let pickles name these classes as lerobot's."""
    module = types.ModuleType(HELPERS)
    with pytest.MonkeyPatch.context() as patch:
        for kind in (TimedAction, TimedObservation, RemotePolicyConfig):
            patch.setattr(kind, "__module__", HELPERS)
            setattr(module, kind.__name__, kind)
        for name in ("lerobot", "lerobot.async_inference"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, HELPERS, module)
        yield


class Robot:
    """lerobot's client, call by call."""

    def __init__(self, channel):
        def call(kind, name, request, answer):
            return kind(f"/{SERVICE}/{name}", MESSAGES[request].SerializeToString, MESSAGES[answer].FromString)

        self._ready = call(channel.unary_unary, "Ready", "Empty", "Empty")
        self._instructions = call(channel.unary_unary, "SendPolicyInstructions", "PolicySetup", "Empty")
        self._observations = call(channel.stream_unary, "SendObservations", "Observation", "Empty")
        self._actions = call(channel.unary_unary, "GetActions", "Empty", "Actions")

    async def start(self, config: RemotePolicyConfig) -> None:
        await self._ready(MESSAGES["Empty"]())
        await self._instructions(MESSAGES["PolicySetup"](data=pickle.dumps(config)))

    async def send(self, observation):
        content = pickle.dumps(observation)
        parts = [(BEGIN, content[:100]), (END, content[100:])]
        await self._observations([MESSAGES["Observation"](transfer_state=state, data=data) for state, data in parts])

    async def actions(self):
        content = (await self._actions(MESSAGES["Empty"]())).data
        return pickle.loads(content) if content else []


@asynccontextmanager
async def robot(port):
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield Robot(channel)
