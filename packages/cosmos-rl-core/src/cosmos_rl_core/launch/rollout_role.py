"""A rollout replica as a role: engine, rewards and weight reader around the rollout worker."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from cosmos_rl_core import assemble
from cosmos_rl_core.config.run import RunConfig
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.client import ControllerClient, RemoteDesk
from cosmos_rl_core.interfaces import RolloutEngine
from cosmos_rl_core.launch.assignment import Assignment
from cosmos_rl_core.rollout.worker import RolloutWorker
from cosmos_rl_core.weight_sync import OwnsSubscriber, WeightSubscriber


class RolloutRole:
    """Implements `launch.roles.Role`."""

    def __init__(self, assignment: Assignment, client: ControllerClient) -> None:
        self._at = assignment
        self._client = client
        self._worker: RolloutWorker | None = None

    def pulse(self) -> p.Heartbeat:
        if self._worker is None:
            return p.Heartbeat(progress=0, busy_s=0.0, holding=[])
        worker = self._worker
        return p.Heartbeat(progress=worker.progress, busy_s=worker.busy_s, holding=worker.holding)

    async def run(self) -> None:
        at = self._at
        async with AsyncExitStack() as parts:  # an engine that is not closed keeps its process alive
            engine = await asyncio.get_running_loop().run_in_executor(at.compute, self._build_engine)
            parts.push_async_callback(engine.close)
            rollouter = assemble.build_rollouter(at.config, at.domain, engine, run_dir=at.run_dir, name=at.context.name)
            await self._client.connection.send(p.Ready())
            address = await self._client.sync_address.get()
            if address is None:
                return
            subscriber = await self._subscriber(address, engine)
            parts.push_async_callback(subscriber.close)
            self._worker = RolloutWorker(
                engine,
                rollouter=rollouter,
                subscriber=subscriber,
                desk=RemoteDesk(self._client),
                max_groups=groups_in_flight(at.config),
                timeline=at.context.timeline,
            )
            await self._worker.run()

    def _build_engine(self) -> RolloutEngine:
        self._at.prepare_torch()
        with self._at.context.timeline.span("build"):
            return assemble.build_engine(self._at.config, self._at.domain)

    async def _subscriber(self, address: str, engine: RolloutEngine) -> WeightSubscriber:
        config = self._at.config
        settings = assemble.sync_settings(config, token=self._at.context.token)
        if isinstance(engine, OwnsSubscriber):
            return await engine.subscriber(address, backend=config.sync.backend, settings=settings)
        sync = assemble.build_sync(config)
        return await asyncio.to_thread(sync.subscriber, address, engine.weights(), settings=settings)


def groups_in_flight(config: RunConfig) -> int:
    """Most groups one replica works on: its share of what the staleness window allows."""
    window = (config.sync.max_staleness + 1) * config.policy.prompts_per_step
    return -(-window // config.rollout.replicas)
