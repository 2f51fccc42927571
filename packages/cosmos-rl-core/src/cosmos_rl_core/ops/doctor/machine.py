"""All checks of this machine, in the order of their output.

What waits for a network or a disk goes on beside the rest. Speeds of transports are measured with nothing else running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import import_from
from cosmos_rl_core.interfaces import Check
from cosmos_rl_core.launch.gpus import assignment_text
from cosmos_rl_core.ops.doctor import collective, limits, network, software
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.recipe.run import RunConfig

GROUP = "cosmos_rl.doctors"
"""Entry points of functions without arguments that return lines."""
ALONE = "transports"
"""The plug-in whose measurements run before the others."""


def examine_machine_of(recipe: Path | None) -> list[Check]:
    """Return the lines about this machine as that of a recipe's controller. None: with the defaults of [run]."""
    if recipe is None:
        return examine_machine(output_dir=Path("runs"))
    import_from(recipe)
    config = load_config(recipe)
    run = config.run
    checks = examine_machine(output_dir=run.directory, bind=run.bind, port=run.port)
    return [*checks, *_assignment(config)]


def _assignment(config: RunConfig) -> Iterator[Check]:
    """Whether this machine's GPUs suffice for the processes of the recipe."""
    try:
        if text := assignment_text(config):
            yield Check("ok", "recipe", text)
    except UserError as error:
        yield Check(
            "bad",
            "recipe",
            str(error),
            "lower sizes in [policy.parallel], or replicas, or set [run] colocate = true",
        )


def examine_machine(*, output_dir: Path, bind: str = "127.0.0.1", port: int = 0) -> list[Check]:
    """Return the lines about this machine. output_dir: where runs are written. bind, port: of the controller."""
    quick = {
        "python": software.python,
        "cosmos-rl": software.packages,
        "processors": limits.processors,
        "memory": limits.memory,
        "shared memory": limits.shared_memory,
        "open files": limits.open_files,
        "locked memory": limits.locked_memory,
        "RDMA": network.infiniband,
        "[run] bind": partial(network.listening, bind, port),
        "host name": network.host_name,
        "clock": network.clock,
        "disk": partial(limits.disk, output_dir),
    }
    names = plugins.names(GROUP)
    checks = {ALONE: run_check(ALONE, partial(_of_plugin, ALONE)) if ALONE in names else []}
    slow = {"torch": software.torch_and_gpus, "all-reduce": collective.all_reduce}
    slow |= {name: partial(_of_plugin, name) for name in names if name != ALONE}
    with ThreadPoolExecutor() as pool:
        started = {name: pool.submit(run_check, name, check) for name, check in {**quick, **slow}.items()}
        checks |= {name: future.result() for name, future in started.items()}
    order = ["python", "cosmos-rl", "torch", "all-reduce", *list(quick)[2:], *names]
    return [line for name in dict.fromkeys(order) for line in checks[name]]


def _of_plugin(name: str) -> list[Check]:
    return list(plugins.load(GROUP, name)())


def run_check(name: str, check: Callable[[], Iterable[Check]]) -> list[Check]:
    """Return the lines of a check. One that fails is a bad line, so that the others are shown."""
    try:
        return list(check())
    except Exception as error:  # of drivers and plug-ins, which may raise anything
        return [Check("bad", name, f"the check failed: {type(error).__name__}: {error}")]
