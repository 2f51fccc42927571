"""A whole run on this machine, as one call.

    from cosmos_rl_core import run
    result = run("run.toml", ["run.max_steps=10"])

The calling process is the controller; `local` starts the workers as processes, `inline` runs them beside it. The
command `cosmos-rl run` puts the controller into a process of its own: `supervised.command`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial

from cosmos_rl_core import assemble
from cosmos_rl_core.checkpoint.manifest import has_all_files
from cosmos_rl_core.checkpoint.resume import checkpoint_root, roll_back
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.address_file import ControllerFile
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.state import LedgerConfig
from cosmos_rl_core.control.server import Controller
from cosmos_rl_core.control.settings import ControllerSettings
from cosmos_rl_core.control.status import status_of
from cosmos_rl_core.data.curriculum import Curriculum
from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.episodes.agents import endpoint_token
from cosmos_rl_core.errors import OutOfMemory, UserError, one_line_errors
from cosmos_rl_core.gpus import machine_gpus
from cosmos_rl_core.launch.beginning import Beginning
from cosmos_rl_core.launch.check import check_here, warnings_for
from cosmos_rl_core.launch.external import start_external
from cosmos_rl_core.launch.gpus import assign_gpus
from cosmos_rl_core.launch.interrupts import Interrupts, run_to_end
from cosmos_rl_core.launch.local import start_processes
from cosmos_rl_core.launch.observer import RunObserver, RunResult, Watch
from cosmos_rl_core.launch.open_recipe import OpenRecipe, Rewards, Rows, open_recipe
from cosmos_rl_core.launch.placement import Launch, Workers, start_tasks
from cosmos_rl_core.launch.preflight.checks import look_up
from cosmos_rl_core.launch.scaling import OPERATOR, Scaling, answer_operator
from cosmos_rl_core.launch.secrets import Secrets, describe_encryption
from cosmos_rl_core.launch.supervised.link import LauncherLink
from cosmos_rl_core.launch.takeover import open_directory, open_journal
from cosmos_rl_core.monitor.monitor import History, Verdict
from cosmos_rl_core.observe.machine import machine_log
from cosmos_rl_core.observe.record import record_start
from cosmos_rl_core.observe.reporting import Ending, LastState, Reporter, write_timeline
from cosmos_rl_core.plan.changes import memory_advice
from cosmos_rl_core.recipe.load import Recipe, dump_resolved
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.recipe.sections import RunSection
from cosmos_rl_core.wire.advertised import controller_address
from cosmos_rl_core.wire.channel import ChannelServer, Connection, OnConnect, serve
from cosmos_rl_core.wire.handshake import keep_secret
from cosmos_rl_core.wire.listening import (
    Address,
    descriptor_shortage,
    is_loopback,
    parse_address,
    raise_descriptor_limit,
)
from cosmos_rl_core.workers.directory import Removals, RunDirectory, explain_no_room
from cosmos_rl_core.workers.failure import AGENT, receive_report
from cosmos_rl_core.workers.node import policy_node

RETURN_S = 10.0
"""Time for workers to return after a restart of the controller, if [elastic] suspect_grace_s is not longer."""
PLACEMENTS: Mapping[str, Callable[[Launch], Awaitable[Workers]]] = {
    "local": start_processes,
    "inline": start_tasks,
    "external": start_external,
}
"""The function that starts the workers, by [run] placement."""


@one_line_errors
def run(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    *,
    rewards: Rewards | None = None,
    rows: Rows | None = None,
    eval_rows: Rows | None = None,
    resume: str | None = None,
    overwrite: bool = False,
    python_path: Sequence[str] = (),
) -> RunResult:
    """Train according to a recipe and return the result.

    recipe: a TOML file, its content, or a validated config. overrides: "section.key=value".

    rewards: functions, classes and names, instead of [reward] functions: a list, with weights as pairs
    [(closeness, 1.0), ("format", 0.1)], or a mapping by label. With [run] placement = "local", functions must be in
    modules or scripts, which workers import; lambdas, closures and notebook cells need "inline".

    rows, eval_rows: mappings of columns to JSON, or a `datasets.Dataset`, that replace [data] and [eval.data] path,
    stored in the run's directory: resume the run with the same rows, or with its resolved.toml and no rows.

    resume: "auto" for the newest checkpoint of the run's directory, or a checkpoint's path. python_path: folders for
    "module:attribute" names, searched after installed packages.

    Before anything starts, the recipe is checked as by `cosmos-rl check --deep`, with one call of each reward.

    Raises UserError for errors that the user can fix, and WorkerFailed if a worker was lost permanently; results up to
    then are on disk.
    """
    keys = {"rewards": rewards, "rows": rows, "eval_rows": eval_rows, "python_path": python_path}
    checked = partial(check_here, resume=resume, overwrite=overwrite)
    opened = open_recipe(recipe, overrides, **keys, continues=not overwrite, check=checked)
    return run_opened(opened, resume=resume, overwrite=overwrite)


def run_opened(recipe: OpenRecipe, *, resume: str | None, overwrite: bool) -> RunResult:
    """As `run`, of a recipe that is open."""
    with opened(recipe.config, resume=resume, overwrite=overwrite) as directory:
        return control(recipe, directory, resume=resume, overwrite=overwrite)


@contextlib.contextmanager
def opened(config: RunConfig, *, resume: str | None, overwrite: bool) -> Iterator[RunDirectory]:
    """Lock the run's directory. Errors in the block are explained."""
    continues = config.run.placement == "external"
    with explained(config):
        directory = open_directory(
            config.run.directory, resume=resume is not None, overwrite=overwrite, continues=continues
        )
        with contextlib.closing(directory):
            yield directory


