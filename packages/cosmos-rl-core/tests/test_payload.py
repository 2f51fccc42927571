"""Rollout groups as bytes."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup
from cosmos_rl_core.wire.payload import decode_compared, decode_group, encode_group

DTYPES = ["bool", "uint8", "int16", "int32", "int64", "float32", "float64"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype=dtype, shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)


def rollout(num_terms=3, **changes):
    fields = dict(
        arrays={"tokens": np.arange(num_terms, dtype=np.int32)},
        rollout_logprobs=np.linspace(-1, 0, num_terms, dtype=np.float32),
        versions=np.full(num_terms, 4, dtype=np.int32),
        loss_mask=np.ones(num_terms, dtype=bool),
    )
    return Rollout(**(fields | changes))


@st.composite
def rollouts(draw):
    num_terms = draw(st.integers(0, 9))
    return rollout(
        num_terms,
        arrays=draw(st.dictionaries(st.text(), arrays, max_size=3)),
        rollout_logprobs=draw(hnp.arrays(np.float32, num_terms)),
        versions=draw(hnp.arrays(np.int32, num_terms)),
        loss_mask=draw(hnp.arrays(bool, num_terms)),
        text=draw(st.text()),
        finish_reason=draw(st.sampled_from(["stop", "length", "cancelled"])),
        reward=draw(st.floats(allow_nan=False)),
        reward_breakdown=draw(st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=2)),
        advantage=draw(st.floats(allow_nan=False)),
    )


groups = st.builds(
    RolloutGroup,
    prompt=st.builds(
        Prompt,
        sample_id=st.integers(0, 2**62),
        row=st.dictionaries(st.text(), json_values, max_size=3),
        origin=st.text(),
    ),
    rollouts=st.lists(rollouts(), max_size=3).map(tuple),
    prompt_text=st.text(),
)


def assert_same_array(left, right):
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert left.tobytes() == right.tobytes()  # bit for bit, NaN included


@given(groups)
def test_a_group_comes_back_bit_for_bit(group):
    back = decode_group(encode_group(group))
    assert back.prompt == replace(group.prompt, row={})  # rows stay in the controller
    assert back.prompt_text == group.prompt_text
    assert len(back.rollouts) == len(group.rollouts)
    for left, right in zip(group.rollouts, back.rollouts):
        assert left.arrays.keys() == right.arrays.keys()
        for name in left.arrays:
            assert_same_array(left.arrays[name], right.arrays[name])
        for name in ("rollout_logprobs", "versions", "loss_mask"):
            assert_same_array(getattr(left, name), getattr(right, name))
        for name in ("text", "finish_reason", "reward", "reward_breakdown", "advantage"):
            assert getattr(left, name) == getattr(right, name)


@given(groups, groups)
def test_the_rollouts_to_compare_are_sent_with_a_group(group, compared):
    payload = encode_group(group, compared=compared)
    assert encode_group(decode_compared(payload)) == encode_group(compared)
    assert encode_group(decode_group(payload)) == encode_group(group) != payload
    assert decode_compared(encode_group(group)) is None


@given(groups)
def test_rewards_get_the_row_too(group):
    assert decode_group(encode_group(group, for_rewards=True)).prompt == group.prompt


def test_rewards_get_the_media_and_those_of_the_prompt_once():
    picture, clip = np.arange(3000, dtype=np.uint8).reshape(10, 100, 3), np.zeros((2, 4, 4, 3), np.uint8)
    group = replace(one(), rollouts=tuple(rollout(media={"image": picture, "video": clip + i}) for i in range(3)))
    payload = encode_group(group, for_rewards=True)
    for i, back in enumerate(decode_group(payload).rollouts):
        assert_same_array(back.media["image"], picture)
        assert_same_array(back.media["video"], clip + i)
    assert len(payload) < 2 * picture.nbytes
    assert not decode_group(encode_group(group)).rollouts[0].media


def test_a_row_that_cannot_be_sent_to_a_reward_is_refused():
    group = replace(one(), prompt=Prompt(sample_id=1, row={"x": object()}))
    with pytest.raises(ValueError, match=r"the row cannot be sent to another process: .*object"):
        encode_group(group, for_rewards=True)


@given(groups, st.data())
def test_changed_bytes_are_a_group_or_a_clear_error(group, data):
    payload = bytearray(encode_group(group))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(decode_group(bytes(payload)), RolloutGroup)
    except ValueError as error:
        assert str(error)


def one(**changes):
    return RolloutGroup(prompt=Prompt(sample_id=1, row={}), rollouts=(rollout(**changes),))


def test_arrays_are_views_of_the_payload():
    payload = encode_group(one())
    tokens = decode_group(payload).rollouts[0].arrays["tokens"]
    assert np.shares_memory(tokens, np.frombuffer(payload, np.uint8))
    assert not tokens.flags.writeable


def test_a_strided_array_arrives_in_order():
    strided = np.arange(12, dtype=np.int64).reshape(3, 4).T[::2]
    back = decode_group(encode_group(one(arrays={"x": strided}))).rollouts[0].arrays["x"]
    assert back.tolist() == strided.tolist()


@pytest.mark.parametrize("dtype", ["float16", "complex64", "object", "<U3", ">i4", "datetime64[s]"])
def test_a_dtype_that_does_not_travel_is_named(dtype):
    with pytest.raises(ValueError, match=r"array 'x' is .*convert it"):
        encode_group(one(arrays={"x": np.zeros(2, dtype=dtype)}))


def forged(array):
    """A group whose only extra array is `array` as it lies on the wire: (dtype, shape, data)."""
    group = msgspec.msgpack.decode(encode_group(one(arrays={})))
    group[3][0][0] = {"x": array}
    return msgspec.msgpack.encode(group)


@pytest.mark.parametrize(
    "array",
    [
        ("int32", [3], b"12345678"),
        ("int32", [2**31, 2**31], b""),
        ("float64", [], b""),
        ("int32", [-1], b"1234"),
        ("object", [1], b"12345678"),
        ("uint8", [1] * 9, b"1"),
    ],
)
def test_an_array_whose_size_does_not_fit_is_refused(array):
    with pytest.raises(ValueError):
        decode_group(forged(array))


def test_terms_of_unequal_length_are_refused():
    bad = one(versions=np.zeros(2, np.int32))
    with pytest.raises(ValueError, match=r"versions is int32 \[2\], the rollout needs int32 \[3\]"):
        decode_group(encode_group(bad))
