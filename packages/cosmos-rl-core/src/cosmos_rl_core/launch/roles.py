"""What a worker does once it is connected: build its parts, run its loop, leave cleanly.

The same coroutines run in a process of their own (`local`) and side by side in one process (`inline`).
"""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cosmos_rl_core import assemble
from cosmos_rl_core.config.load import load_config, load_domain
from cosmos_rl_core.config.run import RunConfig
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.client import ControllerClient, RemoteDesk, RemoteSteps, decode_groups
from cosmos_rl_core.control.wire import Connection
from cosmos_rl_core.interfaces import Domain
from cosmos_rl_core.loop import train
from cosmos_rl_core.observe.rollouts import write_rollouts
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.rollout.worker import RolloutWorker

if TYPE_CHECKING:
    from cosmos_rl_core.interfaces import Policy
    from cosmos_rl_core.train.checkpoint import TrainState
    from cosmos_rl_core.train.trainer import Trainer
    from cosmos_rl_core.train.worker import PolicyLearner
    from cosmos_rl_core.types import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What every role needs to start."""

    name: str
    connection: Connection
    token: bytes
    timeline: Timeline
    threads: int | None
    """CPU threads of the tensor work; None leaves torch's own choice."""


async def run_role(role: str, context: WorkerContext) -> None:
    """Receive the recipe, run `policy` or `rollout` to the end, say goodbye."""
    welcome = await context.connection.receive()
    assert isinstance(welcome, p.Welcome)
    config = load_config(tomllib.loads(welcome.config))
    domain = load_domain(config.run.domain)
    client = ControllerClient(context.connection)
    with ThreadPoolExecutor(1, thread_name_prefix="compute") as compute:
        roles = {"policy": run_policy, "rollout": run_rollout}
        try:
            await roles[role](config, domain, welcome=welcome, client=client, context=context, compute=compute)
            await client.connection.send(p.Goodbye())
        finally:
            await client.close()
            context.timeline.write(Path(welcome.run_dir) / "logs" / f"{context.name}.trace.json")


async def run_policy(
    config: RunConfig,
    domain: Domain,
    *,
    welcome: p.Welcome,
    client: ControllerClient,
    context: WorkerContext,
    compute: ThreadPoolExecutor,
) -> None:
    from cosmos_rl_core.train.worker import PolicyLearner

    learners: list[PolicyLearner] = []

    def pulse() -> p.Heartbeat:
        progress = learners[0].progress if learners else 0
        busy_s = context.timeline.total("forward_backward", "optim_step")
        return p.Heartbeat(progress=progress, busy_s=busy_s, holding=[])

    client.start(pulse=pulse)
    loop = asyncio.get_running_loop()
    trainer, reference, state = await loop.run_in_executor(
        compute, lambda: _build_policy_parts(config, domain, welcome, context)
    )
    publisher = None
    if not config.is_sft:
        publisher = await asyncio.to_thread(
            assemble.build_sync(config).publisher,
            trainer.policy.weights(),
            token=context.token,
            transport=config.sync.transport,
            dtype=config.sync.dtype,
            bucket_bytes=config.sync.bucket_bytes,
            timeout_s=config.sync.timeout_s,
            bind="127.0.0.1",
        )
    learner = PolicyLearner(
        trainer,
        publisher=publisher,
        reference=reference,
        compute=compute,
        timeline=context.timeline,
        max_skipped_steps=config.policy.max_skipped_steps,
    )
    learners.append(learner)
    saver = CheckpointSaver(config, trainer, root=Path(welcome.run_dir) / "checkpoints", state=state)
    steps = RemoteSteps(
        client,
        batch=BatchMaker(config, domain, trainer.policy, run_dir=Path(welcome.run_dir), timeline=context.timeline),
        checkpoint=saver.after_step,
    )
    await client.connection.send(p.Ready(address=publisher.address if publisher else "", version=trainer.version))
    try:
        await train(steps, learner)
    finally:
        path = saver.save()
        if publisher is not None:
            await publisher.close()
    if path is not None:
        await client.connection.send(p.CheckpointDone(step=trainer.version, path=str(path)))


