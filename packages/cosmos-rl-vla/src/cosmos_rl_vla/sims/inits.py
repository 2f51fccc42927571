"""Maps an `init` to one of a simulator's stored initial states."""

from __future__ import annotations

from cosmos_rl_vla.sims.base import HELD_OUT


def stored_state(init: int, *, states: int, held_out: int) -> int:
    """Return the index among `states` stored ones: the last `held_out` are for evaluation, the others for training.

    Inits >= HELD_OUT are of evaluations. Inits wrap around the number of states.
    """
    assert 0 < held_out < states
    if init >= HELD_OUT:
        return states - held_out + (init - HELD_OUT) % held_out
    return init % (states - held_out)
