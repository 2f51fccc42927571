"""Float32 matrix products on CPUs through oneDNN, where it is faster.

torch sends them to MKL, which leaves AVX-512 unused on CPUs that are not Intel's: on AMD's Zen 5 oneDNN, which torch
carries for other dtypes anyway, is about twice as fast for the same float32 arithmetic. On Zen 4, which computes
AVX-512 in two halves, and with AVX2 alone the two are close: oneDNN wins most layers' outputs, MKL the gradients of
narrow weights. In training a measurement decides for each of the two and each shape class (`kernel_choice`). The
operator is the one that torch's own compiler emits for linear layers (`mkldnn::_linear_pointwise`); where this build of
torch lacks oneDNN, or the tensors are of another kind, the ordinary product is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cosmos_rl_core.kernel_choice import fastest

MIN_MEASURED = 64 * 64
"""Elements of the smallest layer that is measured, for training and networks that get many rows."""
MIN_WORK = 2**22
"""Rows times elements of the weight of the smallest product in training that may be oneDNN's: for smaller ones, the
time to decide is more than 2 % of torch's product."""
MIN_WEIGHTS = 128 * 128
"""Elements of the smallest weight in generation for which the call's fixed cost of some 10 microseconds pays.

It applies with one thread and at least two columns. With more threads or one column, MKL cuts the product so that the
last bit of a row depends on how many rows there are; a rollout must not depend on the others in its batch.
"""
MIN_ROWS = 4
"""Fewest rows of a batch in generation, filled up with rows that are thrown away.

Products of one to three rows go through other CPU kernels that round differently. From four rows on, oneDNN was seen
to give a row the same bits whatever its neighbours.
"""
_HAS_ONEDNN = torch.backends.mkldnn.is_available()
_pointwise: Any = torch.ops.mkldnn._linear_pointwise.default if _HAS_ONEDNN else None
_MKL_ROWS = 16
"""`MIN_ROWS` of MKL's products on Intel's CPUs, whose kernels for few rows serve more rows the longer a row is."""
_ROWS = (64, 256, 1024)
"""Row classes in training, by the number that is measured: each has up to twice as many rows, the last one all more."""
_MANY_ROWS = 2048
"""Rows that are measured for a network with `many_rows`."""
_MAX_SIDE = 512
"""Longest side of a weight that is measured; for longer ones the ratio of the two libraries is the same."""


def product(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, many_rows: bool = False) -> Tensor:
    """input [..., in], weight [out, in] -> input @ weight.T + bias [..., out], differentiable.

    `many_rows`: without gradients there are as many rows as in training, and the same kernel computes both.
    """
    trained = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
    if trained and not many_rows and input.numel() * len(weight) < MIN_WORK:
        return F.linear(input, weight, bias)
    if not _is_served(input, weight):
        return F.linear(input, weight, bias)
    if trained or many_rows:
        # With `many_rows` a layer has one kernel, however many rows there are: its bits do not depend on them.
        rows = _MANY_ROWS if many_rows else _class_of(input.numel() // input.shape[-1])
        if weight.numel() < MIN_MEASURED or not _wins("outputs", rows, weight.shape, torch.get_num_threads()):
            return F.linear(input, weight, bias)
        return _Product.apply(input, weight, bias) if trained else _onednn(input, weight, bias)
    return _steady(input, weight, bias)


def outer(rows: Tensor, columns: Tensor) -> Tensor:
    """rows [N, out], columns [N, in] -> rows.T @ columns [out, in]: a weight's gradient, maybe a transposed view."""
    shape = torch.Size((rows.shape[1], columns.shape[1]))
    if _is_served(rows, columns) and _wins("gradients", _class_of(len(rows)), shape, torch.get_num_threads()):
        return _outer(rows, columns)
    return rows.t() @ columns


class OneDnnLinear(nn.Linear):
    """nn.Linear through `product`."""

    many_rows = False

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias, many_rows=self.many_rows)


class ManyRowsLinear(OneDnnLinear):
    """For a network that gets many rows with and without gradients, and computes the same bits in both cases."""

    many_rows = True


class SteadyLinear(nn.Linear):
    """A layer of a model that generates: a row's output has the same bits in any batch. It has no gradients."""

    def forward(self, input: Tensor) -> Tensor:
        return _steady(input, self.weight, self.bias)


