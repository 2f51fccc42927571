"""Trading time for memory, block by block: recompute activations, keep them on the host, compile.

    block(...) -> hooks of FSDP -> offloaded( checkpointed( compiled( forward ))) -> hooks of tp on the parts inside

Only `block.forward` is replaced, so that parameters keep their names and hooks of a call of the block (FSDP's gathering
of parameters) are not part of the recomputation.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from inspect import signature
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.hardware_log import log_choice
from cosmos_rl_core.parallel.config import MemorySection
from cosmos_rl_core.parallel.offload.activations import offload_activations

_KEPT = frozenset(
    f"{namespace}::{name}"
    for namespace, *names in (
        ("aten", "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
        ("aten", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
        ("aten", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable"),
        ("aten", "_scaled_dot_product_flash_attention_for_cpu"),
        ("torch_attn", "_varlen_attn"),
        ("flash_attn", "_flash_attn_forward", "_flash_attn_varlen_forward"),
        ("_c10d_functional", "reduce_scatter_tensor", "all_to_all_single", "all_reduce"),
    )
    for name in names
)
"""Operators that "selective" does not recompute: matrix products, attention, and collectives between ranks.

By name, for those of a package are registered when it is imported.
"""

Forward = Callable[..., Any]


def wants_compile(section: MemorySection, *, device: torch.device, obstacle: str = "", toolchain: str = "") -> bool:
    """Return whether blocks on `device` are compiled; "auto" is decided here, and logged on a GPU.

    Args:
        obstacle: the part of the model or recipe that "auto" does not compile with; empty if there is none.
        toolchain: a missing part of this machine's compilers; empty: it is looked up.
    """
    if section.compile != "auto":
        return section.compile
    if device.type != "cuda":
        return False
    if section.activation_checkpointing == "selective":
        obstacle = obstacle or 'activation_checkpointing = "selective"'
    obstacle = obstacle or toolchain or _missing_toolchain()
    log_choice(f"compile: off ({obstacle})" if obstacle else "compile: each block")
    return not obstacle


def _missing_toolchain() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return "torch is built without CUDA"
    if find_spec("triton") is None:
        return "no Triton"
    return "" if shutil.which(_compiler()) else f"no C++ compiler {_compiler()}"


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def save_memory(blocks: Iterable[nn.Module], section: MemorySection, *, compiled: bool) -> None:
    """Apply [policy.memory] to each of a model's blocks, before `fully_shard` and after tensor parallelism.

    compiled: the result of `wants_compile`. Raises UserError for options that conflict, or that this machine does not
    support.
    """
    mode = section.activation_checkpointing
    if compiled and mode == "selective":
        raise UserError(
            "[policy.memory] compile = true recomputes all but matrix products by itself; with it, set "
            'activation_checkpointing to "none" or "full"'
        )
    blocks = list(blocks)
    if compiled:
        compile_blocks(blocks)
    checkpoint_activations(blocks, mode)
    if section.activation_offload:
        offload_activations(blocks)


def checkpoint_activations(blocks: Iterable[nn.Module], mode: Literal["none", "selective", "full"]) -> None:
    """Drop activations after the forward pass of each block and recompute them in the backward pass.

    "full" keeps a block's inputs alone; "selective" also what its matrix products and attention return.
    """
    if mode == "none":
        return
    for block in blocks:
        block.forward = partial(_checkpointed, block.forward, mode == "selective")


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Run each block through torch.compile; blocks of one class share the compiled code.

    Raises UserError where there is no C++ compiler, which torch.compile calls.
    """
    if shutil.which(_compiler()) is None:
        raise UserError(
            f"[policy.memory] compile = true needs a C++ compiler, and {_compiler()} is not on the path; install one, "
            "name it in the environment variable CXX, or set compile = false"
        )
    for block in blocks:
        forward = block.forward
        if isinstance(forward, MethodType):
            block.forward = MethodType(torch.compile(forward.__func__), block)
        else:
            block.forward = torch.compile(forward)


# Partial functions and methods, not closures: a deep copy of a block then runs with the copy's weights.


def _checkpointed(forward: Forward, selective: bool, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts = _SELECTIVE if selective else {}
    return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name() in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
if "respect_saved_tensors_hooks" in signature(checkpoint).parameters:
    _SELECTIVE["respect_saved_tensors_hooks"] = False  # torch 2.14 asks; what is kept is not offloaded, as in 2.13