@contextlib.contextmanager
def explained(config: RunConfig) -> Iterator[None]:
    """Explain errors of the block that the user can correct: too little memory, a full disk."""
    try:
        yield
    except OutOfMemory as error:
        raise UserError(f"{error}\n{memory_advice(config, role=error.role, reason=str(error))}") from error
    except OSError as error:
        if no_room := explain_no_room(error, config.run.directory):
            raise no_room from error
        raise


def control(
    recipe: OpenRecipe,
    directory: RunDirectory,
    *,
    resume: str | None,
    overwrite: bool,
    supervised: LauncherLink | None = None,
) -> RunResult:
    """Control a run to its end. `supervised`: the link to the process that owns the workers."""
    short = descriptor_shortage(num_replicas(recipe.config), allowed=raise_descriptor_limit())
    path = directory.path
    recipe = recipe.placed_in(path)
    beginning = Beginning.of(recipe.config, directory, resume=resume, overwrite=overwrite)
    notes = [*recipe.notes, *directory.notes]
    if resume and beginning.resumption is None:
        notes.append(f"{path} has nothing to resume from: a new run starts")
    recipe.write_rows(path, resumed=not beginning.is_new)
    ending, started = Ending(path.resolve()), time.time()
    alone = recipe.config.run.placement != "inline"
    measured = machine_log(path.resolve(), "controller", alone=alone)
    with ending.recorded(started), measured, contextlib.nullcontext() if alone else _chosen_device(recipe.config):
        this_run = _Run(recipe, directory, beginning, ending, supervised=supervised)
        result = run_to_end(this_run.run([*notes, *([short] if short else [])]))
    ending.finished(
        step=result.steps,
        checkpoint=result.checkpoint_url,
        interrupted=result.interrupted,
        stopped=result.stopped,
        started=started,
    )
    return result


def _chosen_device(config: RunConfig) -> contextlib.AbstractContextManager[None]:
    from cosmos_rl_core.parallel.device import chosen_device  # imports torch, which a controller alone does not need

    return chosen_device(config.run.device)


