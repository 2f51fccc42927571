"""Observations of robots as clients send them, checked against what the policy was trained with.

    {"observation/image": ..., "observation/state": ..., "prompt": ...}     openpi, LIBERO
    {"images": {"cam_high": ...}, "state": ..., "prompt": ...}              openpi, ALOHA
    {"observation.images.front": ..., "observation.state": ...}             lerobot

A key is matched by its last part, so that camera "front" is any of front, images/front, observation.images.front.
No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cosmos_rl_vla.actions import ActionStats

PREVIOUS, DELAY, PROMPT = "prev_chunk_left_over", "inference_delay", "prompt"
"""Keys of an observation besides cameras and state; the first two, named as in lerobot, ask for real-time chunking."""


class BadObservation(ValueError):
    """An observation that the policy cannot act on; the message names the key and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RobotObservation:
    """A checked observation."""

    images: np.ndarray
    """uint8 [cameras, height, width, 3], in the policy's order."""
    state: np.ndarray
    """[n] float32, in the robot's units."""
    prompt: str
    previous: np.ndarray | None = None
    """[k, D] float32, in the robot's units: actions of the last chunk that were not executed at this observation."""
    delay: int = 0
    """Number of those that are executed before the new chunk arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationLayout:
    """Names, sizes and units of observations and actions of a policy."""

    cameras: Sequence[str]
    """Names in the order of training."""
    image_size: tuple[int, int] | None
    """Height and width of training; None where the checkpoint does not have them: the model resizes any."""
    state_keys: Sequence[str]
    """Keys of proprioception, whose numbers are joined in this order."""
    state_dim: int
    action_dim: int
    horizon: int
    """Actions of a chunk."""
    stats: ActionStats
    prompt: str = ""
    """Instruction of observations without one."""
    state_limit: float = 10.0
    """Largest normalised state, about 1 in training: beyond it, the robot has other units or statistics. 0: none."""
    _optional: frozenset[str] = field(default=frozenset((PREVIOUS, DELAY, PROMPT)), init=False)

    def read(self, sent: Any) -> RobotObservation:
        """Return a client's observation in the policy's form. Raises BadObservation."""
        if not isinstance(sent, Mapping):
            raise BadObservation(f"an observation is a map of images, state and prompt, not {type(sent).__name__}")
        values = self._by_last_part(sent)
        state = self._state(values)
        prompt = values.get(PROMPT, self.prompt)
        if not isinstance(prompt, str) or not prompt.strip():
            raise BadObservation(f"{PROMPT}: the instruction is missing; send it, or start the server with --prompt")
        previous, delay = self._previous(values)
        return RobotObservation(images=self._images(values), state=state, prompt=prompt, previous=previous, delay=delay)

    def example(self) -> RobotObservation:
        """Return an observation like the robots', for the warm-up."""
        height, width = self.image_size or (224, 224)
        centre = np.zeros(self.state_dim) if self.stats.state is None else self.stats.state.affine()[0]
        images = np.zeros((len(self.cameras), height, width, 3), np.uint8)
        return RobotObservation(images=images, state=centre.astype(np.float32), prompt=self.prompt or "warm up")

    def _by_last_part(self, sent: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the values by the last part of their keys, without images of cameras that the policy does not use."""
        known = {*map(last_part, (*self.cameras, *self.state_keys)), *self._optional}
        values: dict[str, Any] = {}
        for key, value in _leaves(sent):
            name = last_part(key)
            if name in values:
                raise BadObservation(f"{key}: a second {name!r}; send each once")
            if name not in known and getattr(value, "ndim", 0) != 3:
                raise BadObservation(f"{key}: unknown; the policy takes {', '.join(sorted(known))}")
            values[name] = value
        return values

    def _state(self, values: Mapping[str, Any]) -> np.ndarray:
        parts = []
        for key in self.state_keys:
            if (name := last_part(key)) not in values:
                raise BadObservation(f"{key}: missing; the policy needs {self.state_dim} numbers of proprioception")
            parts.append(_numbers(values[name], key).reshape(-1))
        state, key = np.concatenate(parts) if parts else np.zeros(0, np.float32), ", ".join(self.state_keys)
        if len(state) != self.state_dim:
            raise BadObservation(f"{key}: {len(state)} numbers, the policy was trained with {self.state_dim}")
        far = np.abs(self.stats.normalise_state(state)) if self.state_limit else np.zeros(1)
        if far.size and far.max() > self.state_limit:
            place = int(far.argmax())
            assert self.stats.state is None or len(self.stats.state) == len(state)
            raise BadObservation(
                f"{key}[{place}] = {state[place]:g} is {far[place]:.3g} after normalisation, about 1 in training: the "
                "robot has other units, or the policy other statistics (--state-limit 0 lets it through)"
            )
        return state

    def _images(self, values: Mapping[str, Any]) -> np.ndarray:
        images = []
        for camera in self.cameras:
            if (name := last_part(camera)) not in values:
                sent = [key for key, value in values.items() if getattr(value, "ndim", 0) == 3]
                raise BadObservation(f"{camera}: this camera is missing; sent: {', '.join(sent) or 'none'}")
            image = values[name]
            if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3:
                what = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
                raise BadObservation(f"{camera}: {what}, needs uint8 [height, width, 3]")
            if image.shape[-1] != 3 and image.shape[0] == 3:  # as openpi's ALOHA robots send them
                image = image.transpose(1, 2, 0)
            if image.shape[-1] != 3 or (self.image_size is not None and image.shape[:2] != self.image_size):
                needed = "height, width" if self.image_size is None else "{}, {}".format(*self.image_size)
                raise BadObservation(f"{camera}: {list(image.shape)}, the policy was trained with [{needed}, 3]")
            images.append(image)
        if len({image.shape for image in images}) > 1:
            sizes = ", ".join(f"{name} {list(image.shape)}" for name, image in zip(self.cameras, images, strict=True))
            raise BadObservation(f"cameras of unequal sizes ({sizes}): resize them to one")
        return np.stack(images) if images else np.zeros((0, 1, 1, 3), np.uint8)

    def _previous(self, values: Mapping[str, Any]) -> tuple[np.ndarray | None, int]:
        delay = values.get(DELAY, 0)
        if not isinstance(delay, int | np.integer) or isinstance(delay, bool) or delay < 0:
            raise BadObservation(f"{DELAY}: {delay!r}, needs a number of actions of at least 0")
        if PREVIOUS not in values or values[PREVIOUS] is None:
            return None, 0
        previous = _numbers(values[PREVIOUS], PREVIOUS)
        if previous.ndim != 2 or previous.shape[1] != self.action_dim or len(previous) > self.horizon:
            raise BadObservation(
                f"{PREVIOUS}: {list(previous.shape)}, needs at most {self.horizon} actions of {self.action_dim} numbers"
            )
        if delay > len(previous):
            raise BadObservation(f"{DELAY}: {delay}, but {PREVIOUS} has {len(previous)} actions")
        return (previous, int(delay)) if len(previous) else (None, 0)


def last_part(key: str) -> str:
    """Return the name behind the last "/" or "." of a key."""
    return key.replace(".", "/").rpartition("/")[2]


def _leaves(sent: Mapping[Any, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in sent.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{at}{key}/")
        else:
            yield f"{at}{key}", value


def _numbers(value: Any, key: str) -> np.ndarray:
    try:
        array = np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError):
        raise BadObservation(f"{key}: needs numbers, not {type(value).__name__}") from None
    if not np.isfinite(array).all():
        raise BadObservation(f"{key}: has numbers that are not finite")
    return array
