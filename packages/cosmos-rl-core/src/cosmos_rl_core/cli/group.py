"""The commands of `cosmos-rl` as a group: Ctrl-C, unknown commands and the examples of --help."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError, closest

OTHER_NAMES = {
    "convert": "export",
    "evaluate": "eval",
    "infer": "generate",
    "resume": "run",
    "start": "run",
    "train": "run",
    "validate": "check",
}
"""Names that other programs give to a command of ours."""

EXAMPLES = {
    "run": (
        "run run.toml",
        "run run.toml policy.optimizer.learning_rate=1e-6 run.seed=2",
        "run run.toml --resume auto",
    ),
    "launch": ("launch run.toml --on slurm --dry-run", "launch run.toml --on ray rollout.replicas=4"),
    "controller": ("controller run.toml",),
    "node": ("node run.toml --nodes 2 --node 0 --head 10.0.0.1",),
    "scale": ("scale runs/gsm8k rollout=4",),
    "stop": ("stop runs/gsm8k",),
    "status": ("status runs/gsm8k",),
    "check": ("check run.toml", "check --deep run.toml rollout.group_size=16"),
    "plan": ("plan run.toml --memory 80GiB", "plan run.toml policy.parallel.dp_shard=8 --json"),
    "init": ("init llm my_run",),
    "migrate": ("migrate old.toml --out run.toml",),
    "reward-server": ("reward-server --reward math --port 8300", "reward-server rewards.toml"),
    "export": ("export runs/gsm8k my_model", "export runs/gsm8k my_model --step 100 --dtype bfloat16"),
    "dashboard": ("dashboard runs", "dashboard runs/gsm8k --port 8080"),
    "doctor": ("doctor", "doctor runs/gsm8k --stacks"),
    "keys": ("keys llm rollout.sampling",),
    "generate": ("generate run.toml --prompts '2+3='", "generate run.toml --checkpoint runs/gsm8k --num-gpus 8"),
    "eval": ("eval run.toml --checkpoint runs/gsm8k",),
    "serve": ("serve runs/gsm8k --port 8000", "serve my_model --engine vllm --num-gpus 2"),
}
"""Command -> what one types after `cosmos-rl`. tests/docs holds them to the options that exist."""


class CommandGroup(TyperGroup):
    """typer's group with the commands of `cosmos_rl.commands`, entry points that name functions as typer takes them.

    Ctrl-C is one line, an unknown command names the one that was meant, and help has examples.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name in plugins.names("cosmos_rl.commands"):
            try:
                info = CommandInfo(name=name, callback=plugins.load("cosmos_rl.commands", name))
            except UserError as error:  # of another package; the other commands work
                typer.echo(f"note: {error}", err=True)
                continue
            self.commands[name] = get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)
        for name, lines in EXAMPLES.items():
            examples = "\n".join(f"cosmos-rl {line}" for line in lines)
            self.commands[name].epilog = f"\b\nExamples:\n{examples}"  # \b: the lines are not wrapped

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of EXAMPLES, then those of other packages."""
        order = {name: place for place, name in enumerate(EXAMPLES)}
        return sorted(self.commands, key=lambda name: order.get(name, len(order)))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first argument names; an unknown one is a usage error with the one meant."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            meant = closest(name, [*self.commands, *OTHER_NAMES])
            hint = f" Did you mean {OTHER_NAMES.get(meant, meant)!r}?" if meant else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Ctrl-C ends it with one line and exit code 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from error
