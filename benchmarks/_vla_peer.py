"""MetaWorld as an ordinary gymnasium environment, which renders its camera in every step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv

SIZE = 64
CAMERA = "corner2"


def vectorise(tasks: list[str], *, light: bool) -> AsyncVectorEnv:
    """Return gymnasium's processes, one for each task, with observations in shared memory.

    `light`: rendered as ours are, without shadows and multisampling; else with MetaWorld's own settings.
    """
    made: Callable[[str], Any] = LightMetaWorld if light else StockMetaWorld
    return AsyncVectorEnv([partial(made, task) for task in tasks], shared_memory=True, copy=False, context="spawn")


class _Drawn(gymnasium.Env):
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    observation_space = gymnasium.spaces.Dict(
        {
            "image": gymnasium.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8),
            "state": gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32),
        }
    )

    def seen(self, full: np.ndarray, image: np.ndarray) -> dict[str, np.ndarray]:
        return {"image": np.ascontiguousarray(image), "state": full[:4].astype(np.float32)}


class LightMetaWorld(_Drawn):
    """Our scene, stepped and rendered as vector environments do it."""

    def __init__(self, task: str) -> None:
        from cosmos_rl_vla.sims.metaworld import MetaWorldScene, MetaWorldSceneKey, import_metaworld

        import_metaworld()
        self._scene = MetaWorldScene(MetaWorldSceneKey(task, SIZE, 42.0))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        full = self._scene.reset(seed or 0)
        return self.seen(full, self._scene.render(CAMERA)), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        full, reward, success = self._scene.step(action)
        return self.seen(full, self._scene.render(CAMERA)), reward, False, False, {"success": success}


class StockMetaWorld(_Drawn):
    """MetaWorld's own environment and renderer."""

    def __init__(self, task: str) -> None:
        from cosmos_rl_vla.sims.metaworld import import_metaworld

        import_metaworld()
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        made = ALL_V3_ENVIRONMENTS[f"{task}-v3"]
        self._env: Any = made(render_mode="rgb_array", camera_name=CAMERA, width=SIZE, height=SIZE)
        self._env._set_task_called, self._env._freeze_rand_vec, self._env.seeded_rand_vec = True, False, True
        self._env.model.camera(CAMERA).pos = (0.75, 0.075, 0.7)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._env.seed(seed or 0)
        full, _ = self._env.reset()
        return self.seen(full, self._env.render()[::-1, ::-1]), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        full, reward, _, _, info = self._env.step(action)
        return self.seen(full, self._env.render()[::-1, ::-1]), reward, False, False, {"success": info["success"]}
