"""Tensor parallelism by regions: parts of a network that all ranks along tp compute together.

    hidden states [1, L, hidden]: the same on every rank, or with `sequence` cut along L
        enter    whole on every rank                                     backward: summed over tp (and cut along L)
          columns  weight [out/tp, in]     each rank makes its part of the features: heads, or MLP channels
          rows     weight [out, in/tp]     each rank adds its features' part of the result
        leave    summed over tp (and cut along L)                        backward: whole on every rank

Between `enter` and `leave` every gradient of an activation is a rank's part of a sum; so is that of a parameter which
is replicated there (a norm of queries, a router): it is declared `Partial`, and the reduction of gradients sums it.
Nothing else in a region depends on tp. Source: Shoeybi et al., arXiv:1909.08053; with `sequence`,
Korthikanti et al., arXiv:2205.05198.

Parameters become DTensors on the tp axis; a module sees plain local tensors while it runs. Vectors are small: each
rank holds them whole and takes its slice, so that no parameter of one dim is cut twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

View = Callable[[DTensor], Tensor]
"""Maps a parameter to the local tensor that its module computes with."""


@dataclass(frozen=True, slots=True)
class TensorAxis:
    """The ranks along tp, and the placement of activations between regions."""

    mesh: DeviceMesh
    """One-dimensional."""
    sequence: bool = False
    """Cut along the sequence between regions (sequence parallelism); L must be divisible by the ranks."""

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def outside(self) -> Placement:
        """The placement of hidden states [1, L, hidden] between regions."""
        return Shard(1) if self.sequence else Replicate()

    def enter(self, hidden: Tensor) -> Tensor:
        """Hidden states [1, L or L/tp, hidden] -> [1, L, hidden], whose gradient is this rank's part of a sum."""
        spread = DTensor.from_local(hidden, self.mesh, [self.outside], run_check=False)
        return spread.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def leave(self, hidden: Tensor) -> Tensor:
        """This rank's part of a sum [1, L, hidden] -> the sum, [1, L or L/tp, hidden]."""
        parts = DTensor.from_local(hidden, self.mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[self.outside]).to_local()

    def gather(self, hidden: Tensor) -> Tensor:
        """Hidden states [1, L/tp, hidden] -> [1, L, hidden], whose gradient is whole on every rank."""
        spread = DTensor.from_local(hidden, self.mesh, [Shard(1)], run_check=False)
        return spread.redistribute(placements=[Replicate()]).to_local()

    def cut(self, hidden: Tensor) -> Tensor:
        """Hidden states [1, L, hidden], the same on every rank -> this rank's slice [1, L/tp, hidden]."""
        replicated = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        return replicated.redistribute(placements=[Shard(1)]).to_local()

    def bounds(self, size: int) -> tuple[int, int]:
        """First and one past the last index of this rank's part of a dim of `size`, by torch.chunk's rule."""
        chunk = -(-size // self.size)
        return min(self.rank * chunk, size), min((self.rank + 1) * chunk, size)

    def place(self, module: nn.Module, name: str, placement: Placement) -> None:
        """Replace a parameter by a DTensor on this axis, cut from the rank's own copy; nothing is sent."""
        parameter = module._parameters[name]
        assert parameter is not None and not isinstance(parameter, DTensor), f"{name} is placed already"
        spread = distribute_tensor(parameter.detach(), self.mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(spread, requires_grad=parameter.requires_grad))


def region(module: nn.Module, axis: TensorAxis) -> None:
    """Make a module's forward a region; its input is the first argument or `hidden_states`."""
    _between(module, axis.enter, axis.leave)


def whole_sequence(module: nn.Module, axis: TensorAxis) -> None:
    """All-gather a sequence across tp before the module: every rank computes all of it and keeps its slice."""
    if axis.sequence:
        _between(module, axis.gather, axis.cut)


def _between(module: nn.Module, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
    """Send a module's hidden states through `before`, and its output, or the first of a tuple, through `after`."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            output = inner(before(args[0]), *args[1:], **kwargs)
        else:
            output = inner(**{**kwargs, "hidden_states": before(kwargs["hidden_states"])})
        return (after(output[0]), *output[1:]) if isinstance(output, tuple) else after(output)

    module.forward = forward


def replicate(module: nn.Module, axis: TensorAxis, *, partial: bool) -> None:
    """Replicate a module's own parameters on every rank; `partial`: their gradients are parts of a sum."""
    _place_all(module, axis, lambda _: Replicate())
    grad = Partial() if partial else Replicate()

    def local(parameter: DTensor) -> Tensor:
        return parameter.to_local(grad_placements=[grad])

    run_on_local(module, dict.fromkeys(_own(module), local))
    if isinstance(module, nn.MultiheadAttention):  # its forward pass reads the parameters of its child
        run_on_local(module, dict.fromkeys(_own(module.out_proj), local), of=module.out_proj)


def cut_columns(module: nn.Module, axis: TensorAxis) -> None:
    """Cut a linear layer's outputs: weight [out, in] along out, and the matching slice of its bias [out]."""
    _place_all(module, axis, lambda p: Shard(0) if p.ndim > 1 else Replicate())
    run_on_local(module, {name: own_part if p.ndim > 1 else own_slice(axis) for name, p in _own(module).items()})


def cut_rows(module: nn.Module, axis: TensorAxis) -> None:
    """Cut a linear layer's inputs: weight [out, in] along in; the bias [out] is added on the first rank alone."""
    _place_all(module, axis, lambda p: Shard(1) if p.ndim > 1 else Replicate())
    run_on_local(module, {name: own_part if p.ndim > 1 else _once(axis) for name, p in _own(module).items()})


def cut_vectors(module: nn.Module, axis: TensorAxis) -> None:
    """Give each rank its slice of a module's own vectors, such as one value per head."""
    _place_all(module, axis, lambda _: Replicate())
    run_on_local(module, dict.fromkeys(_own(module), own_slice(axis)))


def cut_vocabulary(embedding: nn.Embedding, axis: TensorAxis) -> None:
    """Cut an embedding [V, hidden] along the vocabulary: a rank looks up its own tokens, and the parts are summed."""
    start, stop = axis.bounds(embedding.num_embeddings)
    padding = embedding.padding_idx
    embedding.padding_idx = padding - start if padding is not None and start <= padding < stop else None
    axis.place(embedding, "weight", Shard(0))
    run_on_local(embedding, {"weight": own_part})
    inner = embedding.forward

    def forward(input: Tensor) -> Tensor:
        mine = (input >= start) & (input < stop)
        embedded = inner(torch.where(mine, input - start, 0))
        return axis.leave(embedded * mine[..., None])

    embedding.forward = forward


def run_on_local(module: nn.Module, views: Mapping[str, View], *, of: nn.Module | None = None) -> None:
    """Run a module's forward on `views` of the DTensor parameters of `of`; None: its own."""
    if not views:
        return
    inner, owner = module.forward, of or module

    def forward(*args: Any, **kwargs: Any) -> Any:
        parameters = {name: owner._parameters[name] for name in views}
        try:
            for name, parameter in parameters.items():
                assert isinstance(parameter, DTensor)
                owner._parameters[name] = views[name](parameter)  # pyright: ignore[reportArgumentType]
            return inner(*args, **kwargs)
        finally:
            owner._parameters.update(parameters)

    module.forward = forward


def own_part(parameter: DTensor) -> Tensor:
    """This rank's part of a parameter that is cut."""
    return parameter.to_local()


def own_slice(axis: TensorAxis) -> View:
    """This rank's slice, along dim 0, of a replicated parameter."""

    def view(parameter: DTensor) -> Tensor:
        start, stop = axis.bounds(parameter.shape[0])
        return parameter.to_local(grad_placements=[Partial()])[start:stop]

    return view


def _once(axis: TensorAxis) -> View:
    """The parameter on the first rank and zeros on the others, for a bias added to parts of a sum."""

    def view(parameter: DTensor) -> Tensor:
        return parameter.to_local(grad_placements=[Partial()]) * (axis.rank == 0)

    return view


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _place_all(module: nn.Module, axis: TensorAxis, placement: Callable[[nn.Parameter], Placement]) -> None:
    for name, parameter in _own(module).items():
        axis.place(module, name, placement(parameter))
