"""`cosmos-rl generate`: rollouts of a checkpoint for a list of prompts, over any number of GPUs, without a trainer.

    prompts --round-robin--> instances (processes with one engine each) --> rollouts.jsonl, media/

A row's rollouts depend on [run] seed and its index in the list, not on the number of instances.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cosmos_rl_core import assemble
from cosmos_rl_core.control.evaluation import row_labels
from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import UserError, one_line_errors
from cosmos_rl_core.gpus import machine_gpus
from cosmos_rl_core.inference.pool import InstanceTask, Pool
from cosmos_rl_core.inference.prompts import Prompts, evaluation_prompts, read_prompts
from cosmos_rl_core.inference.request import GenerationWeights, Request, folder_of, identity
from cosmos_rl_core.inference.rollouts_file import MEDIA, Line, RolloutsFile
from cosmos_rl_core.launch.interrupts import on_interrupt, run_to_end
from cosmos_rl_core.launch.open_recipe import OpenRecipe, Rows, open_recipe
from cosmos_rl_core.recipe.load import Recipe, load_domain, tables_of
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.recipe.sections import RolloutParallelSection
from cosmos_rl_core.types import Sampling
from cosmos_rl_core.workers.directory import NO_ROOM


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The result of `generate`."""

    directory: Path
    weights: GenerationWeights
    lines: list[Line]
    """The lines of rollouts.jsonl."""
    num_rows: int
    failed: dict[int, str]
    """Rows without rollouts, with the reason."""
    interrupted: bool
    labels: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Labels of each row by [eval] by, such as ["task=faucet-open"], by the row's index."""

    @property
    def num_done(self) -> int:
        """Number of rows with rollouts."""
        return len({line["sample"] for line in self.lines} - self.failed.keys())


@one_line_errors
def generate(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    *,
    request: Request | None = None,
    rows: Rows | None = None,
    python_path: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Generated:
    """Sample rollouts and write them to rollouts.jsonl; rows that are already in the file are skipped.

    recipe: as in `run`. rows: mappings that replace [eval.data] path. python_path: folders for "module:attribute"
    names.

    Raises UserError for errors that the user can fix, and WorkerFailed if an instance died; the finished rows are on
    disk.
    """
    opened = open_recipe(recipe, overrides, python_path=python_path, eval_rows=rows, generating=True)
    for note in opened.notes:
        say(note)
    with rows_on_disk(opened) as config:
        return generate_rows(config, request or Request(), scored=False, python_path=opened.python_path, say=say)


@contextlib.contextmanager
def rows_on_disk(opened: OpenRecipe) -> Iterator[RunConfig]:
    """Write the rows of a program to temporary files; only their content is part of a request's identity."""
    with tempfile.TemporaryDirectory(prefix="cosmos-rl-rows-") as folder:
        opened.write_rows(Path(folder))
        yield opened.placed_in(Path(folder)).config


def generate_rows(
    config: RunConfig, request: Request, *, scored: bool, python_path: Sequence[str], say: Callable[[str], None]
) -> Generated:
    """Like `generate`, from a validated config; `scored`: also compute the rewards of [reward]."""
    domain = load_domain(config.run.domain)
    config = _checked(config, domain, request)
    gpus = request.instances.allot(machine_gpus(os.environ, config.run.device))
    prompts = _prompts(config, domain, request)
    weights = GenerationWeights.find(request, config)
    directory = folder_of(config, request, weights, command="eval" if scored else "generate")
    file = RolloutsFile.open(
        directory,
        request=identity(config, request, prompts, weights, scored=scored),
        num_samples=request.num_samples,
        overwrite=request.overwrite,
    )
    try:
        left = [row for row in prompts.rows if row.sample not in file.done]
        if file.done:
            say(f"{len(file.done)} of {len(prompts)} rows are already done")
        for sample, reason in prompts.wrong.items():
            file.add([{"sample": sample, "error": reason}])
        pool = Pool(file=file, logs=directory / "logs", python_path=python_path, say=say)
        task = _task(config, request, weights, directory, scored=scored)
        tasks = [
            (replace(task, name=f"instance-{index}", rows=rows), visible)
            for index, (rows, visible) in enumerate(zip(request.instances.deal(left), gpus, strict=True))
            if rows
        ]
        interrupted = run_to_end(_until_interrupted(pool.run(tasks))) if tasks else False
    except OSError as error:
        if error.errno in NO_ROOM:
            raise UserError(
                f"{NO_ROOM[error.errno]} for {directory}; free space there and run the command again"
            ) from error
        raise
    finally:
        lines = file.close()
    failed = {line["sample"]: line["error"] for line in lines if "error" in line}
    return Generated(
        directory=directory,
        weights=weights,
        lines=lines,
        num_rows=len(prompts),
        failed=failed,
        interrupted=interrupted,
        labels={row.sample: row_labels(row.columns, config.eval.by) for row in prompts.rows},
    )


def _prompts(config: RunConfig, domain: DomainBase, request: Request) -> Prompts:
    if not (request.prompts or request.images or request.videos):
        return evaluation_prompts(config, domain)
    return read_prompts(config, domain, request.prompts, images=request.images, videos=request.videos)


def _task(
    config: RunConfig, request: Request, weights: GenerationWeights, directory: Path, *, scored: bool
) -> InstanceTask:
    """The task of an instance, without its name and rows."""
    cores = len(os.sched_getaffinity(0))
    return InstanceTask(
        name="",
        recipe=tables_of(config, generating=True),
        checkpoint=weights.folder,
        averaged=request.averaged,
        version=weights.version,
        rows=[],
        num_samples=request.num_samples,
        rows_at_once=request.rows_at_once,
        scored=scored,
        media=str(directory / MEDIA) if request.media else "",
        threads=config.rollout.threads or max(1, cores // request.instances.total_shard),
    )


async def _until_interrupted(running: Coroutine[Any, Any, None]) -> bool:
    """Run to the end, or until an interrupt. Returns whether it was interrupted."""
    work = asyncio.create_task(running)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        work.cancel()

    on_interrupt(interrupt)
    await asyncio.wait([work])
    if not interrupted:
        work.result()
    elif not work.cancelled():
        work.exception()  # retrieved: after an interrupt it is not reported
    return interrupted


def _checked(config: RunConfig, domain: DomainBase, request: Request) -> RunConfig:
    """Check the request; return the config with tensor parallelism applied to the engine. Raises UserError."""
    rollout, tp_size = config.rollout, request.instances.tp_size
    assemble.look_up_engine(rollout.engine, domain)
    domain.weight_specs(config.model)
    if request.num_samples < 1:
        raise UserError(f"--num-samples {request.num_samples}: must be at least 1")
    sampling = config.eval.sampling(rollout.sampling)
    if request.num_samples > 1 and isinstance(sampling, Sampling) and not sampling.temperature:
        raise UserError(
            f"--num-samples {request.num_samples}: all samples are equal with [eval] temperature = 0; add "
            "eval.temperature=1.0"
        )
    try:
        options = assemble.engine_options(config, domain)
        options = assemble.spread_engine(config, domain, options, tp=tp_size, pp=None)
    except UserError as error:
        raise UserError(f"--tp-size {tp_size}: {error}") from error
    spread = rollout.model_copy(update={"options": dict(options), "parallel": RolloutParallelSection()})
    return config.model_copy(update={"rollout": spread})
