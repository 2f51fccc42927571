"""lerobot's asynchronous inference: the gRPC service that `lerobot.async_inference.robot_client.RobotClient` calls.

    Ready, SendPolicyInstructions      once: the robot's features, and the length of a chunk
    SendObservations                   in the robot's control loop; refused at once, with the reason, if it is bad
    GetActions                         in a second thread: waits for the newest observation, and answers with a chunk

A robot is its connection. The actions of a chunk are numbered by the robot's steps, so that the server knows which of
the last chunk are still to be executed: the new chunk continues them (real-time chunking).
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, NoReturn

import grpc
import grpc.aio
import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.serving.batching import AnsweredChunk, PassFailed, RobotBatcher
from cosmos_rl_vla.serving.lerobot_wire import END, MAX_BYTES, MESSAGES, PickledCall, pickled_actions, read_pickle
from cosmos_rl_vla.serving.observations import PROMPT, BadObservation, RobotObservation, last_part
from cosmos_rl_vla.serving.served import ActionRequest

WAIT_S = 2.0
"""Longest that GetActions waits for an observation, as in lerobot; the client asks again."""
MOST_ROBOTS = 256
"""Robots that are known; one more, and the first is forgotten: not all that vanish are noticed."""
MOST_STEPS = 2**31 - 2**16
"""Numbers of steps, which are sent in four bytes."""
SERVICE = "transport.AsyncInference"
_IMAGES = "observation.images."


@dataclass(slots=True, kw_only=True)
class LeRobotRobot:
    """A connected robot."""

    features: Mapping[str, Any]
    """lerobot's, of its observations."""
    module: str
    """Of lerobot, that has the classes of messages."""
    chunk: int
    """Actions of a chunk."""
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    place: int = 0
    newest: tuple[ActionRequest, int, float] | None = None
    """The observation that waits for GetActions, its step and its time on the robot's clock."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    asked_at: int = -1
    """Step of the last observation that was taken."""
    last: tuple[np.ndarray, int] | None = None
    """The last chunk [n, D], and the step of its first action."""
    seen: tuple[int, float] | None = None
    """Step and time of the observation before."""
    step_s: float = 0.0
    """Measured seconds of a step; 0: not known."""
    latency_s: float = 0.0
    """Of the last chunk, from the observation to the answer."""


@asynccontextmanager
async def lerobot_server(
    batcher: RobotBatcher, address: str, *, realtime: bool, say: Callable[[str], None]
) -> AsyncIterator[int]:
    """Serve robots until the end of the context; yields the port. Raises UserError for an address in use."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((LeRobotService(batcher, realtime=realtime, say=say).handler(),))
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise UserError(f"--lerobot-port: cannot listen on {address}; is it in use?") from error
    await server.start()
    try:
        yield port
    finally:
        await server.stop(grace=0)


