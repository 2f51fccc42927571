"""Shards the video tokens of a network over the ranks of `cp`, by hooks on the modules of its plan.

    latents [B, C, f, h, w] -- patches --> tokens [B, L, H]        whole on every rank
                                              |  cut               before the first block
                                           [B, l, H]               blocks, last norm, output projection
                                              |  gather
    velocity [B, C, f, h, w] <-----------  [B, L, C p]             whole on every rank

Positions are of the whole video: rotary angles are computed for all tokens, and cut. Everything before the cut is
computed by all ranks and used for their own tokens, so that each rank has a partial gradient of every parameter; the
sum over cp is the whole. After the gather all ranks compute the same loss.

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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.axes.context import heads_to_rows, rows_to_heads

BLOCKS = "blocks"
"""Key of a plan for each of a network's blocks."""


@dataclass(frozen=True, slots=True)
class Along:
    """The dim of tokens, in tensors that have one."""

    dim: int
    of: int
    """Number of dims of such a tensor; a tensor with another number has no token dim and is left whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlan:
    """The plan of one class of diffusers. Tokens [B, L, H] are the first block's `hidden_states`."""

    attention: tuple[str, ...]
    """Modules of a block that attend across video tokens."""
    arguments: Mapping[str, Mapping[str, Along]] = field(default_factory=dict)
    """Module ("": the network; `BLOCKS`) -> its arguments with a value for each token."""
    outputs: Mapping[str, Along] = field(default_factory=dict)
    """Modules that return values for each token."""
    head: str = "proj_out"
    """Module that maps the last hidden states to [B, l, C p]."""


_TIMES = {"embedded_timestep": Along(1, of=3), "temb": Along(1, of=3)}
"""Cosmos: a time for each token where frames are given, one per sample [B, ...] elsewhere."""

PLANS: Mapping[str, TokenPlan] = {
    "WanTransformer3DModel": TokenPlan(
        attention=("attn1",),
        arguments={"": {"timestep": Along(1, of=2)}},  # Wan 2.2 has a time for each token
        outputs={"rope": Along(1, of=4)},
    ),
    "CosmosTransformer3DModel": TokenPlan(
        attention=("attn1",),
        arguments={BLOCKS: _TIMES, "norm_out": _TIMES},
        outputs={"rope": Along(0, of=2), "learnable_pos_embed": Along(1, of=3)},
    ),
    "SD3Transformer2DModel": TokenPlan(attention=("attn", "attn2")),
}
"""Plans by class name."""


def plan_of(class_name: str, *, cp: int) -> TokenPlan:
    """Return the plan of a class. Raises UserError, with the supported classes, for a class without one."""
    if (plan := PLANS.get(class_name)) is None:
        raise UserError(
            f"[policy.parallel] cp = {cp}: {class_name} has no plan for its tokens; set cp = 1, or use one "
            f"of {', '.join(sorted(PLANS))}"
        )
    return plan


