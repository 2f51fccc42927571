"""Encodes a rollout group as bytes, for messages, the spool and the processes of rewards.

The format is msgpack; an array is (dtype, shape, raw little-endian bytes). Arrays that all rollouts have in common,
such as the prompt's tokens and pictures, are in it once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from cosmos_rl_core.types import Episode, Exchange, FinishReason, Prompt, Rollout, RolloutGroup

_DTYPES = {
    "bool": np.dtype("?"),
    "uint8": np.dtype("u1"),
    "int16": np.dtype("<i2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=8)]
    data: memoryview


class _Episode(msgspec.Struct, frozen=True, array_like=True):
    term_steps: _Array
    values: _Array
    rewards: _Array
    advantages: _Array | None
    returns: _Array | None


class _Rollout(msgspec.Struct, frozen=True, array_like=True):
    arrays: dict[str, _Array]
    rollout_logprobs: _Array
    versions: _Array
    loss_mask: _Array
    text: str
    finish_reason: FinishReason
    reward: float
    reward_breakdown: dict[str, float]
    advantage: float
    episode: _Episode | None
    media: dict[str, _Array] = {}
    exchanges: tuple[Exchange, ...] = ()


class _Group(msgspec.Struct, frozen=True, array_like=True):
    sample_id: int
    origin: str
    prompt_text: str
    rollouts: tuple[_Rollout, ...]
    shared: dict[str, _Array]
    """Arrays of each rollout."""
    media: dict[str, str] = {}
    row: dict[str, Any] = {}
    shared_media: dict[str, _Array] = {}
    """Media of each rollout, such as the prompt's pictures."""
    compared: bytes = b""
    """The group of `decode_compared`, encoded; empty if there is none."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Group).decode


def encode_group(group: RolloutGroup, *, for_rewards: bool = False, compared: RolloutGroup | None = None) -> bytes:
    """Return the group as bytes; only `for_rewards` with its row and its rollouts' media.

    compared: rollouts that are not trained on, by which the policy compares the engine with itself.

    Raises ValueError for an array of an unsupported dtype, and for a value of the row that is not JSON-like.
    """
    prompt, rollouts = group.prompt, group.rollouts
    shared = _shared([rollout.arrays for rollout in rollouts])
    shared_media = _shared([rollout.media for rollout in rollouts]) if for_rewards else {}
    packed = tuple(_pack_rollout(rollout, without=shared) for rollout in rollouts)
    if for_rewards:
        packed = tuple(
            msgspec.structs.replace(one, media=_pack_all(rollout.media, without=shared_media))
            for one, rollout in zip(packed, rollouts, strict=True)
        )
    message = _Group(
        sample_id=prompt.sample_id,
        origin=prompt.origin,
        prompt_text=group.prompt_text,
        rollouts=packed,
        shared=_pack_all(shared),
        media=dict(group.media),
        row=dict(prompt.row) if for_rewards else {},
        shared_media=_pack_all(shared_media),
        compared=b"" if compared is None else encode_group(compared),
    )
    try:
        return _encode(message)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"the row cannot be sent to another process: {error}") from error


def _shared(of_rollouts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the arrays that are the same object in all rollouts, of which there are several."""
    if len(of_rollouts) < 2:
        return {}
    first, *others = of_rollouts
    return {name: array for name, array in first.items() if all(each.get(name) is array for each in others)}


def decode_group(payload: bytes | memoryview) -> RolloutGroup:
    """Return the group; its row is empty unless it was encoded for rewards.

    Its arrays are read-only views of `payload`: copy before writing.

    Raises ValueError if the bytes are not a group, or if an array's size does not match its dtype and shape.
    """
    return _unpack_group(_parse(payload))


def decode_compared(payload: bytes | memoryview) -> RolloutGroup | None:
    """Return the rollouts that a group carries for the comparison of engine and policy. Raises like `decode_group`."""
    compared = _parse(payload).compared
    return decode_group(compared) if compared else None


def _parse(payload: bytes | memoryview) -> _Group:
    try:
        return _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"these bytes are not a rollout group: {error}") from error


def _unpack_group(group: _Group) -> RolloutGroup:
    shared, shared_media = _unpack_all(group.shared), _unpack_all(group.shared_media)
    return RolloutGroup(
        prompt=Prompt(sample_id=group.sample_id, row=group.row, origin=group.origin),
        rollouts=tuple(_unpack_rollout(rollout, shared, shared_media) for rollout in group.rollouts),
        prompt_text=group.prompt_text,
        media=group.media,
    )


