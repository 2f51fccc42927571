"""Converts between a model's actions and a simulator's, with statistics saved as `action_stats.json`.

    demonstrations -- gripper backwards, normalise --> targets of the model
    outputs of the model -- unnormalise, gripper --> actions of the simulator

No torch here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_vla.normalise import Spread, narrowest
from cosmos_rl_vla.published import LEROBOT_FILE, has_lerobot_spreads, lerobot_spreads, openpi_file, openpi_spreads

FILE = "action_stats.json"
_GRIPPER = ("dim", "unit", "binary", "invert")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gripper:
    """Steps applied to a gripper's value after un-normalisation, in the order of the fields. OpenVLA on LIBERO: all."""

    dim: int
    """Index of the dimension; -1 is the last."""
    unit: bool = False
    """Scale it from [0, 1] to [-1, 1]."""
    binary: bool = False
    """Take its sign; the sign of 0 is 1."""
    invert: bool = False
    """Negate it, for a simulator whose sign is opposite to the demonstrations'."""

    def apply(self, actions: np.ndarray) -> np.ndarray:
        """[..., D] -> [..., D]."""
        actions = actions.copy()
        value = actions[..., self.dim]
        if self.unit:
            value = 2 * value - 1
        if self.binary:
            value = np.where(value >= 0, 1.0, -1.0)
        actions[..., self.dim] = -value if self.invert else value
        return actions

    def undo(self, actions: np.ndarray) -> np.ndarray:
        """Invert `apply`: [..., D] in the simulator's units -> [..., D]."""
        actions = np.array(actions, np.float32)
        value = -actions[..., self.dim] if self.invert else actions[..., self.dim]
        if self.binary:
            value = np.where(value >= 0, 1.0, -1.0)
        actions[..., self.dim] = (value + 1) / 2 if self.unit else value
        return actions


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionStats:
    """Statistics saved beside a policy, which scale its outputs."""

    action: Spread
    state: Spread | None = None
    """Statistics of proprioception; None leaves it unnormalised."""
    gripper: Gripper | None = None

    @classmethod
    def unit(cls, dims: int) -> ActionStats:
        """Return the identity, for actions in [-1, 1]."""
        one = np.ones(dims, np.float32)
        return cls(action=Spread.between(-one, one))

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        """Demonstrated actions [..., D], in the simulator's units -> targets of the model."""
        return self.action.normalise(actions if self.gripper is None else self.gripper.undo(actions))

    def unnormalise(self, actions: np.ndarray) -> np.ndarray:
        """A model's actions [..., D] -> the simulator's units, float32. The simulator clips them to its own bounds."""
        actions = self.action.unnormalise(actions)
        return actions if self.gripper is None else self.gripper.apply(actions)

    def normalise_state(self, state: np.ndarray) -> np.ndarray:
        """Proprioception [..., n] -> input of the model, float32."""
        return state.astype(np.float32) if self.state is None else self.state.normalise(state)

    def check(self, *, action_dim: int, state_dim: int) -> None:
        """Raise UserError unless the statistics have these dimensions of actions and states."""
        if len(self.action) != action_dim:
            raise UserError(
                f"statistics of {len(self.action)}-dimensional actions, a simulator of {action_dim}: use the "
                f"{FILE} of demonstrations made in this simulator"
            )
        if self.state is not None and len(self.state) != state_dim:
            raise UserError(
                f"statistics of {len(self.state)}-dimensional states, a simulator of {state_dim}: use the "
                f"{FILE} of demonstrations made in this simulator"
            )
        if self.gripper is not None and not -action_dim <= self.gripper.dim < action_dim:
            raise UserError(
                f"gripper.dim {self.gripper.dim} of {action_dim}-dimensional actions: must be 0 .. {action_dim - 1}"
            )

    def check_demonstrated(self, low: np.ndarray, high: np.ndarray, *, origin: str) -> None:
        """Raise UserError for demonstrated actions, between low and high [D], that have no right image."""
        if self.gripper is not None and self.gripper.unit:
            dim = self.gripper.dim % len(low)
            if 0 <= low[dim] < high[dim]:
                raise UserError(
                    f"{origin}: dimension {dim} of the actions, the gripper, goes from {low[dim]:g} to {high[dim]:g}, "
                    "and in the simulator's units from -1 to 1: convert it, or use an action_stats.json without gripper"
                )
        rest, still = self.action.mean, self.action.still
        moves = still & (np.maximum(np.abs(low - rest), np.abs(high - rest)) > 4 * narrowest(rest))
        for dim in np.flatnonzero(moves):
            raise UserError(
                f"{origin}: dimension {dim} of the actions is {rest[dim]:g} throughout the model's statistics, and "
                f"goes from {low[dim]:g} to {high[dim]:g} here: set [model] stats to statistics of these demonstrations"
            )

    def save(self, directory: Path) -> None:
        """Write `action_stats.json`."""
        stats: dict[str, Any] = {"action": self.action.to_json()}
        if self.state is not None:
            stats["state"] = self.state.to_json()
        if self.gripper is not None:
            stats["gripper"] = {name: getattr(self.gripper, name) for name in _GRIPPER}
        (directory / FILE).write_text(json.dumps(stats, indent=1) + "\n")

    @classmethod
    def beside(cls, directory: Path, *, family: str = "") -> ActionStats | None:
        """Return the statistics of a model's directory, ours, lerobot's or openpi's; None without any."""
        exists = (directory / FILE).is_file() or has_lerobot_spreads(directory) or openpi_file(directory) is not None
        return cls.load(directory, family=family) if exists else None

    @classmethod
    def load(cls, path: Path, *, family: str = "") -> ActionStats:
        """Read `action_stats.json`, from the file or its directory. Raises UserError.

        Also reads openpi's norm_stats.json, and a directory saved by lerobot or openpi.
        family: of the model, which selects the statistics in openpi's file.
        """
        if path.is_dir() and not (path / FILE).is_file() and (path / LEROBOT_FILE).is_file():
            return _of_spreads(lerobot_spreads(path), origin=path / LEROBOT_FILE)
        if path.is_dir():
            path = path / FILE if (path / FILE).is_file() else openpi_file(path) or path / FILE
        stats = read_json_object(path, hint="SFT writes it, or use the one that the model was published with")
        if "norm_stats" in stats:
            return _of_spreads(openpi_spreads(stats, family=family, origin=str(path)), origin=path)
        if not isinstance(stats.get("action"), dict):
            raise UserError(f'{path}: no object "action"; needs {{"action": {{...}}, "state": {{...}}}}')
        gripper, state = stats.get("gripper"), stats.get("state")
        unknown = sorted(set(gripper or ()) - set(_GRIPPER))
        if unknown or (gripper is not None and "dim" not in gripper):
            raise UserError(f"{path}: gripper needs dim, and may have no keys but {', '.join(_GRIPPER)}: {gripper}")
        return cls(
            action=Spread.from_json(stats["action"], origin=f'{path}, "action"'),
            state=None if state is None else Spread.from_json(state, origin=f'{path}, "state"'),
            gripper=None if gripper is None else Gripper(**gripper),
        )


def _of_spreads(spreads: dict[str, Spread], *, origin: Path) -> ActionStats:
    if "action" not in spreads:
        raise UserError(f"{origin} has no statistics of actions; use the {FILE} of demonstrations")
    return ActionStats(action=spreads["action"], state=spreads.get("state"))