class WholeAttention(TorchFunctionMode):
    """Within the context, `scaled_dot_product_attention` of this rank's tokens attends over all tokens.

        video [B, heads, l, D]      text [B, heads, S, D], the same on every rank
           |  all-to-all               |  this rank's heads
        [B, heads/cp, L + S, D]     attention, as torch computes it
           |  all-to-all               |  every rank's heads to all
        video [B, heads, l, D]      text [B, heads, S, D]

    l = ceil(L / cp) tokens of a rank; the last ranks are padded with rows that no attention reads. Text takes part in
    joint attention (SD3); cross-attention is per token and exchanges nothing. Each rank has a partial gradient of the
    text; the sum over cp is the whole. Source: DeepSpeed-Ulysses, Jacobs et al., arXiv:2309.14509.

    A mode reaches every processor of diffusers that calls torch, without a processor of our own for each class.
    """

    def __init__(self, axis: DeviceMesh, *, rows: int, num_tokens: int) -> None:
        """rows: video tokens of this rank, which precede text. num_tokens: video tokens of all ranks."""
        super().__init__()
        self.calls = 0
        self._axis = axis
        self._rows = rows
        self._num_tokens = num_tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """[B, heads, l + S, D] each -> [B, heads, l + S, D]."""
        assert attn_mask is None, "a mask over video tokens is not supported"
        assert query.shape == key.shape == value.shape, "self-attention has as many keys as queries"
        # Queries, keys and values travel in one exchange, stacked along heads' width: before it a rank has all heads of
        # its tokens, after it all tokens of its heads, which attention needs. The output goes back the same way.
        heads = self._own_heads(torch.cat([_by_row(states) for states in (query, key, value)], dim=2))
        batch = len(query)
        query, key, value = (_by_sample(states, batch=batch) for states in heads.chunk(3, dim=2))
        output = F.scaled_dot_product_attention(query, key, value, **options)  # [B, heads/cp, L + S, D]
        return _by_sample(self._own_rows(_by_row(output)), batch=batch)

    def _own_heads(self, states: Tensor) -> Tensor:
        """[l + S, heads, width] -> [L + S, heads/cp, width]."""
        video, text = states[: self._rows], states[self._rows :]
        # The last ranks' padding arrives at the end and is cut off before any query sees it.
        video = rows_to_heads(video, self._axis)[: self._num_tokens]
        return torch.cat([video, text.chunk(self._axis.size(), dim=1)[self._axis.get_local_rank()]])

    def _own_rows(self, states: Tensor) -> Tensor:
        """[L + S, heads/cp, width] -> [l + S, heads, width]: each rank receives its tokens and all text."""
        video, text = states[: self._num_tokens], states[self._num_tokens :]
        size = self._axis.size()
        filled = F.pad(video, (0, 0, 0, 0, 0, size * self._rows - self._num_tokens))
        # Every rank gets its l tokens and all of the text, so each rank's slice of the exchange has both.
        by_rank = torch.cat([filled.unflatten(0, (size, self._rows)), text.expand(size, *text.shape)], dim=1)
        return heads_to_rows(by_rank.flatten(0, 1), self._axis)


def _by_row(states: Tensor) -> Tensor:
    """[B, heads, rows, D] -> [rows, heads, B D]."""
    return states.permute(2, 1, 0, 3).flatten(2)


def _by_sample(states: Tensor, *, batch: int) -> Tensor:
    """[rows, heads, B D] -> [B, heads, rows, D]."""
    return states.unflatten(2, (batch, -1)).permute(2, 1, 0, 3)


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

    def cut(self, tensor: Tensor, along: Along) -> Tensor:
        """Return this rank's l = ceil(L / cp) of L slices along a dim, padded with zeros."""
        length = tensor.shape[along.dim]
        rows = -(-length // self.mesh.size())
        start = min(rows * self.mesh.get_local_rank(), length)
        part = tensor.narrow(along.dim, start, min(rows, length - start))
        missing = rows - part.shape[along.dim]
        return F.pad(part, (0, 0) * (tensor.ndim - 1 - along.dim) + (0, missing)) if missing else part

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


def check_heads(heads: int, *, cp: int) -> None:
    """Raise UserError where cp does not divide the attention heads."""
    if heads % cp:
        divisors = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise UserError(
            f"[policy.parallel] cp = {cp} does not divide the model's {heads} attention heads: each rank attends with "
            f"some of them; set cp to one of {divisors}"
        )


def _attend_to_all(block: nn.Module, plan: TokenPlan, axis: TokenAxis) -> None:
    for name in plan.attention:
        if (attention := getattr(block, name)) is not None:
            check_heads(attention.heads, cp=axis.mesh.size())
            attention.forward = partial(_attended, attention.forward, axis)


# Partial functions, not closures: a deep copy of a block then runs with the copy's weights.


def _attended(forward: Forward, axis: TokenAxis, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    attention = WholeAttention(axis.mesh, rows=hidden_states.shape[1], num_tokens=axis.num_tokens)
    with attention:
        output = forward(hidden_states, *args, **kwargs)
    if attention.calls != 1:
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