def _pack_rollout(rollout: Rollout, *, without: Collection[str]) -> _Rollout:
    return _Rollout(
        arrays=_pack_all(rollout.arrays, without=without),
        rollout_logprobs=_pack(rollout.rollout_logprobs, "rollout_logprobs"),
        versions=_pack(rollout.versions, "versions"),
        loss_mask=_pack(rollout.loss_mask, "loss_mask"),
        text=rollout.text,
        finish_reason=rollout.finish_reason,
        reward=float(rollout.reward),
        reward_breakdown={name: float(value) for name, value in rollout.reward_breakdown.items()},
        advantage=float(rollout.advantage),
        episode=None if rollout.episode is None else _pack_episode(rollout.episode),
        exchanges=rollout.exchanges,
    )


def _pack_episode(episode: Episode) -> _Episode:
    advantages, returns = episode.advantages, episode.returns
    return _Episode(
        term_steps=_pack(episode.term_steps, "term_steps"),
        values=_pack(episode.values, "values"),
        rewards=_pack(episode.rewards, "rewards"),
        advantages=None if advantages is None else _pack(advantages, "advantages"),
        returns=None if returns is None else _pack(returns, "returns"),
    )


def _unpack_rollout(
    rollout: _Rollout, shared: Mapping[str, np.ndarray], shared_media: Mapping[str, np.ndarray]
) -> Rollout:
    num_terms = math.prod(rollout.rollout_logprobs.shape)
    return Rollout(
        arrays={**shared, **_unpack_all(rollout.arrays)},
        rollout_logprobs=_unpack_terms(rollout.rollout_logprobs, "rollout_logprobs", "float32", num_terms),
        versions=_unpack_terms(rollout.versions, "versions", "int32", num_terms),
        loss_mask=_unpack_terms(rollout.loss_mask, "loss_mask", "bool", num_terms),
        text=rollout.text,
        media={**shared_media, **_unpack_all(rollout.media)},
        finish_reason=rollout.finish_reason,
        reward=rollout.reward,
        reward_breakdown=rollout.reward_breakdown,
        advantage=rollout.advantage,
        episode=None if rollout.episode is None else _unpack_episode(rollout.episode, num_terms),
        exchanges=rollout.exchanges,
    )


def _unpack_episode(episode: _Episode, num_terms: int) -> Episode:
    num_steps = math.prod(episode.rewards.shape)

    def of_steps(array: _Array | None, name: str) -> np.ndarray | None:
        return None if array is None else _unpack_terms(array, name, "float32", num_steps)

    return Episode(
        term_steps=_unpack_terms(episode.term_steps, "term_steps", "int32", num_terms),
        values=_unpack_terms(episode.values, "values", "float32", num_steps + 1),
        rewards=_unpack_terms(episode.rewards, "rewards", "float32", num_steps),
        advantages=of_steps(episode.advantages, "advantages"),
        returns=of_steps(episode.returns, "returns"),
    )


def _pack_all(arrays: Mapping[str, np.ndarray], *, without: Collection[str] = ()) -> dict[str, _Array]:
    return {name: _pack(array, name) for name, array in arrays.items() if name not in without}


def _unpack_all(arrays: Mapping[str, _Array]) -> dict[str, np.ndarray]:
    return {name: _unpack(array, name) for name, array in arrays.items()}


def _pack(array: np.ndarray, name: str) -> _Array:
    dtype = _NAMES.get(array.dtype)  # `dtype.name` is computed anew each time
    if dtype is None:
        raise ValueError(f"array {name!r} is {array.dtype}: convert it to one of {', '.join(_DTYPES)}")
    return _Array(dtype=dtype, shape=array.shape, data=np.ascontiguousarray(array).data)


def _unpack(array: _Array, name: str) -> np.ndarray:
    dtype = _DTYPES.get(array.dtype)
    if dtype is None:
        raise ValueError(f"array {name!r} has the unknown dtype {array.dtype!r}; known: {', '.join(_DTYPES)}")
    expected = math.prod(array.shape) * dtype.itemsize
    if len(array.data) != expected:
        form = f"{array.dtype} {list(array.shape)}"
        raise ValueError(f"array {name!r} of {form} needs {expected} bytes, received {len(array.data)}")
    return np.frombuffer(array.data.toreadonly(), dtype=dtype).reshape(array.shape)


def _unpack_terms(array: _Array, name: str, dtype: str, num_terms: int) -> np.ndarray:
    if array.dtype != dtype or array.shape != (num_terms,):
        raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, the rollout needs {dtype} [{num_terms}]")
    return _unpack(array, name)
