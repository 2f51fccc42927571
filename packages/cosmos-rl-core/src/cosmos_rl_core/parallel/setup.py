"""The mesh and the options that a domain builds its policy with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from cosmos_rl_core.parallel.config import MemorySection, ParallelSection, PrecisionSection

if TYPE_CHECKING:
    import torch

    from cosmos_rl_core.parallel.mesh import ReplicaMesh


SentAdapters = Literal["live", "scaled", "merged"]
"""Trained adapters on their way to engines: A and B themselves, A and alpha / rank B, or W + alpha / rank B A."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """Argument of `Domain.build_policy`: the mesh, and the options of [policy] that shape a model."""

    mesh: ReplicaMesh | None = None
    """None: the replica is one process, and nothing is distributed."""
    parallel: ParallelSection = field(default_factory=ParallelSection)
    memory: MemorySection = field(default_factory=MemorySection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    frozen: bool = False
    """The policy is never trained: the reference of a KL term."""
    sent_adapters: SentAdapters = "live"
    """The form in which engines take trained adapters."""

    @property
    def device(self) -> torch.device:
        """The device that the model trains on; it may be built on another one first."""
        from cosmos_rl_core.parallel.device import own_device

        return own_device() if self.mesh is None else self.mesh.device

    def parameter_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the weights: [policy.precision] parameters, or `compute_dtype` if frozen, over ranks.

        Ranks gather weights in the dtype that they compute in: a model that is never trained computes the same values
        without float32 masters. In one process autocast may use the masters themselves.
        """
        import torch

        in_use = self.frozen and self.mesh is not None
        return compute_dtype if in_use else getattr(torch, self.precision.parameters)

    def compiles(self, *, obstacle: str = "") -> bool:
        """Return whether the blocks are compiled. obstacle: a part of the model that "auto" does not compile with."""
        from cosmos_rl_core.parallel.remat import wants_compile

        axes = [f"{axis} = {size}" for axis in ("pp", "cp", "tp", "ep") if (size := getattr(self.parallel, axis)) > 1]
        return wants_compile(self.memory, device=self.device, obstacle=obstacle or ", ".join(axes))
