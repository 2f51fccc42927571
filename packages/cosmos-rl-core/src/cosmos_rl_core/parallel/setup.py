"""The mesh and the options that a domain builds its policy with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cosmos_rl_core.parallel.config import MemorySection, ParallelSection, PrecisionSection

if TYPE_CHECKING:
    from cosmos_rl_core.parallel.mesh import ReplicaMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """Argument of `Domain.build_policy`: the mesh, and the options of [policy] that shape a model."""

    mesh: ReplicaMesh | None = None
    """None: the replica is one process, and nothing is distributed."""
    parallel: ParallelSection = field(default_factory=ParallelSection)
    memory: MemorySection = field(default_factory=MemorySection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
