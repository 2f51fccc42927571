"""Vision-language-action policies in simulators on Cosmos-RL. The domain is `VLA`.

Called by core through `Domain`; imports core and transfer. `__all__` lists the public names. Importing this imports no
torch and no simulator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cosmos_rl_core.imports import lazy_exports

if TYPE_CHECKING:
    from cosmos_rl_vla.config import SimulatorLimits
    from cosmos_rl_vla.data.recording.record import Manner, record
    from cosmos_rl_vla.data.recording.writer import Demonstration, DemoWriter
    from cosmos_rl_vla.domain import VLA, VLADomain
    from cosmos_rl_vla.sims.base import (
        BatchSimulator,
        SimObservation,
        SimSpec,
        Simulator,
        SimulatorError,
        Stepped,
        Worded,
    )
    from cosmos_rl_vla.sims.pool.pool import SimulatorPool

_HOMES = {
    "config": ("SimulatorLimits",),
    "domain": ("VLA", "VLADomain"),
    "sims.base": ("BatchSimulator", "SimObservation", "SimSpec", "Simulator", "SimulatorError", "Stepped", "Worded"),
    "sims.pool.pool": ("SimulatorPool",),
    "data.recording.record": ("Manner", "record"),
    "data.recording.writer": ("DemoWriter", "Demonstration"),
}
"""Public names by the module that defines them."""

__all__ = [
    "BatchSimulator",
    "DemoWriter",
    "Demonstration",
    "Manner",
    "SimObservation",
    "SimSpec",
    "Simulator",
    "SimulatorError",
    "SimulatorLimits",
    "SimulatorPool",
    "Stepped",
    "VLA",
    "VLADomain",
    "Worded",
    "record",
]

if not TYPE_CHECKING:  # a type checker uses the imports above, and so reports a misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
