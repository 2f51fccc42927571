"""One instance of an engine, in a process started by `inference.pool`: samples rollouts of its rows.

    Task --> engine with the checkpoint's weights --> for each row: generate, score, write media --> Answer

It ends when its rows are done, or when its connection closes because the command stopped or died.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosmos_rl_core import assemble
from cosmos_rl_core.connected_process import ChildFailed
from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.imports import quiet_torchao
from cosmos_rl_core.inference.pool import MAX_MESSAGE_BYTES, InstanceTask, PromptRow, Reply, RowResult
from cosmos_rl_core.interfaces import HasCapacity, Recorder, RolloutEngine
from cosmos_rl_core.observe.rollouts import exchange_lines
from cosmos_rl_core.processes import inherited_socket
from cosmos_rl_core.recipe.load import load_config, load_domain
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.reward.rubric import Rubric
from cosmos_rl_core.rollout.rollouter import Generates, request_seed
from cosmos_rl_core.storage.folder import Folder
from cosmos_rl_core.types import Prompt, RolloutGroup
from cosmos_rl_core.weight_sync import OwnsSubscriber
from cosmos_rl_core.wire.channel import ConnectionClosed, adopt
from cosmos_rl_core.workers.failure import Failure

if TYPE_CHECKING:
    from torch import Tensor

TEXTS_AT_ONCE = 64
"""Rows in work at the same time if rollouts are text, which engines batch continuously."""
EVALUATION = 1
"""Stream of the seeds, as in evaluations of a run: equal rows get equal rollouts."""


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole process group; the command decides
        signal.signal(number, signal.SIG_IGN)
    code = asyncio.run(_work(inherited_socket()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # does not wait for the thread of a reward that never returns


async def _work(inherited: socket.socket) -> int:
    connection = await adopt(inherited, decode=InstanceTask, name="command", max_frame_bytes=MAX_MESSAGE_BYTES)
    work = asyncio.create_task(_answer_all(await connection.receive(), connection.post))
    stopped = asyncio.create_task(connection.closed.wait())
    await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
        await asyncio.wait([work])
        return 1
    code = 0
    try:
        work.result()
    except Exception as error:
        failure = Failure.of(error)
        if not failure.user:
            traceback.print_exc()
        with contextlib.suppress(ConnectionClosed):
            connection.post(ChildFailed(reason=failure.message, user=failure.user))
        code = failure.exit_code
    connection.close()
    await stopped  # all messages have been sent
    return code


async def _answer_all(task: InstanceTask, send: Callable[[Reply], None]) -> None:
    """Build the parts and process all rows, several at a time."""
    config = load_config(task.recipe, generating=True)
    domain = load_domain(config.run.domain)
    compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
    build = partial(prepare_engine, config, threads=task.threads)
    engine = await asyncio.get_running_loop().run_in_executor(compute, build)
    async with contextlib.AsyncExitStack() as parts:  # an unclosed engine would keep the process alive
        parts.push_async_callback(engine.close)
        await load_engine(config, engine, task.checkpoint, version=task.version, averaged=task.averaged)
        recorder = domain.recorder(Path(task.media), name=task.name, groups=1, every=1)
        recorder = recorder if recorder is not None and recorder.of_rollouts else None
        if recorder is not None:
            parts.callback(recorder.close)
        answerer = Answerer(
            task=task,
            config=config,
            source=(assemble.build_episodes(config, domain, engine) if task.scored else None) or engine,
            rubric=assemble.build_rubric(config, domain) if task.scored else None,
            recorder=recorder if task.media else None,
        )
        rows = iter(task.rows)
        room = engine.rows_at_once if isinstance(engine, HasCapacity) else TEXTS_AT_ONCE if recorder is None else 1
        at_once = task.rows_at_once or room
        lanes = [asyncio.create_task(_lane(rows, answerer, send)) for _ in range(min(at_once, len(task.rows)))]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)


async def _lane(rows: Iterator[PromptRow], answerer: Answerer, send: Callable[[Reply], None]) -> None:
    for row in rows:
        send(await answerer.answer(row))


def prepare_engine(config: RunConfig, *, threads: int) -> RolloutEngine:
    """Build the engine; runs in the compute thread, as the current GPU is a per-thread setting."""
    import torch

    from cosmos_rl_core.parallel.device import require_gpus, use_device

    require_gpus(os.environ)
    use_device()
    torch.set_num_threads(threads)
    torch.manual_seed(config.run.seed)
    quiet_torchao()  # transformers and diffusers import it
    return assemble.build_engine(config, load_domain(config.run.domain))


async def load_engine(
    config: RunConfig, engine: RolloutEngine, checkpoint: str, *, version: int, averaged: bool
) -> None:
    """Load a checkpoint's weights into an engine; without a checkpoint its initial weights get `version`.

    `averaged` loads the average of the weights, if the checkpoint has one.

    Raises UserError for a checkpoint of another model.
    """
    from cosmos_rl_core.checkpoint.restore import load_weights

    if not checkpoint:
        await engine.switch(version, lambda: None)
    elif isinstance(engine, OwnsSubscriber):
        await _load_by_sync(config, engine, checkpoint, version=version, averaged=averaged)
    else:
        await engine.switch(version, partial(load_weights, checkpoint, engine.weights(), averaged=averaged))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answerer:
    """Produces the lines of rollouts.jsonl, row by row."""

    task: InstanceTask
    config: RunConfig
    source: Generates
    """The engine; or, to score them, the episodes of [environment]."""
    rubric: Rubric | None
    """None: rollouts are not scored."""
    recorder: Recorder | None
    """None: no media are written."""

    async def answer(self, row: PromptRow) -> RowResult:
        """Return the lines of a row, or a single line with the error."""
        prompt = Prompt(sample_id=row.sample, row=row.columns, origin=row.origin)
        failed = ""
        for _ in range(self.config.rollout.max_attempts):
            try:
                group = await self._group(prompt)
            except SampleError as error:
                failed = error.reason
                if error.final:
                    break
            else:
                lines = await asyncio.to_thread(self._lines, group)
                return RowResult(sample=row.sample, lines=lines)
        return RowResult(sample=row.sample, lines=[{"sample": row.sample, "error": failed}])

    async def _group(self, prompt: Prompt) -> RolloutGroup:
        text, rollouts = await self.source.generate(
            prompt,
            num_samples=self.task.num_samples,
            sampling=self.config.eval.sampling(self.config.rollout.sampling),
            seed=request_seed(self.config.run.seed, stream=EVALUATION, sample_id=prompt.sample_id),
        )
        group = RolloutGroup(prompt=prompt, rollouts=tuple(rollouts), prompt_text=text)
        group = assemble.with_prompt_media(self.config, load_domain(self.config.run.domain), group)
        return group if self.rubric is None else await self.rubric.score(group)

    def _lines(self, group: RolloutGroup) -> list[dict[str, Any]]:
        """Return a line for each rollout, and write its media, named relative to the folder of rollouts.jsonl."""
        lines = []
        for place, rollout in enumerate(group.rollouts):
            line: dict[str, Any] = {
                "sample": group.prompt.sample_id,
                "rollout": place,
                "prompt": group.prompt_text,
                "response": rollout.text,
                "finish_reason": rollout.finish_reason,
                "num_terms": rollout.num_terms,
                "policy_version": self.task.version,
                **exchange_lines(rollout),
            }
            if group.media:
                line["prompt_media"] = dict(group.media)
            if self.recorder is not None:
                folder = Path(self.task.media)
                folder.mkdir(parents=True, exist_ok=True)
                path = self.recorder.write(folder / f"{group.prompt.sample_id:06d}_{place}", group, place)
                line["media"] = [f"{folder.name}/{path.name}"]
            if self.rubric is not None:
                line["reward"] = rollout.reward
                line["rewards"] = dict(rollout.reward_breakdown)
            lines.append(line)
        return lines


async def _load_by_sync(
    config: RunConfig, engine: RolloutEngine, checkpoint: str, *, version: int, averaged: bool
) -> None:
    """Load the weights by a weight sync through the [sync] backend, which holds a copy in memory meanwhile."""
    assert isinstance(engine, OwnsSubscriber)
    weights = await asyncio.to_thread(_weights, config, checkpoint, averaged=averaged)
    token, sync = secrets.token_bytes(32), assemble.build_sync(config)
    publisher = await asyncio.to_thread(
        sync.publisher, weights, settings=config.sync, token=token, tls=None, bind="127.0.0.1", ranks=None
    )
    try:
        await publisher.publish(version, weights)
        subscriber = await engine.subscriber(publisher.address, settings=config.sync, token=token)
        try:
            staged = await subscriber.stage(after=engine.version)
            await engine.switch(staged, subscriber.apply)
        finally:
            await subscriber.close()
    finally:
        await publisher.close()


def _weights(config: RunConfig, checkpoint: str, *, averaged: bool) -> dict[str, Tensor]:
    """The checkpoint's weights as the domain exports them, with merged adapters."""
    from cosmos_rl_core.checkpoint.reader import CheckpointReader

    with CheckpointReader(Folder.at(checkpoint)) as reader:
        saved = reader.weights(averaged=averaged)
        return dict(load_domain(config.run.domain).export_weights(config.model, saved, merge_adapters=True))


if __name__ == "__main__":
    main()