class LeRobotService:
    """The four calls, by the connection that they come from."""

    def __init__(self, batcher: RobotBatcher, *, realtime: bool, say: Callable[[str], None]) -> None:
        self._batcher, self._realtime, self._say = batcher, realtime, say
        self._robots: dict[str, LeRobotRobot] = {}

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the service for a server."""
        unary, streamed = grpc.unary_unary_rpc_method_handler, grpc.stream_unary_rpc_method_handler

        def made(kind: Callable[..., Any], call: Callable[..., Any], request: str, answer: str) -> Any:
            return kind(call, MESSAGES[request].FromString, MESSAGES[answer].SerializeToString)

        calls = {
            "Ready": made(unary, self._ready, "Empty", "Empty"),
            "SendPolicyInstructions": made(unary, self._instructions, "PolicySetup", "Empty"),
            "SendObservations": made(streamed, self._observations, "Observation", "Empty"),
            "GetActions": made(unary, self._actions, "Empty", "Actions"),
        }
        return grpc.method_handlers_generic_handler(SERVICE, calls)

    async def _ready(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self._forget(context.peer())
        return MESSAGES["Empty"]()

    async def _instructions(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        peer = context.peer()
        try:
            robot = self._robot(read_pickle(request.data))
        except BadObservation as error:
            await self._refuse(context, error)
        for former in (peer, *list(self._robots)[: 1 - MOST_ROBOTS]):
            self._forget(former)
        self._robots[peer] = robot
        self._batcher.latencies.robots += 1
        self._say(f"{peer} connected, by lerobot")
        return MESSAGES["Empty"]()

    async def _observations(self, parts: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
        content = bytearray()
        async for part in parts:
            content += part.data
            if len(content) > MAX_BYTES:
                await self._refuse(context, BadObservation(f"an observation of more than {MAX_BYTES} bytes"))
            if part.transfer_state == END:
                break
        robot = await self._known(context)
        try:
            self._offer(robot, read_pickle(bytes(content)))
        except BadObservation as error:
            await self._refuse(context, error)
        return MESSAGES["Empty"]()

    async def _actions(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        robot, peer = await self._known(context), context.peer()
        try:
            async with asyncio.timeout(WAIT_S):
                await robot.arrived.wait()
        except TimeoutError:
            return MESSAGES["Actions"]()
        except asyncio.CancelledError:
            self._forget(peer)
            raise
        assert robot.newest is not None
        (asked, timestep, timestamp), robot.newest = robot.newest, None
        robot.arrived.clear()
        if self._realtime:
            asked = replace(asked, observation=_continued(robot, asked.observation, timestep))
        started = time.perf_counter()
        try:
            chunk = await self._batcher.infer(asked)
        except asyncio.CancelledError:  # the connection is gone: no pass is made
            self._forget(peer)
            raise
        except PassFailed as error:
            await self._refuse(context, error, code=grpc.StatusCode.INTERNAL)
        robot.latency_s = time.perf_counter() - started
        return self._answer(robot, chunk, timestep=timestep, timestamp=timestamp)

    def _answer(self, robot: LeRobotRobot, chunk: AnsweredChunk, *, timestep: int, timestamp: float) -> Any:
        robot.place += 1
        actions = chunk.actions[: robot.chunk]
        robot.last = actions, timestep
        content = pickled_actions(
            actions, module=robot.module, timestep=timestep, timestamp=timestamp, step_s=robot.step_s
        )
        return MESSAGES["Actions"](data=content)

    def _robot(self, sent: Any) -> LeRobotRobot:
        """Return a robot by its RemotePolicyConfig. Raises BadObservation for one that the policy does not fit."""
        name, state = _class_and_state(sent, "RemotePolicyConfig")
        policy, layout = self._batcher.policy, self._batcher.policy.layout
        asked, features, chunk = (
            state.get(key) for key in ("pretrained_name_or_path", "lerobot_features", "actions_per_chunk")
        )
        if not isinstance(asked, str) or PurePath(asked).name != policy.name:
            raise BadObservation(f"pretrained_name_or_path: {asked!r}, this server has {policy.name!r}")
        if not isinstance(features, dict) or not isinstance(chunk, int) or chunk < 1:
            raise BadObservation("lerobot_features, actions_per_chunk: needs a map, and a number of at least 1")
        if state.get("rename_map"):
            raise BadObservation("rename_map: not supported; name the server's cameras by --camera")
        known = {last_part(key) for key in features}
        for camera in layout.cameras:
            if last_part(camera) not in known:
                raise BadObservation(f"{camera}: the robot has no such camera; it has {', '.join(sorted(known))}")
        names = [name for feature in features.values() if not _is_image(feature) for name in feature["names"]]
        if len(names) != layout.state_dim:
            raise BadObservation(f"a robot of {len(names)} numbers, the policy was trained with {layout.state_dim}")
        return LeRobotRobot(features=features, module=name.rpartition(".")[0], chunk=chunk)

    def _offer(self, robot: LeRobotRobot, sent: Any) -> None:
        """Let an observation wait for GetActions, in place of an older one. Raises BadObservation."""
        _, state = _class_and_state(sent, "TimedObservation")
        raw, timestep, timestamp = (state.get(key) for key in ("observation", "timestep", "timestamp"))
        if not isinstance(raw, dict) or not isinstance(timestep, int) or not isinstance(timestamp, float):
            raise BadObservation("observation, timestep, timestamp: needs a map, a whole number, and seconds")
        if not 0 <= timestep < MOST_STEPS:
            raise BadObservation(f"timestep: {timestep}, needs 0 .. {MOST_STEPS - 1}")
        if timestep == robot.asked_at and not state.get("must_go"):
            return  # the client sends until its queue is filled
        policy = self._batcher.policy
        seen = policy.layout.read(_observation(robot.features, raw))
        asked = policy.admit(seen, seed=robot.seed, place=robot.place)
        if robot.seen is not None and timestep > robot.seen[0]:
            robot.step_s = max(0.0, (timestamp - robot.seen[1]) / (timestep - robot.seen[0]))
        robot.seen = timestep, timestamp
        robot.newest, robot.asked_at = (asked, timestep, timestamp), timestep
        robot.arrived.set()

    async def _known(self, context: grpc.aio.ServicerContext) -> LeRobotRobot:
        if (robot := self._robots.get(context.peer())) is None:
            await asyncio.sleep(WAIT_S)  # the client asks again at once
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "no policy instructions on this connection: start the client anew"
            )
        return robot

    async def _refuse(
        self,
        context: grpc.aio.ServicerContext,
        error: Exception,
        *,
        code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT,
    ) -> NoReturn:
        self._batcher.refuse(context.peer(), error)
        await context.abort(code, str(error))
        raise AssertionError("abort raises")

    def _forget(self, peer: str) -> None:
        if self._robots.pop(peer, None) is not None:
            self._batcher.latencies.robots -= 1
            self._say(f"{peer} left")


def _class_and_state(sent: Any, name: str) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(sent, PickledCall) or not re.fullmatch(rf"lerobot(\.\w+)+\.{name}", sent.name):
        raise BadObservation(f"a pickle without a {name} of lerobot")
    if not isinstance(sent.state, dict):
        raise BadObservation(f"{name}: without fields")
    return sent.name, sent.state


def _is_image(feature: Any) -> bool:
    names = feature.get("names") if isinstance(feature, dict) else None
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise BadObservation(f"lerobot_features: {feature!r}, needs dtype, shape and names")
    return feature.get("dtype") in ("image", "video")


def _observation(features: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a robot's values by lerobot's names of features, as lerobot's build_dataset_frame does."""
    seen: dict[str, Any] = {PROMPT: raw.get("task", "")}
    for key, feature in features.items():
        names = [key.removeprefix(_IMAGES)] if _is_image(feature) else feature["names"]
        if missing := [name for name in names if name not in raw]:
            raise BadObservation(f"{missing[0]}: missing in the observation")
        seen[key] = raw[names[0]] if _is_image(feature) else [raw[name] for name in names]
    if not seen[PROMPT]:
        del seen[PROMPT]
    return seen


def _continued(robot: LeRobotRobot, seen: RobotObservation, timestep: int) -> RobotObservation:
    """Return the observation with what is left of the last chunk, and how much of that will be executed.

    The first action of the new chunk is that of the observation's own step, which was executed before.
    """
    if robot.last is None or not robot.last[1] <= timestep < robot.last[1] + len(robot.last[0]):
        return seen
    left = robot.last[0][timestep - robot.last[1] :]
    steps = robot.latency_s / robot.step_s if robot.step_s > 0 else 0.0
    return replace(seen, previous=left, delay=math.ceil(min(1 + steps, len(left))))
