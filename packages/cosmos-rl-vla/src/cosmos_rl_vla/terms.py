"""Decisions to terms: K decisions of H actions in D dimensions, and the mask of those in a loss.

    terms     count     log-probability
    token     K H D     one dimension of an action
    action    K H       an action: the sum over its dimensions
    chunk     K         a chunk: the sum over its executed actions

    steps     count     reward and value
    chunk     K         the sum over its executed actions
    action    executed  one per action

Actions after the end of an episode are not executed: their terms are masked, and they have no step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from cosmos_rl_vla.config import StepName, TermName


def terms_of(components: Any, valid: Any, *, terms: TermName) -> Any:
    """Sum log-probabilities [K, H, D] into terms [T]; numpy or torch, `valid` [K, H] of the same kind.

    Actions that were not executed count as 0.
    """
    executed = components * valid[..., None]
    if terms == "token":
        return executed.reshape(-1)
    return executed.sum(-1).reshape(-1) if terms == "action" else executed.sum((-2, -1))


def term_mask(valid: np.ndarray, action_dim: int, *, terms: TermName) -> np.ndarray:
    """Return the mask of executed terms [T] bool, from executed actions `valid` [K, H]."""
    if terms == "token":
        return np.repeat(valid.reshape(-1), action_dim)
    return np.asarray(valid.reshape(-1) if terms == "action" else valid.any(-1))


def steps_of_actions(valid: np.ndarray, *, steps: StepName) -> np.ndarray:
    """Return the step [K, H] int32 of each action; one not executed has the step of the last executed before it."""
    decisions, horizon = valid.shape
    if steps == "chunk":
        return np.repeat(np.arange(decisions, dtype=np.int32), horizon).reshape(valid.shape)
    return np.maximum(np.cumsum(valid.reshape(-1)) - 1, 0).astype(np.int32).reshape(valid.shape)


def term_steps(valid: np.ndarray, action_dim: int, *, terms: TermName, steps: StepName) -> np.ndarray:
    """Return the step [T] int32 of each term. Raises ValueError for terms of chunks with rewards per action."""
    of_actions = steps_of_actions(valid, steps=steps)
    if terms == "token":
        return np.repeat(of_actions.reshape(-1), action_dim)
    if terms == "action":
        return of_actions.reshape(-1)
    if steps == "action":
        raise ValueError('steps = "action" with terms = "chunk": one ratio cannot have several advantages')
    return of_actions[:, 0]


def rewards_of(rewards: np.ndarray, valid: np.ndarray, *, steps: StepName) -> np.ndarray:
    """Sum the simulator's rewards [K, H] into steps [S]."""
    return (rewards * valid).sum(-1) if steps == "chunk" else rewards[valid]


def values_of(values: np.ndarray, valid: np.ndarray, *, steps: StepName) -> np.ndarray:
    """Return the value of each step [S] from values of decisions [K, V]; zeros for V = 0."""
    if values.shape[1] == 0:
        return np.zeros(len(rewards_of(valid, valid, steps=steps)), np.float32)
    if steps == "chunk":
        return values[:, 0]
    return (np.broadcast_to(values, valid.shape) if values.shape[1] == 1 else values)[valid]
