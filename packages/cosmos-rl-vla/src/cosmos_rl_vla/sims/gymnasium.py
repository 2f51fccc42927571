"""Any environment of gymnasium, with pixels, numbers, or both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.sims.base import SimObservation, SimSpec, Stepped

_RENDERED = "render"
_ONLY = "image"


class Gymnasium:
    """`gymnasium.make(id)`; see Simulator.

    Actions are those of a Box, flattened; for a Discrete space with n choices they are n scores, and the highest is
    taken. Images are the uint8 [H, W, 3] parts of the observation ("image" if it has no other part, else by key), and
    optionally the output of `render()` ("render"). The state is all other parts, flattened.
    `init` seeds the reset, and decides the episode as far as the environment is deterministic given its seed.
    """

    def __init__(
        self,
        *,
        id: str,
        instruction: str = "",
        tasks: Mapping[str, str] | None = None,
        render: bool = False,
        max_steps: int | None = None,
        success: str = "is_success",
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the environment, with `kwargs`.

        Its only task is named by the `id`, with the `instruction`; with `tasks` (sentences by name) `reset` gets
        options={"task": name}. `max_steps` replaces the environment's own limit. `success` is the key of `info` with
        the success flag; an episode without the key has failed. Raises UserError for an environment that does not
        exist, refuses its arguments, or has spaces of other kinds.
        """
        import gymnasium

        self._tasks = dict(tasks or {id: instruction})
        self._optional = tasks is not None
        self._success, self._render = success, render
        arguments: dict[str, Any] = {**(kwargs or {}), **({"render_mode": "rgb_array"} if render else {})}
        try:
            self._env = gymnasium.make(id, max_episode_steps=max_steps, disable_env_checker=True, **arguments)
            self._observation: Any = self._env.reset(seed=0)[0]
            cameras = {name: image.shape[:2] for name, image in self._images().items()}
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise UserError(f"simulator gymnasium: {id!r}: {error}") from error
        limit = max_steps or (self._env.spec.max_episode_steps if self._env.spec else None)
        if limit is None:
            raise UserError(f"simulator gymnasium: {id!r} has no step limit of its own; set max_steps")
        low, high = self._limits()
        self.spec = SimSpec(
            cameras=cameras,
            state_dim=len(self._state()),
            action_dim=len(low),
            action_low=tuple(low.tolist()),
            action_high=tuple(high.tolist()),
            max_steps=limit,
            control_hz=float(self._env.metadata.get("render_fps", 30)),
        )

    def instruction(self, task: str) -> str:
        """Return the instruction of a task. Raises UserError for an unknown task."""
        if task not in self._tasks:
            raise UserError(f"simulator gymnasium has no task {task!r}; tasks: {', '.join(self._tasks)}")
        return self._tasks[task]

    def reset(self, task: str, init: int) -> None:
        """Seed and reset the environment; see Simulator."""
        self.instruction(task)
        options = {"task": task} if self._optional else None
        self._observation, _ = self._env.reset(seed=init % 2**64, options=options)

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """Step the environment; see Simulator."""
        self._observation, reward, terminated, truncated, info = self._env.step(self._action(action))
        return Stepped(
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated) and not terminated,
            success=bool(info.get(self._success, False)),
        )

    def observe(self) -> SimObservation:
        """Return the parts of the observation; see Simulator."""
        return SimObservation(images=self._images(), state=self._state())

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _parts(self) -> dict[str, tuple[Any, Any]]:
        """Return spaces and values by name."""
        import gymnasium

        space = self._env.observation_space
        if isinstance(space, gymnasium.spaces.Dict):
            return {name: (part, self._observation[name]) for name, part in space.items()}
        return {_ONLY: (space, self._observation)}

    def _images(self) -> dict[str, NDArray[np.uint8]]:
        images = {name: value for name, (space, value) in self._parts().items() if _is_image(space)}
        if self._render:
            images[_RENDERED] = np.asarray(self._env.render())
        return images

    def _state(self) -> NDArray[np.float32]:
        from gymnasium.spaces import flatten

        parts = [part for part in self._parts().values() if not _is_image(part[0])]
        numbers = [np.asarray(flatten(space, value), np.float32) for space, value in parts]
        return np.concatenate([np.zeros(0, np.float32), *numbers])

    def _limits(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the minimum and maximum action, [D] each."""
        from gymnasium.spaces import Box, Discrete

        space = self._env.action_space
        if isinstance(space, Box):
            return space.low.ravel(), space.high.ravel()
        if isinstance(space, Discrete):
            one = np.ones(int(space.n), np.float32)
            return -one, one
        raise UserError(f"simulator gymnasium supports Box and Discrete action spaces, not {space}")

    def _action(self, action: NDArray[np.float32]) -> Any:
        from gymnasium.spaces import Box, Discrete

        space = self._env.action_space
        if isinstance(space, Discrete):
            return space.start + int(np.argmax(action))
        assert isinstance(space, Box)
        return np.clip(action.reshape(space.shape), space.low, space.high).astype(space.dtype)


def _is_image(space: Any) -> bool:
    return len(space.shape or ()) == 3 and space.shape[-1] == 3 and space.dtype == np.uint8
