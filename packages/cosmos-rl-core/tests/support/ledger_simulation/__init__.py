"""A seeded discrete-event simulator of a whole run: the real ledger among fake replicas, a bad network and crashes.

    report = simulate(7, Options.for_seed(7))

Everything random comes from the seed, time is simulated, and the ledger under test is the production code.
After every event it is checked that the books balance, that a sample is trained at most once on the lineage
and within the staleness bound, that commits have the votes of all members, that fenced processes have no
say, that what was acknowledged survives a crash of the controller, that leases of the dead and the hung are
issued again in time, that a batch has the bytes of the groups that were accepted; and at the end,
that the run finishes once faults stop and that its journal replays.
"""

from __future__ import annotations

from cosmos_rl_core.control.ledger.ledger import Ledger
from ledger_simulation.options import Options, Report
from ledger_simulation.world import World

__all__ = ["Options", "Report", "SimulationError", "simulate"]


class SimulationError(AssertionError):
    """A broken rule, with the call that shows it again."""


def simulate(seed: int, options: Options, *, ledger: type[Ledger] = Ledger) -> Report:
    """Play one run and return what happened; raises SimulationError at the first broken rule."""
    world = World(seed, options, ledger)
    try:
        return world.run()
    except (AssertionError, LookupError) as error:
        raise SimulationError(
            f"{type(error).__name__} after {world.report.events} events, at {world.now:.3f} s: {error}\n"
            f"again: simulate({seed}, {options!r})"
        ) from error