class _Run:
    """The parts of one run and the order in which they start and stop."""

    def __init__(
        self,
        recipe: OpenRecipe,
        opened: RunDirectory,
        beginning: Beginning,
        ending: Ending,
        *,
        supervised: LauncherLink | None,
    ) -> None:
        self._recipe = recipe
        self._beginning, self._ending = beginning, ending
        self._config = config = recipe.config
        self._lock = opened.lock
        self._directory = directory = opened.path.resolve()
        self._supervised = supervised
        look_up(config)
        self._policy_node = policy_node(config.policy, bind=_meeting_host(config))
        gpus = machine_gpus(os.environ, config.run.device) if config.run.placement == "local" else []
        self._gpus = assign_gpus(config, self._policy_node.ranks_per_node, gpus=gpus)
        self._source = assemble.build_source(config)
        self._eval_source = assemble.build_eval_source(config)
        self._max_steps = assemble.planned_steps(config, self._source)
        self._journal = open_journal(directory, beginning.takeover)
        settings = _ledger_config(config, source=self._source, max_steps=self._max_steps)
        self._ledger = beginning.ledger(settings, self._journal)
        first, last = self._ledger.version, self._max_steps
        evaluated = beginning.evaluated_from(first, last=last)
        self._observer = RunObserver(config, directory, first_step=first, first_evaluated=evaluated, max_steps=last)
        self._history = History(directory, first_step=evaluated)
        self._workers: Workers | None = None
        self._scaling: Scaling | None = None
        self._interrupts = Interrupts(
            note=self._observer.note,
            kill=self._kill_workers,
            moves=config.elastic.controller_moves,
            supervised=self._supervised,
        )
        self._removals = Removals(directory, lock=opened.lock)

    async def run(self, notes: Sequence[str] = ()) -> RunResult:
        started = time.perf_counter()
        with self._observer, contextlib.closing(self._journal):
            resumed = self._beginning.notes(self._max_steps)
            self._secrets = self._open_secrets()
            left_over = assemble.left_over(self._config, len(self._source))
            encrypted = describe_encryption(self._secrets, self._config.tls, bind=self._config.run.bind)
            for text in (*warnings_for(self._config), *notes, *resumed, *left_over, *filter(None, [encrypted])):
                self._observer.note(text)
            (self._directory / "resolved.toml").write_text(resolved := dump_resolved(self._config))
            parent, takeover = self._beginning.checkpoint, self._beginning.takeover
            taken = takeover is not None
            record_start(self._directory, recipe=resolved, parent=parent, takes_over=taken, rows=len(self._source))
            watch = Watch(
                self._observer,
                self._config,
                history=self._history,
                stop=lambda reason: controller.stop(reason),
                stepped=self._stepped,
            )
            controller = self._controller(resolved, watch)
            reporter = self._reporter(controller)
            if takeover is not None:
                controller.recovery.succeed(takeover.predecessor(self._ledger))
                await self._journal.flush()
            await self._interrupts.listen(controller)
            server = await self._serve(controller)
            bound = parse_address(server.address)
            reached_at = controller_address(bound, advertise=self._config.run.advertise)
            contact = ControllerFile.of_this_process(
                str(reached_at), generation=controller.ledger.generation, ca=self._secrets.ca
            )
            contact.write(self._directory)
            status = asyncio.create_task(reporter.run())
            try:
                async with self._placed(controller, contact.address):
                    await self._until_over(controller)
            except BaseException:
                reporter.report("failed")
                raise
            finally:
                status.cancel()
                contact.remove(self._directory)
                await server.close()
                write_timeline(self._directory, note=self._observer.note, unless=controller.outcome.is_taken_over)
            self._must_be_there(controller)
            if not self._interrupts.count:
                must_have_trained(controller.ledger, first=self._beginning.step)
            reporter.report("finished")
            step, checkpoint = self._final_weights(controller, watch.rollback)
            return self._observer.finish(
                steps=step,
                trained=controller.ledger.version,
                checkpoint=checkpoint,
                counts=controller.ledger.counts(),
                reasons=controller.ledger.samples.drop_reasons,
                wall_s=time.perf_counter() - started,
                interrupted=self._interrupts.count > 0 or controller.outcome.interrupted,
                stopped=watch.stopped,
            )

    def _open_secrets(self) -> Secrets:
        secrets = self._beginning.secrets(self._directory)
        if self._config.agent is not None:
            keep_secret(self._directory / "agent_token", endpoint_token(secrets.token))
        return secrets

    async def _until_over(self, controller: Controller) -> None:
        try:
            await controller.run()
        except Exception as error:
            if self._supervised is not None:
                self._supervised.crash_at(error)
            raise

    def _final_weights(self, controller: Controller, verdict: Verdict | None) -> tuple[int, str]:
        """Return step and location of the final weights: the newest, or those of the monitor's rollback."""
        newest = controller.ledger.version, controller.recovery.checkpoint
        if verdict is None:
            return newest
        assert verdict.rollback_to is not None
        root = checkpoint_root(self._config, self._directory)
        healthy = roll_back(root, to=verdict.rollback_to, reason=verdict.text)
        if healthy is None:
            self._observer.note(
                f"monitor: no checkpoint of step {verdict.rollback_to} or earlier exists; the newest weights are kept"
            )
            return newest
        self._observer.note(f"monitor: the weights are those of step {healthy}; later checkpoints are set aside")
        return healthy, str(root / f"step_{healthy}")

    async def _serve(self, controller: Controller) -> ChannelServer:
        """Serve workers, and agents that report failed ranks."""

        async def on_connect(connection: Connection) -> None:
            if connection.peer.role == AGENT:
                await receive_report(connection, controller.lifecycle.failed)
            elif connection.peer.role == OPERATOR:
                await answer_operator(connection, self._scaling, self._interrupts)
            else:
                await controller.on_connect(connection)

        earlier_port = self._beginning.takeover.port if self._beginning.takeover else 0
        return await _listen(self._config.run, self._secrets, on_connect, earlier_port=earlier_port)

    def _check_removals(self, controller: Controller) -> None:
        for text in self._removals.check():
            self._observer.note(text)
            if self._removals.lost:
                controller.stop("its directory was removed")

    def _must_be_there(self, controller: Controller) -> None:
        """Raise UserError if the run's directory or its last checkpoint was removed."""
        self._check_removals(controller)
        last = controller.recovery.checkpoint
        exists = not last or "://" in last or has_all_files(last)
        if self._removals.lost:
            raise UserError(self._removals.explain(step=controller.ledger.version, checkpoint=last if exists else ""))
        if not exists:
            raise UserError(f"the checkpoint {last}, the last of the run, was removed; its weights are gone")

    def _controller(self, text: str, watch: Watch) -> Controller:
        config = self._config
        return Controller(
            ControllerSettings(
                config_toml=text,
                run_dir=self._directory,
                resume_from=self._beginning.checkpoint,
                supervised=config.is_sft,
                max_steps=self._max_steps,
                eval_every_steps=config.eval.every_steps,
                eval_by=config.eval.by,
                group_size=config.rollout.group_size,
                sync_interval=config.sync.interval,
                newest_checkpoint=partial(self._beginning.newest, self._directory),
                policy_wait_s=config.elastic.policy_wait_s,
                external=config.run.placement == "external",
            ),
            source=self._source,
            eval_source=self._eval_source,
            ledger=self._ledger,
            journal=self._journal,
            clock=time.monotonic,
            observer=watch,
        )

    @contextlib.asynccontextmanager
    async def _placed(self, controller: Controller, address: str):  # noqa: ANN202
        """Start the workers according to [run] placement; on exit, send Stop and wait until they have left."""
        self._observer.phase("starting workers")
        self._workers = await PLACEMENTS[self._config.run.placement](
            Launch(
                config=self._config,
                directory=self._directory,
                controller=controller,
                address=address,
                token=self._secrets.token,
                tls=self._secrets.workers,
                policy_node=self._policy_node,
                gpus=self._gpus,
                python_path=self._recipe.python_path,
                rewards=self._recipe.rewards,
                observer=self._observer,
                lock=self._lock,
                supervised=self._supervised,
            )
        )
        self._scaling = Scaling(controller, self._workers, self._config, note=self._observer.note)
        try:
            yield
        finally:
            controller.dismiss()
            await self._workers.leave()

    def _stepped(self, metrics: Mapping[str, float]) -> None:
        if self._scaling is not None:
            self._scaling.stepped(metrics)

    def _kill_workers(self) -> None:
        if self._workers is not None:
            self._workers.kill()

    def _reporter(self, controller: Controller) -> Reporter:
        ledger, recovery, outcome = controller.ledger, controller.recovery, controller.outcome
        self._ending.position = lambda: LastState(ledger.version, recovery.checkpoint, outcome.worker)
        return Reporter(
            self._directory,
            status=lambda phase: status_of(controller, phase=phase, targets=self._scaling and self._scaling.targets),
            phase=lambda: self._observer.current_phase,
            events=self._observer.events,
            checks=(controller.durable.check_owner, lambda: self._check_removals(controller)),
            is_taken_over=lambda: outcome.is_taken_over,
            note=self._observer.note,
            starting=self._observer.starting,
        )


