"""Vision-language-action policies in simulators on Cosmos-RL. The domain is `VLA`.

Called by core through `Domain`; imports core and transfer. `__all__` lists the public names. Importing this imports no
torch and no simulator.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cosmos_rl_vla.data.recording.record import Manner, record
    from cosmos_rl_vla.data.recording.writer import Demonstration, DemoWriter
    from cosmos_rl_vla.domain import VLA, VLADomain
    from cosmos_rl_vla.sims.base import BatchSimulator, Observation, SimSpec, Simulator, SimulatorError, Stepped, Worded
    from cosmos_rl_vla.sims.pool.pool import SimulatorPool

_HOMES = {
    "domain": ("VLA", "VLADomain"),
    "sims.base": ("BatchSimulator", "Observation", "SimSpec", "Simulator", "SimulatorError", "Stepped", "Worded"),
    "sims.pool.pool": ("SimulatorPool",),
    "data.recording.record": ("Manner", "record"),
    "data.recording.writer": ("DemoWriter", "Demonstration"),
}
"""Public names by the module that defines them."""
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BatchSimulator",
    "DemoWriter",
    "Demonstration",
    "Manner",
    "Observation",
    "SimSpec",
    "Simulator",
    "SimulatorError",
    "SimulatorPool",
    "Stepped",
    "VLA",
    "VLADomain",
    "Worded",
    "record",
]


if not TYPE_CHECKING:  # a type checker takes the imports above, and so sees a misspelt name

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
