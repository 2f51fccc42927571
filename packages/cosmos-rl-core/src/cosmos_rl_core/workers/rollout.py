"""The rollout role of a worker: engine, rewards and weight subscriber around the rollout worker."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial

from cosmos_rl_core import assemble
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.episodes.agents import AgentGenerator, endpoint_token
from cosmos_rl_core.episodes.engine import EpisodeGenerator
from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.gpu_time import RolloutGpuTime
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.interfaces import RolloutEngine, Sleeps
from cosmos_rl_core.monitor.data_rewards import score_real_rows
from cosmos_rl_core.observe.startup import GPU, REWARDS, phase
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.rollout.colocated import ColocatedEngine
from cosmos_rl_core.rollout.following import WeightFollower
from cosmos_rl_core.rollout.rollouter import Rollouter
from cosmos_rl_core.rollout.spool.store import Spool, serve_spool, spool_root
from cosmos_rl_core.rollout.worker import RolloutWorker
from cosmos_rl_core.weight_sync import OwnsSubscriber, WeightSubscriber
from cosmos_rl_core.wire.channel import ChannelServer
from cosmos_rl_core.wire.listening import Address, SeldomLog, is_loopback
from cosmos_rl_core.workers.client import ControllerClient, RemoteLeases
from cosmos_rl_core.workers.context import Assignment


class RolloutRole:
    """The rollout worker: builds its engine and generates until the run is over."""

    def __init__(self, assignment: Assignment, client: ControllerClient) -> None:
        self._at = assignment
        self._client = client
        self._worker: RolloutWorker | None = None
        config = assignment.config
        self._gpu_time: RolloutGpuTime | None = None
        if config.run.colocate:
            dims = ParallelDims.of(config.policy.parallel, world_size=config.policy.world_size)
            self._gpu_time = RolloutGpuTime(assignment.run_dir, ranks=dims.world_size)
        self._slow_rewards = SeldomLog(assignment.context.log)
        self._waits = 0
        """Heartbeats while it waited for its turn, for agents or environments, which may take longer than a lease."""
        self._episodes: AgentGenerator | EpisodeGenerator | None = None

    def pulse(self) -> p.Heartbeat:
        waited_s, running_s = self._at.context.timeline.waited()
        if self._worker is None:
            return p.Heartbeat(waited_s=waited_s, running_s=running_s)
        worker = self._worker
        self._waits += self._gpu_time is not None and self._gpu_time.is_waiting
        self._waits += self._episodes is not None and self._episodes.is_waiting
        progress = worker.progress + self._waits
        return p.Heartbeat(
            progress=progress,
            waited_s=waited_s,
            running_s=running_s,
            holding=tuple(worker.holding),
            version=worker.version,
            rows=worker.num_rows,
        )

    async def run(self) -> None:
        at = self._at
        async with AsyncExitStack() as parts:  # an unclosed engine would keep the process alive
            loop = asyncio.get_running_loop()
            own, engine = await self._engines(parts)
            rollouter = await loop.run_in_executor(at.compute, self._build_rollouter, engine)
            spool, read_at = self._spool(), ""
            if spool is not None:
                server = await self._serve(spool)
                parts.push_async_callback(server.close)
                read_at = server.address
            endpoint = await self._endpoint(rollouter, parts)
            await self._client.connection.send(p.Ready(address=read_at, gpu=at.own_gpu(), endpoint=endpoint))
            at.context.log("ready")
            await self._score_real_rows(rollouter)
            leases = RemoteLeases(self._client, spool, shared_by=partial(self._share, spool))
            self._worker = RolloutWorker(
                rollouter,
                weights=WeightFollower(
                    engine,
                    publications=self._client.publications.get,
                    subscribe=partial(self._subscriber, own),
                    lineage=self._client.lineage,
                    interval=at.config.sync.interval,
                    timeline=at.context.timeline,
                    log=at.context.log,
                ),
                leases=leases,
                max_groups=groups_in_flight(at.config, at.config.rollout.replicas),
                spool=spool,
                timeline=at.context.timeline,
                beside=(engine.share_gpu_time,) if isinstance(engine, ColocatedEngine) else (),
                log=at.context.log,
            )
            await self._work(self._worker, leases)
            at.context.log("left")
            if spool is not None:  # after an error the files stay, for the next process of this replica
                spool.close()

    async def _engines(self, parts: AsyncExitStack) -> tuple[RolloutEngine, RolloutEngine]:
        """Return the engine, and the one to generate with: with [run] colocate it sleeps outside of its turns."""
        loop, at, gpu_time = asyncio.get_running_loop(), self._at, self._gpu_time
        if gpu_time is None:
            engine = await loop.run_in_executor(at.compute, self._build_engine)
            parts.push_async_callback(engine.close)
            return engine, engine
        parts.callback(gpu_time.give)
        at.enter(GPU)
        await gpu_time.take()
        engine = await loop.run_in_executor(at.compute, self._build_engine)
        parts.push_async_callback(engine.close)
        if not isinstance(engine, Sleeps):
            name = at.config.rollout.engine
            raise UserError(f"[run] colocate = true: the engine {name!r} has no sleep and wake; set it to false")
        await engine.sleep()
        gpu_time.give()
        colocated = ColocatedEngine(engine, gpu_time, timeline=at.context.timeline)
        parts.push_async_callback(colocated.leave)
        return engine, colocated

    async def _work(self, worker: RolloutWorker, leases: RemoteLeases) -> None:
        """Work until the run is over or, after SIGTERM, until the groups in work are done, and spooled ones sent
        to the controller, or time is up."""
        work = asyncio.create_task(worker.run())
        leaving = asyncio.create_task(self._client.leaving.wait())
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                leases.give_back()
                drained = asyncio.create_task(_drain(worker, leases))
                limit_s = self._at.config.elastic.leave_s
                await asyncio.wait({work, drained}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                drained.cancel()
            if work.done():
                work.result()
        finally:
            leaving.cancel()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _score_real_rows(self, rollouter: Rollouter) -> None:
        """In one replica: score real rows and report the metrics, if [monitor] data_rows is set."""
        config, domain, send = self._at.config, self._at.domain, self._client.connection.send
        monitor = config.monitor
        if not self._at.welcome.scores_rows or not monitor.data_rows or monitor.best_of_data is not None:
            return
        rows, _ = domain.load_rows(config.eval.loss_data)
        try:
            metrics = await score_real_rows(
                domain, config.eval.loss_data, rows[: monitor.data_rows], score=rollouter.score
            )
        except SampleError as error:
            await send(p.Alarm(message=f"no real row could be scored for the monitor: {error.reason}"))
        else:
            await send(p.Validated(version=0, metrics=metrics))

    def _share(self, spool: Spool | None, replicas: int) -> None:
        """Take this replica's share of the work, of which there are `replicas` now.

        A spool that holds its share beside the most replicas so far is large enough: the others may come back.
        """
        config = self._at.config
        if self._worker is not None:
            self._worker.max_groups = groups_in_flight(config, replicas)
        if spool is not None:
            spool.step_groups = min(spool.step_groups, _step_groups(config, replicas))

    def _spool(self) -> Spool | None:
        """Build the storage of large groups; none in the controller's process, where it has no benefit."""
        at = self._at
        if at.context.shares_process:
            return None
        section = at.config.rollout.spool
        return Spool(
            spool_root(section.directory, at.run_dir) / at.context.name,
            threshold_bytes=section.threshold_bytes,
            capacity_bytes=section.capacity_bytes,
            step_groups=_step_groups(at.config, at.config.rollout.replicas),
            kept=tuple(at.welcome.kept),
        )

    async def _serve(self, spool: Spool) -> ChannelServer:
        context = self._at.context
        bind = context.address or self._at.config.run.bind
        remote = not is_loopback(bind)
        return await serve_spool(
            spool, bind=bind, token=context.token, name=context.name, allow_remote=remote, tls=self._at.data_tls
        )

    async def _endpoint(self, rollouter: Rollouter, parts: AsyncExitStack) -> str:
        """Serve the endpoint of [agent] and return its base URL; empty without the section."""
        at, agents = self._at, rollouter.source
        if isinstance(agents, AgentGenerator | EpisodeGenerator):
            self._episodes = agents
        if not isinstance(agents, AgentGenerator):
            return ""
        try:
            from cosmos_rl_core.wire.http_server import serving

            token, log = endpoint_token(at.context.token), at.context.log
            app = at.domain.build_endpoint(at.config.model, agents, token=token, log=log)
        except ImportError as error:
            raise UserError(f"[agent] needs {error.name}: {pip_install('cosmos-rl-llm[agents]')}") from error
        parts.callback(agents.close)
        host = at.context.address or at.config.run.bind
        address = Address(host=host, port=at.config.agent.port if at.config.agent else 0)
        url = await parts.enter_async_context(serving(app, address, allow_remote=not is_loopback(host), log=log))
        agents.base_url = f"{url}/v1"
        return agents.base_url

    def _build_engine(self) -> RolloutEngine:
        self._at.prepare_torch()
        with self._at.building():
            return assemble.build_engine(
                self._at.config, self._at.domain, processes_per_gpu=self._at.context.processes_per_gpu
            )

    def _build_rollouter(self, engine: RolloutEngine) -> Rollouter:
        at = self._at
        with at.building():
            phase(REWARDS)  # they may load models of their own
            return assemble.build_rollouter(
                at.config,
                at.domain,
                engine,
                run_dir=at.run_dir,
                name=at.context.name,
                rewards=at.context.rewards,
                timeline=at.context.timeline,
                report=self._report,
                log=at.context.log,
            )

    def _report(self, complaint: str, detail: str) -> None:
        """Write a complaint about a slow reward to the log and send it to the controller, once a minute."""
        if self._slow_rewards.due(complaint) is not None:
            self._at.context.log(f"{complaint}{detail}")
            self._client.connection.post(p.Alarm(message=complaint))

    async def _subscriber(self, engine: RolloutEngine, address: str) -> WeightSubscriber:
        config, token, tls = self._at.config, self._at.context.token, self._at.data_tls
        if isinstance(engine, OwnsSubscriber):
            return await engine.subscriber(address, settings=config.sync, token=token, tls=tls)
        sync = assemble.build_sync(config)
        return await asyncio.to_thread(
            sync.subscriber, address, engine.weights(), settings=config.sync, token=token, tls=tls
        )


async def _drain(worker: RolloutWorker, leases: RemoteLeases) -> None:
    await leases.send_files()
    await worker.drain()


def groups_in_flight(config: RunConfig, replicas: int) -> int:
    """Maximum number of groups in work at one of `replicas`: its share of the staleness window."""
    window = (config.sync.max_staleness + 1) * config.policy.prompts_per_step
    return -(-window // replicas)


def _step_groups(config: RunConfig, replicas: int) -> int:
    """Number of groups of one step that one of `replicas` generates."""
    return -(-config.policy.prompts_per_step // replicas)