def _ledger_config(config: RunConfig, *, source: PromptSource, max_steps: int) -> LedgerConfig:
    section, seed = config.prompts.curriculum, config.run.seed
    return LedgerConfig(
        groups_per_step=config.policy.prompts_per_step,
        max_staleness=config.sync.max_staleness,
        total_samples=source.total,
        max_steps=max_steps,
        rollouts=not config.is_sft,
        policy_members=config.policy.replicas,
        lease_ttl_s=config.elastic.lease_ttl_s,
        suspect_grace_s=config.elastic.suspect_grace_s,
        silence_s=config.elastic.silence_s,
        stall_s=config.elastic.stall_s,
        peer_s=config.elastic.peer_s,
        max_attempts=config.rollout.max_attempts,
        restart_grace_s=max(config.elastic.suspect_grace_s, RETURN_S),
        curriculum=section
        and Curriculum(num_rows=len(source), row_of=source.row_of, seed=seed, **section.model_dump()),
    )


def must_have_trained(ledger: Ledger, *, first: int) -> None:
    """Raise UserError for a run from version `first` that ended without a step because all prompts were dropped."""
    reasons = ledger.samples.drop_reasons
    if ledger.version > first or not reasons:
        return
    [(reason, number)] = reasons.most_common(1)
    raise UserError(f"no step was trained: {reasons.total()} prompts were dropped, {number} of them as {reason}")


def num_replicas(config: RunConfig) -> int:
    """Return the number of workers that the recipe asks for."""
    return config.policy.replicas + (0 if config.is_sft else config.rollout.replicas)


def _meeting_host(config: RunConfig) -> str:
    """Return this machine's address for the other machines of the policy replica."""
    if config.policy.num_nodes == 1 or config.run.placement == "external":
        return config.run.bind
    return controller_address(Address(host=config.run.bind), advertise=config.run.advertise).host


async def _listen(section: RunSection, secrets: Secrets, on_connect: OnConnect, *, earlier_port: int) -> ChannelServer:
    """Listen for workers, if possible at the port of an earlier controller, which they know."""
    listen = partial(
        serve,
        token=secrets.token,
        tls=secrets.controller,
        decode=p.ToController,
        on_connect=on_connect,
        allow_remote=not is_loopback(section.bind),
    )
    if earlier_port and not section.port:
        with contextlib.suppress(UserError):  # another process has the port: workers find the new one
            return await listen(str(Address(host=section.bind, port=earlier_port)))
    return await listen(str(Address(host=section.bind, port=section.port)))
