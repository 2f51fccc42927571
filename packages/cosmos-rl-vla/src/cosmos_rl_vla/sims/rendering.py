"""Renders MuJoCo models off-screen with one OpenGL context per process.

Freeing a second context would delete objects of the first by their numbers, and frames would silently turn to
garbage; so there is one, freed when the process ends. Meshes and textures are uploaded once for all copies of a model.
"""

from __future__ import annotations

import atexit
import ctypes.util
import functools
import importlib
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpus import Nvml, machine_gpus

_LIBRARIES = {"osmesa": "OSMesa", "egl": "EGL"}
_ADVICE = (
    "install libosmesa6 (rendering on the CPU; `apt-get install libosmesa6`) or libegl1 and the GPU's driver, "
    "or set MUJOCO_GL to the one you have: osmesa, egl or glfw"
)


def choose_gl(
    environment: MutableMapping[str, str],
    *,
    find: Callable[[str], str | None] = ctypes.util.find_library,
    nvml: Nvml | None = None,
) -> str:
    """Write MUJOCO_GL into an environment that lacks it, and return it: the library that is installed.

    With both, egl on a machine with a GPU visible to this process, else osmesa. MUJOCO_EGL_DEVICE_ID, unless set, is
    then the first visible GPU, so that replicas render on their own. Call before `mujoco` is imported. Raises
    UserError if neither library is found, or the user's choice is not.
    """
    nvml = Nvml.open() if nvml is None else nvml
    gpus = machine_gpus(environment, nvml=nvml)
    chosen = environment.get("MUJOCO_GL", "").strip().lower()
    if not chosen:
        if sys.platform == "darwin":
            return "cgl"  # part of the system
        kinds = sorted(_LIBRARIES, reverse=not gpus)  # egl, osmesa
        chosen = next((kind for kind in kinds if find(_LIBRARIES[kind]) is not None), "")
        if not chosen:
            raise UserError(f"MuJoCo finds no OpenGL library to render with: {_ADVICE}")
        environment["MUJOCO_GL"] = chosen
    if chosen in _LIBRARIES and find(_LIBRARIES[chosen]) is None:
        raise UserError(f"MUJOCO_GL={chosen}, but lib{_LIBRARIES[chosen]} is not on this machine: {_ADVICE}")
    if chosen == "egl" and gpus:
        first, device = gpus[0], nvml.device(gpus[0])  # EGL numbers GPUs as NVML does: by their PCI addresses
        if first.isdecimal() or device is not None:
            environment.setdefault("MUJOCO_EGL_DEVICE_ID", first if device is None else str(device.index))
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


_MAX_MODELS = 16
"""Models uploaded at a time, about 35 MB each for MetaWorld's."""
_MAX_GEOMS = 2000


def fit(model: Any, *, height: int, width: int) -> None:
    """Fit a `mujoco.MjModel`'s off-screen buffer to the image, without changing its appearance. Call before rendering.

    The shadow map, 64 MB, is left out where no light casts a shadow.
    """
    model.vis.global_.offheight, model.vis.global_.offwidth = height, width
    if not model.light_castshadow.any():
        model.vis.quality.shadowsize = 0


def lighten(model: Any, *, height: int, width: int) -> None:
    """Turn a `mujoco.MjModel`'s shadows, reflections and multisampling off as well; see `fit`.

    They take most of the time of software rendering, 90 % with shadows.
    """
    model.light_castshadow[:] = 0
    model.mat_reflectance[:] = 0
    model.vis.quality.offsamples = 0
    fit(model, height=height, width=width)


@functools.cache
def renderer() -> Renderer:
    """Return the one Renderer of this process; it is closed when the process ends."""
    one = Renderer()
    atexit.register(one.close)
    return one


class Renderer:
    """Renders any model.

    image = renderer().render("faucet.xml", model, data, camera="corner2", height=64, width=64)
    """

    def __init__(self) -> None:
        self._context = make_context(1, 1)  # images are rendered into off-screen buffers, not into this window
        self._mujoco: Any = importlib.import_module("mujoco")  # whose stubs leave most of it out
        self._models: OrderedDict[tuple[object, ...], tuple[Any, Any]] = OrderedDict()

    def render(self, called: str, model: Any, data: Any, *, camera: str, height: int, width: int) -> NDArray[np.uint8]:
        """Return the image of a camera of the model, [H, W, 3]. Call `fit` or `lighten` before.

        `called` names the model's file: models of one name have the same meshes and textures.
        """
        mujoco = self._mujoco
        self._context.make_current()
        context, scene = self._uploaded(called, model, height, width)
        view = mujoco.MjvCamera()
        view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        view.fixedcamid = model.camera(camera).id
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(model, data, mujoco.MjvOption(), None, view, everything, scene)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
        frame = mujoco.MjrRect(0, 0, width, height)
        mujoco.mjr_render(frame, scene, context)
        image = np.empty((height, width, 3), np.uint8)
        mujoco.mjr_readPixels(image, None, frame, context)
        return image[::-1]  # OpenGL's first row is the lowest

    def close(self) -> None:
        """Free contexts and scenes, in the order that OpenGL needs."""
        self._context.make_current()
        for context, _ in self._models.values():
            context.free()
        self._models.clear()
        self._context.free()
        del self._context  # before the modules that its destructor calls are gone

    def _uploaded(self, called: str, model: Any, height: int, width: int) -> tuple[Any, Any]:
        """Return the model's render context and scene, created if missing; evicts the oldest."""
        mujoco = self._mujoco
        quality = model.vis.quality
        key = (called, height, width, int(quality.shadowsize), int(quality.offsamples))
        if key not in self._models:
            while len(self._models) >= _MAX_MODELS:
                _, (oldest, _) = self._models.popitem(last=False)
                oldest.free()  # while the context it belongs to is current
            scene = mujoco.MjvScene(model, _MAX_GEOMS)
            self._models[key] = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50.value), scene
        self._models.move_to_end(key)
        return self._models[key]
