"""Activations on a CPU whose elements do not depend on where among the others they lie.

    elements  | thread 0: vectors ... rest | thread 1: vectors ... rest |

torch cuts the elements evenly among its threads and puts what does not fill a vector through another `exp`, which
rounds differently. Here the elements are filled up so that there is no rest anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2CLS, GELUActivation, GELUTanh

_GRAIN = 32768
"""Fewest elements torch gives to a thread (`at::internal::GRAIN_SIZE`)."""
_GELU_GRAIN = 16384
"""`F.gelu` takes all threads above this."""
_GELU = (nn.GELU, GELUActivation, GELUTanh)
_VECTOR = 64
"""Elements of the widest step of torch's vectorised loops, of any type and instruction set."""


def use_steady_activations(model: nn.Module) -> None:
    """Let the activation modules of a model on the CPU give each element the same bits whatever lies beside it."""
    kinds = {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()}
    for module in model.modules():
        if type(module) in kinds:
            module.forward = partial(_steady, module.forward, is_gelu=isinstance(module, _GELU))


def _steady(activation: Callable[[Tensor], Tensor], input: Tensor, *, is_gelu: bool) -> Tensor:
    """Apply to each element of `input`, of any shape."""
    size = input.numel()
    missing = -size % (_VECTOR * _num_threads(size, is_gelu=is_gelu))
    if input.device.type != "cpu" or (missing == 0 and input.is_contiguous()):
        return activation(input)
    return activation(F.pad(input.reshape(-1), (0, missing)))[:size].view(input.shape)


def _num_threads(size: int, *, is_gelu: bool) -> int:
    """How many threads torch cuts `size` elements among, and as many when they are filled up to whole vectors."""
    most = torch.get_num_threads()
    if is_gelu:
        return most if size > _GELU_GRAIN else 1
    return max(1, min(most, -(-size // _GRAIN)))
