"""GPUs of each worker of this machine: one per policy rank, and for a rollout replica as many as its engine needs.

    assigned = assign_gpus(config, node.ranks_per_node, gpus=machine_gpus(os.environ))
    added = GpuSupply(...).assign({"rollout": 2}, in_use={"policy-0": ["0"]})      # for workers that are added later

A GPU belongs to one process, unless [run] share_gpus allows more, or [run] colocate a policy rank and a rollout in
turns. On a machine without GPUs nothing is assigned.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from cosmos_rl_core.assemble import engine_options
from cosmos_rl_core.control.protocol import Role
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpus import ON_CPU, SLICE, machine_gpus, short_names
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.recipe.load import load_domain
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.recipe.sections import RunSection


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedGpus:
    """Visible GPUs of each worker; empty sequences on a machine without GPUs."""

    policies: Sequence[Sequence[str]]
    """GPUs of each policy replica, one a rank."""
    rollouts: Sequence[Sequence[str]]
    """Those of each rollout replica."""
    unused: Sequence[str] = ()
    in_turns: bool = False
    """Whether policies and rollouts use the same GPUs in turns ([run] colocate)."""

    @property
    def workers(self) -> dict[str, Sequence[str]]:
        """Return the GPUs by the name of the worker."""
        policies = {f"policy-{index}": own for index, own in enumerate(self.policies)}
        return policies | {f"rollout-{index}": own for index, own in enumerate(self.rollouts)}

    @property
    def processes_per_gpu(self) -> int:
        """Processes of the run on its fullest GPU at the same time; 1 on a machine without GPUs."""
        if self.in_turns:
            return 1
        return max(Counter(gpu for own in self.workers.values() for gpu in own).values(), default=1)

    def __str__(self) -> str:
        """ "policy-0 on 0,1, rollout-0 on 2; unused: 3"."""
        text = ", ".join(f"{name} on {short_names(own)}" for name, own in self.workers.items())
        text += ", in turns" if self.in_turns else ""
        return f"{text}; unused: {short_names(self.unused)}" if self.unused else text


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSupply:
    """The GPUs of this machine, for workers that are added to a run."""

    visible: Sequence[str]
    per_worker: Mapping[Role, int]
    """GPUs of one worker on this machine, by role."""
    share: bool
    """[run] share_gpus: whether a GPU may have several processes of the run."""
    in_turns: bool = False
    """[run] colocate: whether a policy rank and a rollout replica use the same GPU in turns."""

    def assign(
        self, more: Mapping[Role, int], *, in_use: Mapping[str, Sequence[str]]
    ) -> dict[Role, list[Sequence[str]]]:
        """Return the GPUs of `more` workers by role, the least used ones first. in_use: GPUs by worker.

        Raises UserError if fewer are free than needed, unless `share` is set, and for policies that take turns.
        """
        if self.in_turns:
            if more.get("policy"):
                raise UserError("[run] colocate = true: the run has one policy, and no further one can be added")
            in_use = {name: own for name, own in in_use.items() if name.startswith("rollout")}
        if not self.visible:
            return {role: [()] * number for role, number in more.items()}
        use = Counter({gpu: 0 for gpu in self.visible})
        use.update(gpu for own in in_use.values() for gpu in own)
        free = sum(number == 0 for number in use.values())
        needed = sum(self.per_worker[role] * number for role, number in more.items())
        if needed > free and not self.share:
            parts = [f"{number} more {role} x {self.per_worker[role]}" for role, number in more.items() if number]
            workers = ", ".join(f"{name} on {short_names(own)}" for name, own in in_use.items())
            raise UserError(
                f"{needed} GPUs of this machine are needed ({', '.join(parts)}), but {free} of {len(self.visible)} are "
                f"free: {workers}; start the workers on another machine, or set [run] share_gpus = true"
            )
        assigned: dict[Role, list[Sequence[str]]] = {}
        for role, number in more.items():
            for _ in range(number):
                own = sorted(self.visible, key=use.__getitem__)[: self.per_worker[role]]
                use.update(own)
                assigned.setdefault(role, []).append(own)
        return assigned


def gpus_per_rollout(config: RunConfig) -> int:
    """Return the number of GPUs of one rollout replica.

    Raises ConfigError for wrong [rollout.options], and UserError as `assemble.engine_options`.
    """
    domain, name = load_domain(config.run.domain), config.rollout.engine
    if name not in domain.engines:
        return 1
    return domain.gpus_per_engine(name, engine_options(config, domain))


def rollout_gpus(config: RunConfig) -> list[int]:
    """Return the number of GPUs of each rollout replica; an empty list in supervised fine-tuning."""
    return [] if config.is_sft else [gpus_per_rollout(config)] * config.rollout.replicas


def assign_gpus(config: RunConfig, ranks: int, *, gpus: Sequence[str]) -> AssignedGpus:
    """Return the GPUs of every policy replica, of `ranks` ranks each, and of every rollout replica.

    They are assigned in the order of `gpus`. Raises UserError if there are too few, and [run] share_gpus is not set or
    cannot help.
    """
    policies = config.policy.replicas
    counts = [*[ranks] * policies, *rollout_gpus(config)]
    if not gpus:
        each: list[Sequence[str]] = [() for _ in counts]
        return AssignedGpus(policies=each[:policies], rollouts=each[policies:])
    _check_number(counts[:policies], counts[policies:], gpus, config.run)
    if config.run.colocate:  # both from the first GPU on, in turns
        own = [_dealt(counts[:policies], gpus), _dealt(counts[policies:], gpus)]
        most = max(sum(counts[:policies]), sum(counts[policies:]))
        return AssignedGpus(policies=own[0], rollouts=own[1], unused=gpus[most:], in_turns=True)
    each = _dealt(counts, gpus)
    return AssignedGpus(policies=each[:policies], rollouts=each[policies:], unused=gpus[sum(counts) :])


def _dealt(counts: Sequence[int], gpus: Sequence[str]) -> list[Sequence[str]]:
    supply = cycle(gpus)
    return [list(islice(supply, number)) for number in counts]


def assignment_text(config: RunConfig) -> str:
    """Return the GPUs of each worker of `cosmos-rl run` here as a sentence; empty on a machine without GPUs.

    Raises UserError as `assign_gpus`.
    """
    if config.run.placement != "local" or not (gpus := machine_gpus(os.environ, config.run.device)):
        return ""
    dims = ParallelDims.of(config.policy.parallel, world_size=config.policy.world_size)
    return str(assign_gpus(config, dims.world_size // config.policy.num_nodes, gpus=gpus))


def _check_number(policies: Sequence[int], rollouts: Sequence[int], gpus: Sequence[str], run: RunSection) -> None:
    ranks, needed = policies[0], sum(policies) + sum(rollouts)
    here = f"{len(gpus)} {'is' if len(gpus) == 1 else 'are'} visible ({short_names(gpus)})"
    on_cpu = f"or {ON_CPU}"
    if gpus[0].startswith(SLICE) and max(ranks, *rollouts[:1]) > 1:
        raise UserError(
            f"{short_names(gpus)} are slices of a GPU (MIG), and CUDA gives one to a process: several ranks cannot "
            f"exchange tensors over them; set [policy.parallel] and [rollout.parallel] to one rank, or turn MIG off "
            f"(nvidia-smi -mig 0), {on_cpu}"
        )
    if ranks > len(gpus):
        raise UserError(
            f"the policy needs {ranks} GPUs of this machine, one per rank, but {here}; lower [policy] ranks_per_node "
            f"or [policy.parallel], {on_cpu}"
        )
    if rollouts and rollouts[0] > len(gpus):
        raise UserError(
            f"a rollout replica needs {rollouts[0]} GPUs, all of one machine, but {here}; lower tp or pp in "
            f"[rollout.parallel], or the sizes in [rollout.options], {on_cpu}"
        )
    if run.colocate:
        if sum(rollouts) > len(gpus):
            raise UserError(
                f"{len(rollouts)} x {rollouts[0]} GPUs of this machine are needed for rollout replicas, but {here}; "
                f"lower [rollout] replicas, {on_cpu}"
            )
    elif needed > len(gpus) and not run.share_gpus:
        raise UserError(
            f"the run needs {needed} GPUs of this machine, {sum(policies)} for the policy's ranks and "
            f"{len(rollouts)} x {rollouts[0]} for rollout replicas, but {here}; lower [policy.parallel] or [rollout] "
            f"replicas, set [run] colocate = true to use the same GPUs in turns, or share_gpus = true to run several "
            f"processes on a GPU, {on_cpu}"
        )
