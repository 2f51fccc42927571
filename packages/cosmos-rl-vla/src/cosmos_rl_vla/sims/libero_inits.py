"""LIBERO's stored initial states."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.pickles import read_array

MAX_BYTES = 64 * 2**20
"""Size of the unpacked states of a task; 50 states of 1,000 numbers are 400 KB."""


def read_states(path: Path) -> NDArray[np.float64]:
    """Return the initial states [50, n] of a task: MuJoCo's time, positions and velocities.

    The file is an archive of `torch.save` around the pickle of one numpy array; neither is loaded as such.
    Raises UserError for a file that is not there or holds anything else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next(member for member in archive.infolist() if member.filename.endswith("data.pkl"))
            if pickled.file_size > MAX_BYTES:
                raise UserError(f"{path}: {pickled.file_size:,} bytes of states, at most {MAX_BYTES:,} are read")
            data = archive.read(pickled)
    except (OSError, EOFError, RuntimeError, StopIteration, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: LIBERO's initial states cannot be read ({error}); install hf-libero again") from error
    states = read_array(data, name=str(path))
    if states.ndim != 2 or states.dtype != np.float64:
        raise UserError(f"{path}: initial states of shape {states.shape} and type {states.dtype}, not float64 [50, n]")
    return states