def _build_policy_parts(
    config: RunConfig, domain: Domain, welcome: p.Welcome, context: WorkerContext
) -> tuple[Trainer, Policy | None, TrainState]:
    from cosmos_rl_core.train import checkpoint

    _set_threads(context.threads, config.run.seed)
    with context.timeline.span("build"):
        trainer = assemble.build_trainer(config, domain)
        reference = assemble.build_reference(config, domain, trainer)
        if not welcome.resume_from:
            return trainer, reference, checkpoint.TrainState(step=0)
        state = checkpoint.load(Path(welcome.resume_from), policy=trainer.policy, optimizer=trainer.optimizer)
        trainer.version = state.step
        return trainer, reference, state


class BatchMaker:
    """A Batch message -> what the trainer takes; writes the step's rollouts on the way."""

    def __init__(
        self, config: RunConfig, domain: Domain, policy: Policy, *, run_dir: Path, timeline: Timeline
    ) -> None:
        from cosmos_rl_core.train.batcher import Batcher

        self._config = config
        self._domain = domain
        self._policy = policy
        self._directory = run_dir / "rollouts"
        self._timeline = timeline
        collate = assemble.build_collate(config, domain)
        self._batcher = Batcher(collate, max_staleness=config.sync.max_staleness)

    def __call__(self, message: p.Batch) -> TrainBatch:
        with self._timeline.span("collate", step=message.step):
            if self._config.is_sft:
                return self._domain.collate_sft(
                    [json.loads(row) for row in message.payloads],
                    policy=self._policy,
                    microbatch_terms=self._config.policy.microbatch_terms,
                )
            groups = decode_groups(message)
            every = self._config.logging.rollouts_every
            if every and message.step % every == 0:
                write_rollouts(self._directory, step=message.step, groups=groups)
            return self._batcher(groups, step=message.step)


class CheckpointSaver:
    """Saves when a step is due, and at the end."""

    def __init__(self, config: RunConfig, trainer: Trainer, *, root: Path, state: TrainState) -> None:
        self._section = config.checkpoint
        self._trainer = trainer
        self._root = root
        self._state = state

    def after_step(self, committed: p.Committed) -> Path | None:
        version = committed.step + 1
        self._state = replace(
            self._state, step=version, next_sample=committed.next_sample, unfinished=tuple(committed.unfinished)
        )
        due = self._section.every_steps and version % self._section.every_steps == 0
        return self.save() if due else None

    def save(self) -> Path | None:
        """Save the last whole step; None in the middle of one, where weights and stream position do not agree."""
        if self._trainer.version != self._state.step:
            return None
        from cosmos_rl_core.train import checkpoint

        return checkpoint.save(
            self._root,
            state=self._state,
            policy=self._trainer.policy,
            optimizer=self._trainer.optimizer,
            keep=self._section.keep,
        )


async def run_rollout(
    config: RunConfig,
    domain: Domain,
    *,
    welcome: p.Welcome,
    client: ControllerClient,
    context: WorkerContext,
    compute: ThreadPoolExecutor,
) -> None:
    worker: list[RolloutWorker] = []

    def pulse() -> p.Heartbeat:
        if not worker:
            return p.Heartbeat(progress=0, busy_s=0.0, holding=[])
        return p.Heartbeat(progress=worker[0].progress, busy_s=worker[0].busy_s, holding=worker[0].holding)

    client.start(pulse=pulse)

    def build() -> assemble.RolloutEngine:
        _set_threads(context.threads, config.run.seed)
        with context.timeline.span("build"):
            return assemble.build_engine(config, domain)

    engine = await asyncio.get_running_loop().run_in_executor(compute, build)
    rollouter = assemble.build_rollouter(config, domain, engine)
    await client.connection.send(p.Ready())
    address = await client.sync_address.get()
    if not address:
        return
    subscriber = await asyncio.to_thread(
        assemble.build_sync(config).subscriber,
        address,
        engine.weights(),
        token=context.token,
        transport=config.sync.transport,
        timeout_s=config.sync.timeout_s,
    )
    worker.append(
        RolloutWorker(
            engine,
            rollouter=rollouter,
            subscriber=subscriber,
            desk=RemoteDesk(client),
            max_groups=groups_in_flight(config),
        )
    )
    try:
        await worker[0].run()
    finally:
        await subscriber.close()
        await engine.close()


def groups_in_flight(config: RunConfig) -> int:
    """Most groups one replica works on: its share of what the staleness window allows."""
    window = (config.sync.max_staleness + 1) * config.policy.prompts_per_step
    return -(-window // config.rollout.replicas)


def _set_threads(threads: int | None, seed: int) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
