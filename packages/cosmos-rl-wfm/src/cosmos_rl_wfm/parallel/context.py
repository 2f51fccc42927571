"""Shards the tokens of a network over the ranks of `cp`, by hooks on the modules of its plan.

network(...)                           arguments of the plan are cut
  rope(...), ...                       outputs of the plan are cut
  block(...)                           hidden states of the first are cut; L is passed along
    -> what is recomputed (remat)
      -> with L -> block.forward       a recomputation sees the L of its own pass
        attention(...)                 over all tokens
  proj_out(...)                        gathered
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.parallel.attention import WholeAttention
from cosmos_rl_wfm.parallel.axes import check_heads
from cosmos_rl_wfm.parallel.tokens import BLOCKS, Along, TokenPlan, plan_of

Forward = Callable[..., Any]
Change = Callable[[Any], Any]

_LENGTH = "num_tokens"
"""Keyword of a block's call with L."""


class TokenAxis:
    """The ranks along cp, and the number of tokens of the current pass."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.num_tokens = 0
        """L, from the first block to the output projection, and while a block is recomputed."""

    def cut(self, whole: Tensor, along: Along) -> Tensor:
        """Return this rank's l = ceil(L / cp) of L slices along a dim, padded with zeros."""
        length = whole.shape[along.dim]
        rows = -(-length // self.mesh.size())
        start = min(rows * self.mesh.get_local_rank(), length)
        part = whole.narrow(along.dim, start, min(rows, length - start))
        missing = rows - part.shape[along.dim]
        return F.pad(part, (0, 0) * (whole.ndim - 1 - along.dim) + (0, missing)) if missing else part

    def cut_each(self, value: Any, along: Along) -> Any:
        """Cut a tensor, or each of a tuple; values without a token dim are returned unchanged."""
        if isinstance(value, tuple):
            return tuple(self.cut_each(one, along) for one in value)
        return self.cut(value, along) if isinstance(value, Tensor) and value.ndim == along.of else value

    def enter(self, hidden: Tensor) -> Tensor:
        """Begin a pass: tokens [B, L, H] -> this rank's [B, l, H]."""
        self.num_tokens = hidden.shape[1]
        return self.cut(hidden, Along(1, of=3))

    def gather(self, rows: Tensor) -> Tensor:
        """[B, l, W] -> [B, L, W], whose gradient is the same on every rank; each rank takes its slice."""
        cut = DTensor.from_local(rows, self.mesh, [Shard(1)], run_check=False)
        return cut.redistribute(placements=[Replicate()]).to_local()[:, : self.num_tokens]


def cut_tokens(network: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Cut the tokens of `network` over `mesh`, in place, before its blocks are recomputed or sharded.

    Latents and velocity are whole on every rank; all ranks of `mesh` call the network together.
    Raises UserError for a class without a plan, and for heads that cp does not divide.
    """
    plan = plan_of(type(network).__name__, cp=mesh.size())
    axis = TokenAxis(mesh)
    for name, along in plan.outputs.items():
        if (module := getattr(network, name)) is not None:
            module.register_forward_hook(partial(_cut_output, axis, along))
    for name, arguments in plan.arguments.items():
        for module in blocks if name == BLOCKS else [network.get_submodule(name)]:
            _change_arguments(module, {key: partial(axis.cut_each, along=along) for key, along in arguments.items()})
    _change_arguments(blocks[0], {"hidden_states": axis.enter})
    for block in blocks:
        _attend_to_all(block, plan, axis)
        block.forward = partial(_with_length, block.forward, axis)
        block.register_forward_pre_hook(partial(_give_length, axis), with_kwargs=True)
    network.get_submodule(plan.head).register_forward_hook(partial(_gather_output, axis))


def _attend_to_all(block: nn.Module, plan: TokenPlan, axis: TokenAxis) -> None:
    for name in plan.attention:
        if (attention := getattr(block, name)) is not None:
            check_heads(attention.heads, cp=axis.mesh.size())
            attention.forward = partial(_attended, attention.forward, axis)


# Partial functions, not closures: a deep copy of a block then runs with the copy's weights.


def _attended(forward: Forward, axis: TokenAxis, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    whole = WholeAttention(axis.mesh, rows=hidden_states.shape[1], num_tokens=axis.num_tokens)
    with whole:
        output = forward(hidden_states, *args, **kwargs)
    if whole.calls != 1:
        raise UserError(
            "[policy.parallel] cp exchanges heads in torch's scaled_dot_product_attention, which this attention does "
            "not call; unset DIFFUSERS_ATTN_BACKEND, or set it to native"
        )
    return output


def _with_length(forward: Forward, axis: TokenAxis, *args: Any, num_tokens: int, **kwargs: Any) -> Any:
    before, axis.num_tokens = axis.num_tokens, num_tokens
    try:
        return forward(*args, **kwargs)
    finally:
        axis.num_tokens = before


def _give_length(axis: TokenAxis, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, _LENGTH: axis.num_tokens}


def _cut_output(axis: TokenAxis, along: Along, _: nn.Module, args: Any, output: Any) -> Any:
    return axis.cut_each(output, along)


def _gather_output(axis: TokenAxis, _: nn.Module, args: Any, output: Tensor) -> Tensor:
    return axis.gather(output)


def _change_arguments(module: nn.Module, changes: Mapping[str, Change]) -> None:
    """Apply functions to arguments of each call of `module`, positional or by keyword."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    placed = {name: (names.index(name), change) for name, change in changes.items()}
    module.register_forward_pre_hook(partial(_changed, placed), with_kwargs=True)


def _changed(
    placed: Mapping[str, tuple[int, Change]], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given, named = list(args), dict(kwargs)
    for name, (place, change) in placed.items():
        if name in named:
            named[name] = change(named[name])
        elif place < len(given):
            given[place] = change(given[place])
    return tuple(given), named