def bound_caches(capacity: int = 64) -> None:
    """Let this process keep the compiled products of `capacity` shapes, unless its environment says otherwise.

    For batches of ever new numbers of rows. By default torch and oneDNN keep 1024 each, of 0.1 to 0.3 MB. Call it
    before the first product of the process.
    """
    for variable in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(capacity))


def use_onednn(model: nn.Module, *, many_rows: bool = False, generates: bool = False) -> None:
    """Let the plain float32 linear layers of a model on the CPU use oneDNN. Names and weights stay as they are.

    `many_rows` as for `product`. Small layers change only in a model that `generates`, where a rollout must not depend
    on the others in its batch. Other models' layers on meta are changed too: `product` decides again when they run.
    """
    changed = SteadyLinear if generates else ManyRowsLinear if many_rows else OneDnnLinear
    for module in model.modules():
        if type(module) is not nn.Linear or (module.weight.numel() < MIN_MEASURED and not generates):
            continue
        if (module.weight.is_meta and not generates) or _is_served(module.weight, module.weight):
            module.__class__ = changed


def _class_of(rows: int) -> int:
    return next((measured for measured in _ROWS if rows <= 2 * measured), _ROWS[-1])


@cache
def _wins(kind: Literal["outputs", "gradients"], rows: int, shape: torch.Size, threads: int) -> bool:
    """Return whether oneDNN computes the outputs of a layer, or the gradients of its weight, faster than MKL."""
    out, width = (min(1 << side.bit_length() - 1, _MAX_SIDE) for side in shape)  # rounded down to powers of two

    def choose() -> str:
        # In a thread of its own, which has none of the caller's modes of torch.
        torch.set_num_threads(threads)
        input, weight, slope = (torch.full(size, 0.01) for size in ((rows, width), (out, width), (rows, out)))
        kernels = _outputs(input, weight, slope) if kind == "outputs" else _gradients(input, slope)
        return fastest(f"float32 {kind}, {rows} rows, {width} to {out}, {threads} threads", kernels, code=[__file__])

    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(choose).result() == "onednn"


def _outputs(input: Tensor, weight: Tensor, slope: Tensor) -> dict[str, Callable[[], object]]:
    """Return the libraries' ways to compute a layer's output and its input's gradient."""
    input.requires_grad_()
    return {
        name: partial(lambda run: torch.autograd.grad(run(input, weight, None), input, slope), run)
        for name, run in {"mkl": F.linear, "onednn": _Product.apply}.items()
    }


def _gradients(input: Tensor, slope: Tensor) -> dict[str, Callable[[], object]]:
    """Return the libraries' ways to compute a weight's gradient."""
    return {"mkl": lambda: slope.t() @ input, "onednn": partial(_outer, slope, input)}


def _is_served(input: Tensor, weight: Tensor) -> bool:
    return (
        input.dtype == weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and type(weight) in (nn.Parameter, Tensor)  # not a shard of a distributed tensor
        and _HAS_ONEDNN
        and not torch.is_autocast_enabled("cpu")
    )


def _steady(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product without gradients, of which a row has the same bits in any batch."""
    if weight.numel() < MIN_WEIGHTS and len(weight) > 1 and torch.get_num_threads() == 1:
        return _steady_mkl(input, weight, bias)
    return _onednn(input, weight, bias)


def _steady_mkl(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.numel() >= _MKL_ROWS * input.shape[-1]:
        return F.linear(input, weight, bias)
    rows = input.reshape(-1, input.shape[-1])
    output = F.linear(F.pad(rows, (0, 0, 0, _MKL_ROWS - len(rows))), weight, bias)
    return output[: len(rows)].view(*input.shape[:-1], len(weight))


def _onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _pointwise(input, weight, bias, "none", [], "")


def _outer(rows: Tensor, columns: Tensor) -> Tensor:
    if rows.shape[1] > columns.shape[1]:  # oneDNN copies its first operand: the narrower one
        return _onednn(columns.t(), rows.t(), None).t()
    return _onednn(rows.t(), columns.t(), None)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_input, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)
        return _onednn(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        d_input = _onednn(grad, weight.t(), None) if needs_input else None
        d_weight = outer(rows, input.reshape(-1, input.shape[-1])) if needs_weight else None
        return d_input, d_weight, rows.sum(0) if needs_bias else None
