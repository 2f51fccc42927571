"""Selects the OpenGL library for MuJoCo's off-screen rendering."""

from __future__ import annotations

import ctypes.util
import importlib
import os
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

from cosmos_rl_core.errors import UserError

_LIBRARIES = {"osmesa": "OSMesa", "egl": "EGL"}
_ADVICE = (
    "install libosmesa6 (rendering on the CPU; `apt-get install libosmesa6`) or libegl1 and the GPU's driver, "
    "or set MUJOCO_GL to the one you have: osmesa, egl or glfw"
)


def choose_gl(
    environment: MutableMapping[str, str], *, find: Callable[[str], str | None] = ctypes.util.find_library
) -> str:
    """Write MUJOCO_GL into an environment that lacks it, and return it: osmesa where it is installed, else egl.

    Call before `mujoco` is imported. Raises UserError if neither library is found, or the user's choice is not.
    """
    chosen = environment.get("MUJOCO_GL", "").strip().lower()
    if not chosen:
        if sys.platform == "darwin":
            return "cgl"  # part of the system
        chosen = next((kind for kind, library in _LIBRARIES.items() if find(library) is not None), "")
        if not chosen:
            raise UserError(f"MuJoCo finds no OpenGL library to render with: {_ADVICE}")
        environment["MUJOCO_GL"] = chosen
    if chosen in _LIBRARIES and find(_LIBRARIES[chosen]) is None:
        raise UserError(f"MUJOCO_GL={chosen}, but lib{_LIBRARIES[chosen]} is not on this machine: {_ADVICE}")
    return chosen


def make_context(width: int, height: int) -> Any:
    """Return a MuJoCo OpenGL context, of the kind that `choose_gl` returns.

    Raises UserError if the library cannot create one (the driver of a GPU is missing).
    """
    kind = choose_gl(os.environ)
    try:
        return importlib.import_module(f"mujoco.{kind}").GLContext(width, height)
    except (ImportError, AttributeError, RuntimeError) as error:  # each kind of MuJoCo's fails in its own way
        raise UserError(f"MUJOCO_GL={kind} gives no OpenGL context ({error}): {_ADVICE}") from error
